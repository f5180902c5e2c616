"""All rewrites of one Dynamo graph, in order, with their log lines and counters.

In: a Dynamo graph and settings. Out: an :class:`Outcome`; the graph is changed in place. A graph
without matches and without mixed dtypes does not change, except for torch.export's contexts
(:mod:`fxpass.rewrite.inline`), and where torch would fail (:mod:`fxpass.rewrite.inference`,
:func:`fxpass.graph.region.return_once`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch._dynamo.utils import counters
from torch.fx import GraphModule, Node

from fxpass.capture.capture import made_of
from fxpass.casts.casts import Cast, cast_region, note
from fxpass.graph.nodes import hint, is_tensor, value
from fxpass.graph.region import Region, regions, return_once
from fxpass.graph.source import source_line
from fxpass.graph.text import graph_text
from fxpass.kernels.call import Launch
from fxpass.match.head import Head
from fxpass.match.match import Found, Rejection, find
from fxpass.rewrite import dump
from fxpass.rewrite.copies import copied
from fxpass.rewrite.inference import without_inference_mode
from fxpass.rewrite.inline import inline_call, inline_checkpoints, inline_contexts
from fxpass.rewrite.listing import launches_of
from fxpass.rewrite.matches import RegionMatch
from fxpass.rewrite.outputs import Restore, as_compiled, both, defer_outputs, recipe_of
from fxpass.rewrite.reductions import rewrite_heads
from fxpass.rewrite.row_regions import (
    Fused,
    fuse_regions,
    heads_in_nested,
    sized_as_traced,
    without_guards,
)
from fxpass.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What was done to one graph.

    Attributes:
        heads, rejections, casts: in the order of the graph.
        kernels: the launches of Triton kernels on a GPU.
        restore: wraps the compiled graph, so that it returns the outputs that Dynamo expects.
    """

    heads: tuple[Head | RegionMatch, ...]
    rejections: tuple[Rejection, ...]
    casts: tuple[Cast, ...]
    kernels: tuple[Launch, ...]
    restore: Restore


def transform(gm: GraphModule, settings: Settings, inputs: Sequence[Any] = ()) -> Outcome:
    """Inserts casts into ``gm`` and its nested graphs, and rewrites the matches of plain regions.

    Args:
        gm: the graph, changed in place.
        settings: what is rewritten.
        inputs: what the graph is compiled for, where known.

    Raises:
        MixedDtypeError: see :func:`fxpass.casts.casts.agreed`.
    """
    before = graph_text(gm) if settings.dump else ""
    heads: list[Head | RegionMatch] = []
    rejections: list[Rejection] = []
    casts: list[Cast] = []
    kernels: dict[Launch, None] = {}
    restore: Restore = as_compiled
    sized = sized_as_traced(gm.graph, inputs)
    for region in regions(gm):
        return_once(region)
        inline_contexts(region)
        without_inference_mode(region)
        casts += cast_region(region, settings.mixed_dtypes)
        if region.backward:
            continue
        found, fused = (
            _with_regions(region, settings) if sized else (_found(region, settings), Fused([]))
        )
        rejections += found.rejections
        heads += fused.matches
        casts += fused.casts
        restore = both(restore, fused.restore)
        if not found.heads:
            kernels |= dict.fromkeys(launches_of(region.module.graph))
            continue
        untouched = copied(region.module.graph)
        try:
            returned, made = _carry_out(region, found, settings)
            generated = dict.fromkeys(launches_of(region.module.graph))
        except Exception as error:
            # an unforeseen program runs without the rewrite
            log.warning("%s: the rewrite failed", found.heads[0].source, exc_info=True)
            region.module.graph = untouched
            reason = f"fxpass failed to rewrite the graph, please report this: {error!r}"
            rejections += [Rejection(h.flow.linear.node, reason, h.source) for h in found.heads]
            continue
        casts += made
        kernels |= generated
        heads += found.heads
        restore = both(restore, returned)
    counters["fusedce"]["matched"] += sum(head.losses for head in heads)
    counters["fusedce"]["rejected"] += len(rejections)
    for record in (*heads, *rejections):
        log.info("%s", record)
    note(casts)
    if settings.dump:
        dump.write(settings.dump, before, graph_text(gm), kernels)
    return Outcome(tuple(heads), tuple(rejections), tuple(casts), tuple(kernels), restore)


