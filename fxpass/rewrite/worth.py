"""Rejects heads whose fusion would cost more time or memory than it saves.

In: the operator calls of a head, in its graph, and the size below which logits are not worth an
operator (``FUSEDCE_MIN_LOGITS_MB``; 0 fuses all). Out: the reason to reject the head, or None. So a
program never takes more memory than with the inner backend alone, which saves the logits of all
losses for backward and overwrites them with their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from fxpass.capture.capture import Captured
from fxpass.capture.values import nodes_behind, trimmed
from fxpass.graph.calls import storage
from fxpass.graph.functions import CASTS, function_of
from fxpass.graph.nodes import hint, is_tensor, value
from fxpass.graph.placements import placement_name
from fxpass.plan.plan import budget, plan, size
from fxpass.plan.worth import FUSES_ALL
from fxpass.rewrite.lowered import Inserted
from fxpass.spec.dtypes import gradient_dtype


def too_costly(captured: Captured, calls: Sequence[Inserted], least: float) -> str | None:
    """Why the calls of one head would cost more than they save."""
    if not least or not calls:
        return None
    return next(filter(None, (rule(captured, calls) for rule in _RULES)), None)


def _kept_weight(captured: Captured, calls: Sequence[Inserted]) -> str | None:
    """A head of frozen hidden states whose backward computes the logits again, if the copy of the
    weight that it keeps for this takes as much memory as the logits."""
    one = calls[0]
    copy = _elements(one) * one.dtype.itemsize
    waits = [c.choice.spec for c in calls if c.choice.spec.gradients and not c.choice.spec.total]
    if copy < _logits(one) or all("x" in spec.gradients for spec in waits):
        return None
    what = f"backward would need a copy of the weight, {size(copy)}"
    return f"{what} for {size(_logits(one))} of logits ({FUSES_ALL})"


def _computed_weight(captured: Captured, calls: Sequence[Inserted]) -> str | None:
    """A head whose weight the graph computes, such as a merged LoRA, if the weight's gradient takes
    more memory than the logits. The operator makes this gradient while the computed weight is
    alive; the inner backend keeps the logits instead, and makes it without the weight."""
    made = _of_weight(calls)
    (head, *_) = captured.slice.recorder.heads
    if not made or not any(map(_is_computed, nodes_behind([head.weight]))):
        return None
    (n, v), d = _sizes(made[0]), _hidden(made[0])
    dtype, device = made[0].dtype, value(made[0].x).device
    unrounded = any("weight" in call.choice.spec.unrounded for call in calls)
    gradient = v * d * gradient_dtype(dtype, unrounded).itemsize
    scaled = made[0].normal.base.scale != 1
    plans = [plan(n, d, v, dtype, device, c.choice.spec, scaled, True) for c in made]
    if gradient + max(p.scratch + p.sums for p in plans) <= _logits(made[0]):
        return None
    what = f"the graph computes its weight, whose gradient takes {size(gradient)}"
    return f"{what} for {size(_logits(made[0]))} of logits ({FUSES_ALL})"


def _many_gradients(captured: Captured, calls: Sequence[Inserted]) -> str | None:
    """Several calls over one weight, if their weight gradients, one for each, take more memory than
    the logits."""
    made = _of_weight(calls)
    if not made:
        return None
    (n, v), one = _sizes(made[0]), made[0]
    rows = (*one.lowered.others, n)
    if len(rows) < 2:
        return None
    saved = sum(map(hint, rows)) * v * one.dtype.itemsize
    gradients = len(rows) * _elements(one) * gradient_dtype(value(one.weight).dtype).itemsize
    memory, device = one.choice.spec.memory_mb, value(one.x).device
    if gradients + budget(n, v, one.dtype, device, memory) <= saved:
        return None
    what = f"{len(rows)} passes over one weight make a gradient of it each"
    return f"{what}, {size(gradients)} for {size(saved)} of logits ({FUSES_ALL})"


def _copied_logits(captured: Captured, calls: Sequence[Inserted]) -> str | None:
    """A head whose logits exist, and of which some rows are read without gradients: they would be a
    copy, and the inner backend reads them where they are."""
    for call in calls if captured.kept else ():
        chain = trimmed(call.lowered.call.leaves[0].chain)
        if not call.choice.spec.gradients and any(op.kind != "reshape" for op in chain):
            return f"the rows of its logits that are read would be copied ({FUSES_ALL})"
    return None


_RULES = (_kept_weight, _computed_weight, _many_gradients, _copied_logits)


def _of_weight(calls: Sequence[Inserted]) -> list[Inserted]:
    """The calls that make a gradient of the weight."""
    return [call for call in calls if "weight" in call.choice.spec.gradients]


def _sizes(call: Inserted) -> tuple[int, int]:
    """Rows and classes of a rank: of the one with most, so that all ranks decide alike."""
    sharding = call.ranks.sharding
    classes = hint(value(call.weight).shape[0]) if sharding is None else sharding.most
    return hint(value(call.x).shape[0]), classes


def _hidden(call: Inserted) -> int:
    return hint(value(call.x).shape[-1])


def _elements(call: Inserted) -> int:
    """Those of the weight."""
    return _sizes(call)[1] * _hidden(call)


def _logits(call: Inserted) -> int:
    """Bytes of a rank's logits."""
    n, v = _sizes(call)
    return n * v * call.dtype.itemsize


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
