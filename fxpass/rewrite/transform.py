"""All rewrites of one Dynamo graph, in order.

In: a Dynamo graph and settings. Out: an :class:`Outcome`; the graph is changed in place. A graph
without matches and without mixed dtypes does not change, except for torch.export's contexts
(:mod:`fxpass.rewrite.inline`), and where torch would fail (:mod:`fxpass.rewrite.inference`,
:func:`fxpass.graph.region.return_once`). What is left for the joint graph is rewritten while the
inner backend compiles; :mod:`fxpass.rewrite.settled` puts both together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxpass.capture.heads import in_nested
from fxpass.capture.rejections import Rejection, rejections_of
from fxpass.casts.casts import Cast, cast_region
from fxpass.graph.names import name_nodes
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.region import Region, regions, return_once
from fxpass.graph.text import graph_text
from fxpass.rewrite import dump
from fxpass.rewrite.fuse import Fused, Later, fuse
from fxpass.rewrite.inference import without_inference_mode
from fxpass.rewrite.inline import inline_contexts
from fxpass.rewrite.matches import RegionMatch
from fxpass.rewrite.nested import fuse_nested
from fxpass.rewrite.outputs import Restore, as_compiled, both
from fxpass.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What was done to one graph.

    Attributes:
        heads, rejections, casts: in the order of the graph.
        later: what is left for the joint graph.
        kernels: the launches of Triton kernels on a GPU, of the joint graphs.
        restore: wraps the compiled graph, so that it returns the outputs that Dynamo expects.
        nodes: of the rewritten graph, by the names that AOTAutograd's graphs have.
        before: the graph as text, where it is dumped or traced.
    """

    heads: tuple[RegionMatch, ...]
    rejections: tuple[Rejection, ...]
    casts: tuple[Cast, ...]
    later: tuple[Later, ...] = ()
    kernels: tuple[Any, ...] = ()
    restore: Restore = as_compiled
    nodes: Mapping[str, Node] = field(default_factory=dict)
    before: str = ""


def transform(gm: GraphModule, settings: Settings, inputs: Sequence[Any] = ()) -> Outcome:
    """Inserts casts into ``gm`` and its nested graphs, and rewrites the matches of plain regions.

    Args:
        gm: the graph, changed in place.
        settings: what is rewritten.
        inputs: what the graph is compiled for, where known.

    Raises:
        MixedDtypeError: see :func:`fxpass.casts.casts.agreed`.
    """
    before = graph_text(gm) if settings.dump or dump.is_traced() else ""
    heads: list[RegionMatch] = []
    later: list[Later] = []
    rejections: list[Rejection] = []
    casts: list[Cast] = []
    restore: Restore = as_compiled
    sized = _sized_as_traced(gm.graph, inputs)
    for region in regions(gm):
        return_once(region)
        inline_contexts(region)
        without_inference_mode(region)
        casts += cast_region(region, settings.mixed_dtypes)
        if region.backward:
            continue
        fused = Fused()
        if sized and region.plain:
            fused = _fused(region, settings)
        rejections += _rejections(region, fused, settings)
        heads += fused.matches
        later += fused.later
        restore = both(restore, fused.restore)
    return Outcome(
        tuple(heads),
        tuple(rejections),
        tuple(casts),
        tuple(later),
        restore=restore,
        nodes=name_nodes(gm),
        before=before,
    )


def _rejections(region: Region, fused: Fused, settings: Settings) -> list[Rejection]:
    nodes = {node.name: node for node in region.module.graph.nodes}
    reasons = {nodes[name]: no for name, no in fused.reasons.items() if name in nodes}
    least = settings.min_logits_mb
    try:
        return list(rejections_of(region, reasons, {}, least, bool(fused.matches)))
    except Exception:  # a report is not worth a program
        log.warning("the search for rejections failed", exc_info=True)
        return []


def _fused(region: Region, settings: Settings) -> Fused:
    """What is fused of a region: its own heads, then those of nested graphs."""
    with _without_guards(region):
        own = fuse(region, settings)
        nested = in_nested(region, settings)
        calls = [n for n in region.module.graph.nodes if n.name in own.checkpoints or n in nested]
        inside = fuse_nested(region, settings, calls)
    return Fused(
        own.matches + inside.matches,
        own.later + inside.later,
        both(own.restore, inside.restore),
        own.reasons | inside.reasons,
    )


def _sized_as_traced(graph: Graph, inputs: Sequence[Any]) -> bool:
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
def _without_guards(region: Region) -> Iterator[None]:
    """A decision on a size, which the calls of the graph make again when they are traced, is no
    guard of Dynamo's."""
    tensors = (n.meta.get("example_value") for n in region.module.graph.nodes)
    modes = (getattr(t, "fake_mode", None) for t in tensors)
    env = next((mode.shape_env for mode in modes if mode is not None), None)
    with env.suppress_guards() if env is not None else nullcontext():
        yield
