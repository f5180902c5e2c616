"""All rewrites of one Dynamo graph, in order.

In: a Dynamo graph and settings. Out: an :class:`Outcome`; the graph is changed in place: casts,
blocks of inference mode (:mod:`fxpass.rewrite.inference`), nested regions with a head
(:mod:`fxpass.rewrite.nested`), logits that leave (:mod:`fxpass.rewrite.defer`). Everything else is
rewritten in the joint graph, while the inner backend compiles; :mod:`fxpass.rewrite.settled` puts
both together.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxpass.casts.casts import Cast, cast_region
from fxpass.deferred.programs import Programs
from fxpass.graph.calls import written
from fxpass.graph.names import name_nodes
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.region import Region, regions
from fxpass.graph.text import graph_text
from fxpass.releases.torch_2_11 import return_once
from fxpass.rewrite import dump
from fxpass.rewrite.defer import DeferredOutputs, defer_logits
from fxpass.rewrite.heads import may_be_large
from fxpass.rewrite.inference import without_inference_mode
from fxpass.rewrite.matches import RegionMatch
from fxpass.rewrite.nested import inline_heads
from fxpass.rewrite.outputs import Restore
from fxpass.rewrite.rejections import Rejection, Suspect, suspects_of
from fxpass.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The rewrites of one graph.

    Attributes:
        casts: in the order of the graph.
        deferred: logits that leave.
        suspects: losses and heads that the pass on the joint graph may leave.
        candidates: the names of the products that may be heads in the joint graph.
        heads, rejections: the matches and the rejections, once the inner backend has compiled the
            graph.
        kernels: the joint graphs' launches of Triton kernels on a GPU.
        nodes: the rewritten graph's nodes, by their names in AOTAutograd's graphs.
        before: the graph as text before the rewrites, if it is dumped or traced.
    """

    casts: tuple[Cast, ...]
    deferred: DeferredOutputs = field(default_factory=DeferredOutputs)
    suspects: tuple[Suspect, ...] = ()
    candidates: tuple[str, ...] = ()
    heads: tuple[RegionMatch, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    kernels: tuple[Any, ...] = ()
    nodes: Mapping[str, Node] = field(default_factory=dict)
    before: str = ""

    @property
    def restore(self) -> Restore:
        """Wraps the compiled graph, so that it returns the outputs that Dynamo expects."""
        return self.deferred.restore


def transform(
    gm: GraphModule, settings: Settings, programs: Programs, inputs: Sequence[Any] = ()
) -> Outcome:
    """Makes dtypes of ``gm`` and its nested graphs explicit, and defers logits that leave it.

    Args:
        gm: the graph, changed in place.
        settings: the user's settings.
        programs: compiles functions of deferred logits.
        inputs: the graph's example inputs.

    Raises:
        MixedDtypeError: see :func:`fxpass.casts.casts.common_dtype`.
    """
    before = graph_text(gm) if settings.dump or dump.is_traced() else ""
    casts: list[Cast] = []
    for region in regions(gm):
        return_once(region.module)
        without_inference_mode(region)
        casts += cast_region(region, settings.mixed_dtypes)
    outcome = Outcome(tuple(casts), before=before)
    with _without_guards(gm):
        if not _sized_as_traced(gm.graph, inputs):
            return _deferred(gm, outcome, replace(settings, logits="keep"), programs)
        plain = [region for region in regions(gm) if region.plain and not region.backward]
        inlined = [inline_heads(region, settings.min_logits_mb) for region in plain]
        if inlined[0] and any(map(written, gm.graph.nodes)):
            # calls of one nested region have the memory of the first one
            settings = replace(settings, logits="keep")
        return _deferred(gm, outcome, settings, programs)


def without_deferring(
    gm: GraphModule,
    old: Outcome,
    settings: Settings,
    programs: Programs,
    materialised: Collection[str],
) -> Outcome:
    """Undoes the deferral of a graph's logits, and defers fewer of them.

    Args:
        gm: the graph, changed in place.
        old: its outcome.
        settings, programs: as of :func:`transform`.
        materialised: the names of products whose logits are not deferred now.
    """
    assert old.deferred.untouched is not None
    gm.graph = old.deferred.untouched
    with _without_guards(gm):
        return _deferred(gm, old, settings, programs, materialised)


def _deferred(
    gm: GraphModule,
    outcome: Outcome,
    settings: Settings,
    programs: Programs,
    materialised: Collection[str] = (),
) -> Outcome:
    """Defers logits that leave, and lists the losses and heads that the joint graph may fuse."""
    deferred = DeferredOutputs()
    suspects = ()
    least = settings.min_logits_mb
    try:
        deferred = defer_logits(Region(gm), settings, programs, materialised)
    except Exception:  # an unforeseen program runs without the rewrite
        log.warning("the search for logits that leave failed", exc_info=True)
    nodes = name_nodes(gm)
    try:
        suspects = suspects_of(gm, nodes, deferred.returned, least)
    except Exception:  # a report is not worth a program
        log.warning("the search for losses failed", exc_info=True)
    return replace(
        outcome,
        deferred=deferred,
        suspects=suspects,
        candidates=tuple(name for name, node in nodes.items() if may_be_large(node, least)),
        nodes=nodes,
    )


def _sized_as_traced(graph: Graph, inputs: Sequence[Any]) -> bool:
    """True if the inputs of a graph have its sizes. A part that DistributedDataParallel's splitting
    makes gets logits of another part with symbols in the place of numbers (torch 2.13): Dynamo has
    no source for these symbols, and a guard on a symbol raises. Recipes have numbers."""
    pairs = zip(graph.find_nodes(op="placeholder"), inputs, strict=False)
    tensors = [(value(n), t) for n, t in pairs if is_tensor(n) and isinstance(t, torch.Tensor)]
    return not any(
        isinstance(n, int) and not isinstance(m, int)
        for traced, given in tensors
        for n, m in zip(traced.shape, given.shape, strict=False)
    )


@contextmanager
def _without_guards(gm: GraphModule) -> Iterator[None]:
    """In this context a decision on a size adds no guard to Dynamo's: AOTAutograd repeats the
    decision when it traces the graph."""
    tensors = (n.meta.get("example_value") for n in gm.graph.nodes)
    modes = (getattr(t, "fake_mode", None) for t in tensors)
    env = next((mode.shape_env for mode in modes if mode is not None), None)
    with env.suppress_guards() if env is not None else nullcontext():
        yield
