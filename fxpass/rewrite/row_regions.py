"""Fuses the heads that no formula is known for, as row regions.

In: a region of a Dynamo graph, and the heads that :mod:`fxpass.match` found in it. Out: a
:class:`RegionMatch` for each row region, which the graph has now in the place of its nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpass.capture.capture import Captured, capture, made_of
from fxpass.capture.slice import PRODUCTS, Scope
from fxpass.deferred.tensor import Recipe
from fxpass.graph.calls import storage
from fxpass.graph.functions import function_of
from fxpass.graph.hazards import Writers, writers_in
from fxpass.graph.nodes import NoMatch, hint, is_tensor, nested_graph, value
from fxpass.graph.placements import is_dtensor
from fxpass.graph.region import CHECKPOINTS, NESTED_REGIONS, Region
from fxpass.graph.source import source_line
from fxpass.match.head import LEFT, Head
from fxpass.match.heads import looks_like_a_head
from fxpass.match.leaving import deferred_outputs
from fxpass.match.match import Found
from fxpass.match.modes import Mode, modes_of
from fxpass.match.profitability import LEAST_CLASSES
from fxpass.op.row_region import planned_for
from fxpass.plan.plan import MIB, size
from fxpass.region.compile import warm
from fxpass.region.text import RowRegion
from fxpass.rewrite.copies import copied
from fxpass.rewrite.known import with_total
from fxpass.rewrite.outputs import Restore, as_compiled, both, defer_outputs, recipe_of
from fxpass.rewrite.regions import rewrite_region
from fxpass.rewrite.traced import traced
from fxpass.settings import Settings

log = logging.getLogger(__name__)
# Parts of the least logits that a tile of the vocabulary, or of an adapter, may be.
PARTS = 8


@dataclass(frozen=True)
class RegionMatch:
    """A row region that is fused.

    Attributes:
        source: the user's line of its first result.
        shapes: rows and classes of each head.
        itemsizes: bytes of a logit of each head.
        operations: the ATen calls on logits.
        choices: how its calls run, as text.
        kernels: the names of the kernels that Inductor made for its row functions.
        logits_mode: ``never``, ``defer`` or ``drop``, as of a :class:`fxpass.match.head.Head`.
    """

    source: str
    shapes: tuple[tuple[Any, Any], ...]
    itemsizes: tuple[int, ...]
    operations: tuple[str, ...]
    choices: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    logits_mode: str = "never"
    losses: int = 1

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of the logits of all heads."""
        shapes = zip(self.shapes, self.itemsizes, strict=True)
        return sum(hint(n) * hint(v) * itemsize for (n, v), itemsize in shapes)

    @property
    def calls(self) -> tuple[_Choice, ...]:
        """What a report says of the operator calls, a line each."""
        kernels = [f"kernels: {', '.join(self.kernels)}"] if self.kernels else []
        return tuple(map(_Choice, (*self.choices, *kernels)))

    def __str__(self) -> str:
        logits = " and ".join(f"[{n}, {v}]" for n, v in self.shapes)
        heads = "1 head" if len(self.shapes) == 1 else f"{len(self.shapes)} heads"
        operations = ", ".join(self.operations)
        left = LEFT.get(self.logits_mode, "")
        return f"fused: {self.source}: region of {heads}, logits {logits}: {operations}{left}"


@dataclass(frozen=True)
class _Choice:
    choice: str


class Fused(NamedTuple):
    """The row regions of a graph; ``restore`` wraps the compiled graph, so that it returns the
    outputs that Dynamo expects."""

    matches: list[RegionMatch]
    restore: Restore = as_compiled


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
    fused = {h.flow.linear.node for h in found.heads if not _reads_logits(h)} | found.costs
    graph, made, restore = region.module.graph, list[RegionMatch](), as_compiled
    candidates = [n for n in graph.nodes if n not in fused and _may_be_large(n, settings)]
    todo = [n for n in candidates if not among or n in among]
    modes, writers = modes_of(region), writers_in(graph)
    while todo:
        node, untouched = todo[0], None
        try:
            captured = _captured(region, node, candidates, settings, modes, writers)
            calls = [
                traced(call, settings.memory_mb, settings.inner == "inductor")
                for call in captured.calls
            ]
            recipes = _deferred(region, captured, settings, modes)
            match, untouched = _match(captured), copied(graph)
            # the outputs read its nodes no more, so that the rewrite erases them
            drop = settings.logits == "drop"
            deferred = defer_outputs(region.module, recipes, drop=drop)
            emitter = rewrite_region(graph, captured, calls)
            grads = _grads(modes_of(region))
            made_calls = [
                with_total(graph, call, grads, emitter.call) or emitter.kept(call)
                for call in emitter.calls
            ]
            graph.lint()
            match = replace(match, choices=tuple(map(_choice, made_calls)))
            if recipes:
                match = replace(match, logits_mode="drop" if drop else "defer")
        except Exception as error:
            # an unforeseen program runs without the rewrite
            if not isinstance(error, NoMatch | GuardOnDataDependentSymNode):
                log.warning("%s: the row region failed", source_line(node), exc_info=True)
            if untouched is not None:
                region.module.graph = untouched
                return Fused(made, restore)
            if looks_like_a_head(node):
                log.debug("%s: no row region: %s", source_line(node), error)
            todo.remove(node)
            continue
        region.module.recompile()
        restore = both(restore, deferred)
        kernels = dict[str, None]()
        for call in made_calls if settings.inner == "inductor" else ():
            tensors: Any = call.args[0]
            kernels |= dict.fromkeys(warm(str(call.args[1]), value(tensors[0]).device))
        made.append(replace(match, kernels=tuple(kernels)))
        modes, writers = modes_of(region), writers_in(graph)
        todo = [n for n in todo if n not in captured.heads]
        candidates = [n for n in candidates if n not in captured.heads]
    return Fused(made, restore)


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


def _match(captured: Captured) -> RegionMatch:
    shapes, sizes = [], []
    for head in captured.slice.recorder.heads:
        rows = head.x.shape[-1 if head.first else -2]
        shapes.append((rows, head.classes))
        sizes.append(head.x.fake.dtype.itemsize)
    return RegionMatch(captured.source, tuple(shapes), tuple(sizes), captured.operations)


def _choice(call: Node) -> str:
    """How a call runs, for the rows of the traced graph."""
    tensors: Any = torch.fx.map_arg(call.args[0], _without_data)
    text = str(call.args[1])
    region, planned = RowRegion.parse(text), planned_for(tensors, text)
    if region.total:
        gradients = "the gradients are computed with the outputs"
    elif region.trained:
        gradients = "backward computes the logits again"
    else:
        gradients = "no gradients"
    compiled = "compiled by Inductor" if region.compiled else "interpreted"
    rows = f"{planned.rows} rows at a time: {size(planned.scratch + planned.sums)} of scratch"
    return f"row function of {region.outputs} outputs, {compiled}: {rows}; {gradients}"


def _without_data(node: Node) -> torch.Tensor:
    tensor = value(node)
    sizes = [hint(s) for s in tensor.shape]
    with FakeTensorMode():
        return torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
