"""Rejects heads whose fusion would cost more time or memory than it saves.

In: a head, the other heads of its graph, and the size below which logits are not worth an operator
(``FUSEDCE_MIN_LOGITS_MB``; 0 fuses all). Out: the reason to reject the head, or None. So a program
never takes more memory than with the inner backend alone, which saves the logits of all losses for
backward and overwrites them with their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.fx import Node

from fxpass.graph.calls import storage
from fxpass.graph.functions import CASTS, function_of
from fxpass.graph.nodes import hint, is_tensor, value
from fxpass.graph.placements import placement_name
from fxpass.match.classes import rest_of
from fxpass.match.edits import keeps_rows
from fxpass.match.head import Head
from fxpass.match.join import Call
from fxpass.match.linears import Linear
from fxpass.plan.plan import MIB, budget, plan, size
from fxpass.spec.dtypes import gradient_dtype

# With fewer classes, target, sums and gradients of a row take as much memory as its logits.
LEAST_CLASSES = 256
FUSES_ALL = "FUSEDCE_MIN_LOGITS_MB=0 fuses all"


def too_small(linear: Linear, least: float) -> str | None:
    """Rejects small logits, logits with few classes, and those that take less memory than their
    hidden states: views of rows, rows that are left out, and f32 sums are copies of these."""
    classes, taken = hint(value(linear.node).shape[linear.dim]), _bytes(linear.node)
    if least and taken < least * MIB:
        return f"its logits take {size(taken)}, fewer than {least:g} MiB ({FUSES_ALL})"
    if least and classes < LEAST_CLASSES:
        what = f"rows of {classes} logits take hardly more memory than the other values of a row"
        return f"{what} ({FUSES_ALL})"
    if least and _bytes_of_row(linear.x, -1) > _bytes_of_row(linear.node, linear.dim):
        hidden = hint(value(linear.x).shape[-1])
        what = f"rows of {classes} logits take less memory than their {hidden} hidden values"
        return f"{what} ({FUSES_ALL})"
    return None


def bytes_of(linear: Linear) -> str:
    """The size of a linear's output, as text."""
    return size(_bytes(linear.node))


def _bytes(node: Node) -> int:
    return math.prod(map(hint, value(node).shape)) * value(node).dtype.itemsize


def _bytes_of_row(node: Node, dim: int) -> int:
    return hint(value(node).shape[dim]) * value(node).dtype.itemsize


def kept_weight(head: Head, made: Sequence[Head], least: float) -> str | None:
    """Rejects a head of frozen hidden states whose backward computes the logits again, if the copy
    of the weight that it keeps for this takes as much memory as the logits."""
    copy = _elements(head) * value(head.flow.linear.node).dtype.itemsize
    waits = [c.spec for c in head.calls if c.spec.gradients and c.total is None]
    if not least or copy < head.logits_bytes or all("x" in spec.gradients for spec in waits):
        return None
    what = f"backward would need a copy of the weight, {size(copy)}"
    return f"{what} for {size(head.logits_bytes)} of logits ({FUSES_ALL})"


def computed_weight(head: Head, made: Sequence[Head], least: float) -> str | None:
    """Rejects a head whose weight the graph computes, such as a merged LoRA, if the weight's
    gradient takes more memory than the logits. The operator makes this gradient while the computed
    weight is alive; the inner backend keeps the logits instead, and makes it without the weight."""
    linear = head.flow.linear
    if not least or not _of_weight(head) or not _is_computed(linear.weight):
        return None
    logits, (n, v) = value(linear.node), head.of_rank
    d, dtype = hint(value(linear.x).shape[-1]), logits.dtype
    unrounded = any("weight" in call.spec.unrounded for call in head.calls)
    gradient = v * d * gradient_dtype(dtype, unrounded).itemsize
    plans = [
        plan(n, d, v, dtype, logits.device, c.spec, c.base.scale != 1, True)
        for c in _of_weight(head)
    ]
    if gradient + max(p.scratch + p.sums for p in plans) <= head.logits_bytes:
        return None
    what = f"the graph computes its weight, whose gradient takes {size(gradient)}"
    return f"{what} for {size(head.logits_bytes)} of logits ({FUSES_ALL})"


def many_gradients(head: Head, made: Sequence[Head], least: float) -> str | None:
    """Rejects several calls over one weight if their weight gradients, one for each, take more
    memory than the logits."""
    n, v = head.of_rank
    rows = (*others(head, made), *[n] * len(_of_weight(head)))
    if not least or len(rows) < 2 or not _of_weight(head):
        return None
    linear = head.flow.linear
    logits = value(linear.node)
    saved = sum(map(hint, rows)) * v * logits.dtype.itemsize
    gradients = len(rows) * _elements(head) * gradient_dtype(value(linear.weight).dtype).itemsize
    memory = head.calls[0].spec.memory_mb
    allowed = budget(n, v, logits.dtype, logits.device, memory)
    if gradients + allowed <= saved:
        return None
    what = f"{len(rows)} passes over one weight make a gradient of it each"
    return f"{what}, {size(gradients)} for {size(saved)} of logits ({FUSES_ALL})"


def copied_logits(head: Head, made: Sequence[Head], least: float) -> str | None:
    """Rejects a head whose logits exist, and of which some rows are read without gradients: they
    would be a copy, and the inner backend reads them where they are."""
    for call in head.calls:
        if not least or call.logits is None or call.spec.gradients:
            continue
        views = rest_of(call.base, head.flow.classes[call.logits]) or ()
        if not all(map(keeps_rows, views)):
            return f"the rows of its logits that are read would be copied ({FUSES_ALL})"
    return None


# The rules about one head among all that were made.
RULES = (kept_weight, computed_weight, many_gradients, copied_logits)


def others(head: Head, made: Sequence[Head]) -> tuple[int, ...]:
    """The rows of each call of another head that makes a gradient of the same weight."""
    weight = stored(head.flow.linear.weight)
    return tuple(
        other.of_rank[0]
        for other in made
        if other.flow is not head.flow and stored(other.flow.linear.weight) is weight
        for _ in _of_weight(other)
    )


def _of_weight(head: Head) -> list[Call]:
    """The calls that make a gradient of the weight."""
    return [call for call in head.calls if "weight" in call.spec.gradients]


def _elements(head: Head) -> int:
    """Those of the weight."""
    return head.of_rank[1] * hint(value(head.flow.linear.x).shape[-1])


def _is_computed(weight: Node) -> bool:
    """Whether a graph computes a weight, so that its memory can be freed after the linear. A cast
    is not counted: the gradient of what was cast takes as much memory."""
    while weight.all_input_nodes:
        source = weight.all_input_nodes[0]
        is_view = is_tensor(source) and storage(weight) == storage(source)
        if not (is_view or function_of(weight) in CASTS or placement_name(weight.target)):
            return True
        weight = source
    return False


def stored(node: Node) -> Node:
    """The tensor behind casts, transposes and other views of all its elements."""
    while node.op in ("call_function", "call_method") and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if not is_tensor(source) or value(source).numel() != value(node).numel():
            break
        node = source
    return node
