"""Fuses the heads that no formula is known for, as row regions.

In: a region of a Dynamo graph, and the heads that :mod:`fxpass.match` found in it. Out: a
:class:`RegionMatch` for each row region, which the graph has now in the place of its nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpass.capture.capture import Captured, RowCall, capture, made_of
from fxpass.capture.custom import Custom
from fxpass.capture.function import trained
from fxpass.capture.slice import Scope
from fxpass.capture.values import PRODUCTS
from fxpass.casts.casts import Cast
from fxpass.deferred.tensor import Recipe
from fxpass.graph.calls import storage
from fxpass.graph.functions import function_of
from fxpass.graph.hazards import Writers, writers_in
from fxpass.graph.nodes import NoMatch, hint, is_tensor, nested_graph, value
from fxpass.graph.placements import is_dtensor
from fxpass.graph.region import CHECKPOINTS, NESTED_REGIONS, Region
from fxpass.graph.source import source_line
from fxpass.lower.normal import lower
from fxpass.lower.records import Unknown
from fxpass.match.head import Head
from fxpass.match.heads import looks_like_a_head
from fxpass.match.leaving import deferred_outputs
from fxpass.match.match import Found
from fxpass.match.modes import Mode, modes_of
from fxpass.match.profitability import LEAST_CLASSES, stored
from fxpass.plan.plan import MIB, size
from fxpass.region.compile import warm
from fxpass.rewrite.copies import copied
from fxpass.rewrite.known import OfRegion, with_total
from fxpass.rewrite.lowered import Inserted, Lowered
from fxpass.rewrite.matches import RegionMatch, choice_of, match_of, words_of
from fxpass.rewrite.outputs import Restore, as_compiled, both, defer_outputs, recipe_of
from fxpass.rewrite.regions import Calls, rewrite_region
from fxpass.rewrite.traced import forward, traced
from fxpass.settings import Settings

log = logging.getLogger(__name__)
# Parts of the least logits that a tile of the vocabulary, or of an adapter, may be.
PARTS = 8


class Fused(NamedTuple):
    """The row regions of a graph; ``restore`` wraps the compiled graph, so that it returns the
    outputs that Dynamo expects."""

    matches: list[RegionMatch]
    restore: Restore = as_compiled
    casts: tuple[Cast, ...] = ()


def fuse_regions(
    region: Region, found: Found, settings: Settings, among: Collection[Node] = ()
) -> Fused:
    """Rewrites the row regions of a graph.

    Args:
        region: the region of the graph.
        found: the heads of which the formulas are known, and those that cost too much.
        among: where not empty, one head of each row region is one of these.
    """
    if not region.plain or region.backward:
        return Fused([])
    known = {h.flow.linear.node for h in found.heads if not _reads_logits(h)}
    graph, made, restore = region.module.graph, list[RegionMatch](), as_compiled
    casts, heads = list[Cast](), set[Node]()
    candidates = [n for n in graph.nodes if n not in found.costs and _may_be_large(n, settings)]
    todo = [n for n in candidates if not among or n in among]
    modes, writers = modes_of(region), writers_in(graph)
    while todo:
        node, untouched = todo[0], None
        try:
            captured = _captured(region, node, candidates, settings, modes, writers)
            beside = [n for n in graph.nodes if n in known | heads and n not in captured.heads]
            calls = [_lowered(call, captured, beside, settings) for call in captured.calls]
            if not known.isdisjoint(captured.heads) and None in calls:
                raise NoMatch(node, "has no normal form")
            calls = [
                lowered or traced(call, settings.memory_mb, settings.inner == "inductor")
                for lowered, call in zip(calls, captured.calls, strict=True)
            ]
            recipes = _deferred(region, captured, settings, modes)
            match, untouched = match_of(captured), copied(graph)
            # the outputs read its nodes no more, so that the rewrite erases them
            drop = settings.logits == "drop"
            deferred = defer_outputs(region.module, recipes, drop=drop)
            emitter, inserted = rewrite_region(graph, captured, calls)
            made_calls = [_totalled(graph, emitter, one, modes_of(region)) for one in inserted]
            graph.lint()
            match = replace(match, choices=tuple(map(choice_of, made_calls)))
            specs = [one.choice.spec for one in made_calls if isinstance(one, Inserted)]
            if len(specs) == len(made_calls):
                match = replace(match, words=words_of(specs, match.named))
            if recipes:
                match = replace(match, logits_mode="drop" if drop else "defer")
        except Exception as error:
            # an unforeseen program runs without the rewrite
            if not isinstance(error, NoMatch | GuardOnDataDependentSymNode):
                log.warning("%s: the row region failed", source_line(node), exc_info=True)
            if untouched is not None:
                region.module.graph = untouched
                return Fused(made, restore, tuple(casts))
            if looks_like_a_head(node):
                log.debug("%s: no row region: %s", source_line(node), error)
            todo.remove(node)
            continue
        region.module.recompile()
        restore = both(restore, deferred)
        casts += emitter.casts
        heads |= {*captured.heads}
        kernels = dict[str, None]()
        for call in made_calls if settings.inner == "inductor" else ():
            if isinstance(call, Inserted):
                continue
            tensors: Any = call.args[0]
            kernels |= dict.fromkeys(warm(str(call.args[1]), value(tensors[0]).device))
        made.append(replace(match, kernels=tuple(kernels)))
        modes, writers = modes_of(region), writers_in(graph)
        todo = [n for n in todo if n not in captured.heads]
        candidates = [n for n in candidates if n not in captured.heads]
    return Fused(made, restore, tuple(casts))


def _lowered(
    call: RowCall, captured: Captured, beside: Sequence[Node], settings: Settings
) -> Lowered | None:
    """The normal form of a call; None if it has none."""
    custom = any(isinstance(step.run, Custom) for step in captured.slice.steps)
    if custom or sum(leaf.kind == "logits" for leaf in call.leaves) != 1:
        return None  # of a custom function, the backward is its own
    trains = any(output.trained for output in call.outputs)
    try:
        normal = lower(forward(call), [trains and trained(leaf) for leaf in call.leaves])
    except Unknown as no:
        log.debug("%s: no normal form: %s", source_line(call.place), no)
        return None
    except NoMatch:
        raise
    except Exception:
        log.warning("%s: the reading failed", source_line(call.place), exc_info=True)
        return None
    return Lowered(call, normal, settings, _others(call, captured, beside))


def _others(call: RowCall, captured: Captured, beside: Sequence[Node]) -> tuple[Any, ...]:
    """The rows of other calls that make a gradient of the same weight."""
    head = call.leaves[0].head
    assert head is not None
    (rows, *_), (weight, *_) = head.x.shape, _weights(head.node)
    same = [n for n in beside if weight in _weights(n)]
    same = [n for n in same if value(n).requires_grad]
    found = [hint(value(n).numel()) // max(1, hint(value(n).shape[-1])) for n in same]
    more = [c for c in captured.calls if c is not call and c.leaves[0].head is head]
    return (*found, *[rows] * len(more))


def _weights(node: Node) -> list[Node]:
    """The matrices that a product may have as its weight, without their views and casts."""
    return [stored(n) for n in node.all_input_nodes[1:] if is_tensor(n)]


def _totalled(
    graph: Graph, emitter: Calls, made: Node | Inserted, modes: Mapping[Node, Mode]
) -> Node | Inserted:
    """A call whose gradients forward computes, if it can; else it keeps copies of operands."""
    grads = _grads(modes)
    if isinstance(made, Node):
        call = OfRegion(made)
        return call.node if with_total(graph, call, grads, emitter.call) else emitter.kept(made)
    if not made.choice.spec.gradients:  # rows that have no coefficient are left out
        whole = not any(mode.inference for mode in modes.values())
        if whole:
            with_total(graph, made, {}, emitter.call)
    elif not with_total(graph, made, grads, emitter.call):
        made.keep()
    return made


def _deferred(
    region: Region, captured: Captured, settings: Settings, modes: dict[Node, Mode]
) -> dict[Node, tuple[Recipe, tuple[Node, ...]]]:
    """The recipes of the logits of a region that are outputs of the graph.

    Raises:
        NoMatch: one of them has to exist.
    """
    if not captured.slice.left:
        return {}
    left, output = captured.slice.left, region.module.graph.output_node()
    kept = settings.logits == "keep" or (settings.logits == "auto" and not captured.trained)
    # what follows a graph break may read all of the logits, which it would compute again
    ended = getattr(region.module, "compile_subgraph_reason", None)
    kept |= settings.logits == "auto" and getattr(ended, "graph_break", False)
    drop = settings.logits == "drop"
    ran = captured.slice.ran
    found = {} if kept else deferred_outputs(region, ran, modes, drop=drop)
    if stays := next((n for n in left if n not in found), None):
        raise NoMatch(output, f"the logits, or what is made of them (%{stays.name}), leave")
    return {n: recipe_of(n, found[n]) for n in left}


def sized_as_traced(graph: Graph, inputs: Sequence[Any]) -> bool:
    """Whether the inputs of a graph have its sizes. To a part that DistributedDataParallel's
    splitting makes, torch 2.13 gives logits of another part with symbols in the place of numbers;
    Dynamo knows no source of them, and a guard on one raises. The rewrite writes numbers."""
    pairs = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    tensors = [(value(n), t) for n, t in pairs if is_tensor(n) and isinstance(t, torch.Tensor)]
    sizes = (
        pair for traced, given in tensors for pair in zip(traced.shape, given.shape, strict=False)
    )
    return not any(isinstance(n, int) and not isinstance(m, int) for n, m in sizes)


@contextmanager
def without_guards(region: Region) -> Iterator[None]:
    """A decision on a size, which the calls of the graph make again when they are traced, is no
    guard of Dynamo's."""
    tensors = (n.meta.get("example_value") for n in region.module.graph.nodes)
    modes = (getattr(t, "fake_mode", None) for t in tensors)
    env = next((mode.shape_env for mode in modes if mode is not None), None)
    with env.suppress_guards() if env is not None else nullcontext():
        yield


