"""Heads whose logits the program only reduces over the classes.

In: a region, and the linears of the losses that are fused already. Out: a :class:`Head` for every
other linear with large outputs whose readers are all understood, else the reason why not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Node

from fxpass.graph.functions import function_of
from fxpass.graph.nodes import NoMatch, hint, is_tensor, value
from fxpass.graph.region import Region
from fxpass.graph.source import source_line
from fxpass.match.classes import Flow
from fxpass.match.flow import flow_of
from fxpass.match.join import Call, calls_of, logits_bytes, source_of
from fxpass.match.linears import LINEARS, Linear, linear_of
from fxpass.match.modes import Mode
from fxpass.match.profitability import LEAST_CLASSES
from fxpass.plan.plan import MIB, size
from fxpass.settings import Settings
from fxpass.spec.reductions import LogitSum

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Head:
    """A head whose reductions can be fused.

    Attributes:
        flow: what the program computes of its logits.
        calls: the operator calls.
        source: the user's line of the first reduction.
    """

    flow: Flow
    calls: tuple[Call, ...]
    source: str

    logits_mode = "never"
    choice = None

    @property
    def nodes(self) -> set[Node]:
        """The linear and all nodes that read the logits."""
        flow = self.flow
        return {*flow.classes, *flow.pairs, *flow.unread, *(r.node for r in flow.reductions)}

    @property
    def in_forward(self) -> bool:
        """Whether forward computes all gradients."""
        return all(call.total for call in self.calls)

    @property
    def shape(self) -> tuple[int | torch.SymInt, int | torch.SymInt]:
        """Rows and classes."""
        linear = self.flow.linear
        rows: int | torch.SymInt = 1
        for i, n in enumerate(value(linear.node).shape):
            rows = rows * n if i != linear.dim else rows
        return rows, value(linear.node).shape[linear.dim]

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of the logits in the linear's output dtype."""
        return logits_bytes(self.flow.linear)

    def __str__(self) -> str:
        n, v = self.shape
        specs = "; ".join(call.spec.text() for call in self.calls)
        return f"fused: {self.source}: logits [{n}, {v}], {specs}"


def heads_of(
    region: Region, taken: Collection[Node], modes: dict[Node, Mode], settings: Settings
) -> tuple[tuple[Head, ...], dict[Node, NoMatch]]:
    """The heads of a region, but those whose linear is ``taken``; and for linears that look like
    heads, where the reading stopped."""
    found: list[Head] = []
    stopped: dict[Node, NoMatch] = {}
    for node in region.module.graph.nodes:
        if node in taken or function_of(node) not in LINEARS:
            continue
        try:
            linear = linear_of(node)
            if linear is None or not _large(linear, settings.min_logits_mb):
                continue
            flow = flow_of(linear, region, modes)
            if any(not isinstance(o, LogitSum) for o in flow.computed):
                head = Head(flow, calls_of(flow, modes, settings.memory_mb), source_of(flow))
                _check_worth(head, settings.min_logits_mb)
                found.append(head)
        except NoMatch as no:
            log.debug("%s: %s", source_line(node), no.reason)
            if settings.min_logits_mb and _looks_like_a_head(node, no):
                stopped[node] = no
        except Exception:
            # the graph has not changed yet: an unforeseen program runs without the rewrite
            log.warning("%s: reading the graph failed", source_line(node), exc_info=True)
    return tuple(head for head in found if not _reads_others(head, found)), stopped


def _reads_others(head: Head, found: Collection[Head]) -> bool:
    """Whether an operand of a head is a reduction of another head, which the rewrite replaces."""
    replaced = {r.node for other in found if other is not head for r in other.flow.reductions}
    operands = {n for node in head.nodes for n in node.all_input_nodes}
    return not replaced.isdisjoint(operands)


def _looks_like_a_head(linear: Node, stop: NoMatch) -> bool:
    """Whether a linear has more outputs than inputs, and they are neither the inputs of another
    linear, as those of a hidden layer, nor outputs of the graph."""
    read = linear_of(linear)
    if read is None or stop.node.op == "output" or function_of(stop.node) in LINEARS:
        return False
    v = hint(value(linear).shape[read.dim])
    return v > hint(value(read.x).shape[-1]) and v >= LEAST_CLASSES


def _check_worth(head: Head, least: float) -> None:
    """``NoMatch`` if the gradients of the weight, one for each call, or a copy of the weight take
    more memory than the logits; see :mod:`fxpass.match.profitability`."""
    linear = head.flow.linear
    if not least:
        return
    weight = value(linear.weight)
    one = hint(weight.shape[0]) * hint(weight.shape[1]) * value(linear.node).dtype.itemsize
    trained = [call.spec.gradients for call in head.calls if call.spec.gradients]
    taken = one * sum("weight" in gradients for gradients in trained) - one
    taken += one * sum("x" not in gradients for gradients in trained)
    if taken > 0 and taken >= head.logits_bytes:
        reason = f"{len(trained)} passes over its weight would take {size(taken)} for gradients"
        raise NoMatch(linear.node, f"{reason} or copies of it, for {size(head.logits_bytes)}")


def _large(linear: Linear, least: float) -> bool:
    if not is_tensor(linear.node):
        return False
    classes = hint(value(linear.node).shape[linear.dim])
    return not least or (logits_bytes(linear) >= least * MIB and classes >= LEAST_CLASSES)