def _with_regions(region: Region, settings: Settings) -> tuple[Found, Fused]:
    """The row regions of a region, which are rewritten, and what is found in the rest."""
    graph, found = region.module.graph, _found(region, settings)
    try:
        with without_guards(region):
            fused = fuse_regions(region, found, settings)
    except Exception:
        log.warning("the search for row regions failed", exc_info=True)
        return found, Fused([])
    calls = dict.fromkeys((*heads_in_nested(region, settings), *found.checkpoints))
    known, inside = _from_nested(region, settings, [n for n in calls if not n._erased])
    fused = Fused(
        fused.matches + inside.matches,
        both(fused.restore, inside.restore),
        (*fused.casts, *inside.casts),
    )
    if known or fused.matches or region.module.graph is not graph:
        found = _found(region, settings)  # the nodes are others
    return found, fused


def _from_nested(region: Region, settings: Settings, calls: Sequence[Node]) -> tuple[bool, Fused]:
    """Fuses logits that checkpoints and nested regions read or return. Those of which any are fused
    become part of the graph, if that pays, and the others stay.

    Returns:
        whether losses with a formula will be fused, and the row regions.
    """
    if not calls:
        return False, Fused([])
    graph, untouched = region.module.graph, copied(region.module.graph)
    twins = dict(zip(graph.nodes, untouched.nodes, strict=True))
    read = [n for call in calls for n in call.all_input_nodes if is_tensor(n)]
    feeding = {source for node in read for source, _ in made_of(node, "")}
    try:
        with without_guards(region):
            made = {call: inline_call(region, call) for call in calls}
            inlined = set[Node]().union(*made.values())
            if not inlined:
                return False, Fused([])
            found = find(region, settings)
            fused = fuse_regions(region, found, settings, inlined | feeding)
    except Exception:
        log.warning("%s: inlining failed", source_line(calls[0]), exc_info=True)
        region.module.graph = untouched
        return False, Fused([])
    linears = {head.flow.linear.node for head in found.heads}
    taking = [call for call in calls if any(n in linears or n._erased for n in made[call])]
    held = inlined.difference(*(head.flow.inside for head in found.heads))
    held = [n for n in held if not n._erased and is_tensor(n)]
    less = sum(m.logits_bytes for m in fused.matches)
    left = [h for h in found.heads if not h.flow.linear.node._erased]
    less += sum(h.logits_bytes for h in left if h.flow.linear.node in inlined)
    if len(taking) == len(calls):
        if _bytes(held) < less:
            return bool(linears & inlined), fused
        taking = []
    region.module.graph = untouched
    return _from_nested(region, settings, [twins[call] for call in taking])


def _found(region: Region, settings: Settings) -> Found:
    """What a region holds. Checkpoints that read logits become part of it, if that pays."""
    found = find(region, settings)
    if not found.checkpoints:
        return found
    untouched = copied(region.module.graph)
    try:
        inlined = inline_checkpoints(region, found.checkpoints)
        without = find(region, settings)
        if _pays(without, inlined):
            return without
    except Exception:
        log.warning("%s: inlining failed", source_line(found.checkpoints[0]), exc_info=True)
    region.module.graph = untouched
    return find(region, settings)


def _pays(found: Found, inlined: set[Node]) -> bool:
    """Whether no logits are held for nodes that were in checkpoints, and what backward no longer
    computes again takes less memory than these logits."""
    reduced = {r.node: head for head in found.heads for r in head.flow.reductions}
    heads = {id(head): head for node, head in reduced.items() if node in inlined}.values()
    held = [node for node in inlined.difference(*(h.flow.inside for h in heads)) if is_tensor(node)]
    less = sum(head.logits_bytes for head in heads if head.logits_mode != "keep")
    return not found.checkpoints and _bytes(held) < less


def _bytes(nodes: Collection[Node]) -> int:
    return sum(hint(value(node).numel()) * value(node).itemsize for node in nodes)


def _carry_out(region: Region, found: Found, settings: Settings) -> tuple[Restore, list[Cast]]:
    """Rewrites all heads of a region."""
    # before the rewrite, which erases the nodes that recipes copy
    recipes = {output: recipe_of(output, nodes) for output, nodes in found.deferred.items()}
    # the outputs read these nodes no more, so that the rewrite erases them
    restore = defer_outputs(region.module, recipes, drop=settings.logits == "drop")
    casts = rewrite_heads(region, found.heads)
    region.module.graph.lint()
    region.module.recompile()
    return restore, casts