def heads_in_nested(region: Region, settings: Settings) -> list[Node]:
    """The calls of checkpoints and of nested regions in which logits are made: those of nested
    regions, and those that a checkpoint returns."""
    targets = CHECKPOINTS | NESTED_REGIONS
    calls = [n for n in region.module.graph.nodes if n.target in targets]
    return [n for n in calls if region.plain and _has_logits(n, settings)]


def _has_logits(call: Node, settings: Settings) -> bool:
    body = next((b for b in map(nested_graph, call.args) if b is not None), None)
    if body is None:
        return False
    made = [n for n in body.graph.nodes if _may_be_large(n, settings)]
    if call.target in NESTED_REGIONS and not settings.min_logits_mb:
        return bool(made)
    if call.target in NESTED_REGIONS and any(map(looks_like_a_head, made)):
        return True
    least = min((hint(value(n).numel()) for n in made), default=0) // 2
    returned = body.graph.output_node().all_input_nodes
    return bool(made) and any(is_tensor(n) and hint(value(n).numel()) > least for n in returned)


def _reads_logits(head: Head) -> bool:
    """Whether tensors as large as logits exist for a fused head: its logits, others' that it is
    compared with, or what is made of smaller tensors, such as one-hot labels."""
    least = hint(value(head.flow.linear.node).numel()) // 2
    tensors = [n for n in head.flow.tensors.values() if is_tensor(n)]
    large = [n for n in tensors if hint(value(n).numel()) >= least]
    graph = head.flow.linear.node.graph
    inputs = {storage(n) for n in graph.find_nodes(op="placeholder") if is_tensor(n)}
    sources = (source for n in large for source, _ in made_of(n, ""))
    made = any(function_of(n) in PRODUCTS or storage(n) in inputs for n in sources)
    return head.logits_mode == "keep" or made or any(_is_spread(n, least) for n in large)


