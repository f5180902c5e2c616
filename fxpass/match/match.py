"""Finds heads whose logits are reduced in a graph, and says of every loss why it is not fused.

In: a region of a Dynamo graph, with ``example_value`` on its nodes. Out: the
:class:`fxpass.match.head.Head` that :mod:`fxpass.rewrite.reductions` rewrites, and a
:class:`Rejection` for every loss, and every linear that looks like a head, of which the logits have
to exist. The graph does not change.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch.fx import Node

from fxpass.graph.functions import CASTS, function_of, out_of_place
from fxpass.graph.nodes import NoMatch, is_tensor
from fxpass.graph.placements import placement_name
from fxpass.graph.region import CHECKPOINTS, Region
from fxpass.graph.source import call_name, source_line
from fxpass.lower.pointwise import MASKS, POINTWISE
from fxpass.match.head import Head
from fxpass.match.heads import Heads, heads_of, looks_like_a_head
from fxpass.match.leaving import Deferred
from fxpass.match.losses import loss_of
from fxpass.match.views import VIEWS
from fxpass.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rejection:
    """A loss, or a head, that is not fused.

    Attributes:
        node: the node at which reading stopped; the graph's output where nothing reads the logits.
        reason: why, as a sentence without its first capital.
        source: the user's line of the loss or of the linear.
    """

    node: Node
    reason: str
    source: str

    @property
    def loss_elsewhere(self) -> bool:
        """Whether it is a head whose logits leave the graph, which has no loss of them."""
        return self.node.op == "output"

    def __str__(self) -> str:
        return f"not fused: {self.source}: {self.reason}"


@dataclass(frozen=True)
class Found:
    """What one region holds.

    Attributes:
        heads, rejections: in the graph's order.
        deferred: its deferred outputs, each with the nodes that compute it (the linears and the
            nodes after them).
        checkpoints: the calls of checkpoints that read logits.
        costs: linears whose fusion would cost more than it saves.
    """

    heads: tuple[Head, ...]
    rejections: tuple[Rejection, ...]
    deferred: Deferred
    checkpoints: tuple[Node, ...]
    costs: frozenset[Node] = frozenset()


def find(region: Region, settings: Settings) -> Found:
    """The heads of a region, and a rejection for every loss that is not fused: in a region that is
    not plain, for all."""
    found = heads_of(region, settings)
    fused = {r.node for head in found.fused for r in head.flow.reductions}
    rejections: list[Rejection] = []
    for node in region.module.graph.nodes:
        try:
            loss = loss_of(node)
            if loss is None or loss.node in fused:
                continue
            no = found.stops.get(node) or _why_not(loss.logits, found)
        except NoMatch as error:
            no = error
        rejections.append(Rejection(no.node, no.reason, source_line(node)))
    said = {rejection.node for rejection in rejections}
    nothing = not (found.fused or rejections)
    guessed = region.plain and settings.min_logits_mb > 0
    for linear, no in found.reasons.items():
        certain = nothing and linear in found.softmaxes
        likely = no.node.op == "output" or looks_like_a_head(linear)
        if not said.isdisjoint((linear, no.node)) or not (certain or likely):
            continue
        if linear not in found.costs and (certain or guessed):
            rejections.append(Rejection(no.node, no.reason, source_line(linear)))
        else:
            log.debug("%s: %s", source_line(linear), no.reason)
    if region.call is not None and not region.plain:
        what = f"it is inside %{region.call.name} ({call_name(region.call)})"
        reason = f"{what}; of nested graphs, only those of activation checkpoints are fused"
        rejections += [Rejection(h.flow.linear.node, reason, h.source) for h in found.fused]
        return Found((), tuple(rejections), {}, ())
    checkpoints = tuple(node for node in found.stops if node.target in CHECKPOINTS)
    costs = frozenset(found.costs)
    return Found(tuple(found.fused), tuple(rejections), found.deferred, checkpoints, costs)


def _why_not(logits: Node, found: Heads) -> NoMatch:
    """Why the logits of a loss have to exist: they are traced back to a linear."""
    todo, stops = [logits], {no.node: no for no in found.reasons.values()} | found.stops
    no = NoMatch(logits, "its logits are not computed by a linear")
    while todo:
        node = todo.pop()
        if known := found.reasons.get(node) or stops.get(node):
            return known
        function = out_of_place(function_of(node))
        if node.op not in ("call_function", "call_method"):
            no = NoMatch(node, _not_computed_here(node))
        elif any(function in table for table in _BETWEEN) or placement_name(node.target):
            todo += reversed([n for n in node.all_input_nodes if is_tensor(n)])
        else:
            no = NoMatch.at(node, "between the linear and the loss is not known")
    return no


_SOFTMAX = {"log_softmax", "_log_softmax", "softmax", "_softmax", "nll_loss_forward"}
_BETWEEN = (CASTS, VIEWS, POINTWISE, MASKS, _SOFTMAX, {"stack"})


def _not_computed_here(node: Node) -> str:
    ended = getattr(node.graph.owning_module, "compile_subgraph_reason", None)
    if node.op == "placeholder" and getattr(ended, "reason", "").startswith("DDPOptimizer"):
        return (
            f"its logits enter the graph as %{node.name}: DistributedDataParallel's splitting put "
            "the linear into another part; compute each loss right after its head, or set "
            "torch._dynamo.config.optimize_ddp = False"
        )
    if node.op == "placeholder":
        return (
            f"its logits enter the graph as %{node.name}: the linear is in another graph, or there "
            "was a graph break between them (TORCH_LOGS=graph_breaks tells where)"
        )
    return f"its logits come from %{node.name} ({node.op}), not from a linear"