def _is_spread(node: Node, least: int) -> bool:
    """Whether a tensor is made of tensors that all have fewer elements."""
    todo, seen = [node], {node}
    while todo:
        one = todo.pop()
        if one.op not in ("call_function", "call_method") or function_of(one) in PRODUCTS:
            return False
        sources = {n for n in one.all_input_nodes if is_tensor(n)} - seen
        todo += [n for n in sources if hint(value(n).numel()) >= least]
        seen |= sources
    return True


def _grads(modes: Mapping[Node, Mode]) -> dict[Node, bool]:
    return {node: mode.grad for node, mode in modes.items()}


def _captured(
    region: Region,
    node: Node,
    candidates: Sequence[Node],
    settings: Settings,
    modes: Mapping[Node, Mode],
    writers: Writers,
) -> Captured:
    if not any(True for _ in node.users):
        raise NoMatch(node, "nobody reads its logits")
    if modes[node].transforms:
        raise NoMatch(node, "it is in a transform of torch.func")
    captured = capture(region, node, candidates, Scope(_grads(modes), writers))
    if inside := next((n for n in captured.slice.ran if modes[n].transforms), None):
        raise NoMatch.at(inside, "is in a transform of torch.func")
    if settings.min_logits_mb:
        sizes = [_bytes(n) for n in captured.heads]
        classes = sum(hint(_classes(n)) for n in captured.heads)
        if sum(sizes) < settings.min_logits_mb * MIB or classes < LEAST_CLASSES:
            raise NoMatch(node, f"its logits take {size(sum(sizes))}")
    return captured


def _may_be_large(node: Node, settings: Settings) -> bool:
    """Whether a node makes logits that may be worth an operator."""
    if function_of(node) not in PRODUCTS or not is_tensor(node) or value(node).dim() < 2:
        return False
    if any(is_tensor(n) and is_dtensor(value(n)) for n in (node, *node.all_input_nodes)):
        return False  # a head that is sharded
    if not settings.min_logits_mb:
        return True
    if _bytes(node) * PARTS < settings.min_logits_mb * MIB:
        return False
    operands = [n for n in node.all_input_nodes if is_tensor(n) and value(n).dim() > 1]
    hidden = min((hint(value(n).shape[-1]) for n in operands), default=0)
    return hint(_classes(node)) * PARTS >= max(LEAST_CLASSES, hidden)


def _bytes(node: Node) -> int:
    return hint(value(node).numel()) * value(node).dtype.itemsize


def _classes(node: Node) -> Any:
    return max(value(node).shape[-1], value(node).shape[0], key=hint)
