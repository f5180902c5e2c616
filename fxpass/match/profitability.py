"""Rejects losses whose fusion would cost more time or memory than it saves.

In: a match, the other matches of its graph, and the size below which logits are not worth an
operator (``FUSEDCE_MIN_LOGITS_MB``; 0 fuses all). Out: the reason to reject the match, or None. So
a program never takes more memory than with the inner backend alone, which saves the logits of all
losses for backward and overwrites them with their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fxpass.graph import hazards
from fxpass.graph.calls import storage
from fxpass.graph.functions import CASTS, function_of
from fxpass.graph.nodes import hint, is_tensor, value
from fxpass.graph.placements import placement_name
from fxpass.plan.plan import MIB, budget, plan, size
from fxpass.spec.dtypes import gradient_dtype

if TYPE_CHECKING:
    from fxpass.match.match import Match

# With fewer classes, target, sums and gradients of a row take as much memory as its logits.
LEAST_CLASSES = 256


def too_small(match: Match, least: float) -> str | None:
    """Rejects small logits, and logits with few classes."""
    if not least:
        return None
    if match.logits_bytes < least * MIB:
        return f"its logits take {size(match.logits_bytes)}, fewer than {least:g} MiB"
    if (classes := hint(match.shape[1])) < LEAST_CLASSES:
        return f"rows of {classes} logits take hardly more memory than the other values of a row"
    return None


def kept_for_users(match: Match, least: float) -> str | None:
    """Rejects a loss whose logits exist for another user in the graph, so that backward can reuse
    them. Backward cannot reuse logits that are also an output, so their loss is fused."""
    if not least or not match.spec.gradients or hazards.leaves(match.chain.base):
        return None
    return "another node of the graph reads its logits, so they are saved for backward anyway"


def kept_weight(match: Match, least: float) -> str | None:
    """Rejects a loss of frozen hidden states whose backward computes the logits again, if the copy
    of the weight that it keeps for this takes as much memory as the logits."""
    spec = match.spec
    waits = spec.waits and "x" not in spec.gradients
    if not least or not waits:
        return None
    linear = match.chain.linear
    copy = (
        hint(match.shape[1]) * hint(value(linear.x).shape[-1]) * value(linear.node).dtype.itemsize
    )
    if copy < match.logits_bytes:
        return None
    return (
        f"backward would need a copy of the weight, {size(copy)} for {size(match.logits_bytes)} of "
        "logits"
    )


def computed_weight(match: Match, least: float) -> str | None:
    """Rejects a loss over a weight that the graph computes, such as a merged LoRA, if the weight's
    gradient takes more memory than the logits. The operator makes this gradient while the computed
    weight is alive; the inner backend keeps the logits instead, and makes it without the weight."""
    linear, spec = match.chain.linear, match.spec
    if not least or "weight" not in spec.gradients or not _is_computed(linear.weight):
        return None
    logits, n, v = value(linear.node), hint(match.shape[0]), hint(match.shape[1])
    d, dtype = hint(value(linear.x).shape[-1]), logits.dtype
    of_call = replace(spec, strategy="chunked").reductions()
    found = plan(n, d, v, dtype, logits.device, of_call, False, True)
    gradient = v * d * gradient_dtype(dtype).itemsize
    if gradient + found.scratch + found.sums <= match.logits_bytes:
        return None
    return (
        f"the graph computes its weight, whose gradient takes {size(gradient)} for "
        f"{size(match.logits_bytes)} of logits"
    )


# The rules about one loss.
RULES = (too_small, kept_weight, computed_weight)


def many_gradients(match: Match, matches: Sequence[Match], least: float) -> str | None:
    """Rejects several losses over one weight if their weight gradients, one for each loss, take
    more memory than the logits."""
    rows = others(match, matches)
    if not least or not rows or "weight" not in match.spec.gradients:
        return None
    linear = match.chain.linear
    logits, weight = value(linear.node), value(linear.weight)
    v, d = hint(match.shape[1]), hint(value(linear.x).shape[-1])
    saved = sum(map(hint, (match.shape[0], *rows))) * v * logits.dtype.itemsize
    gradients = (1 + len(rows)) * v * d * gradient_dtype(weight.dtype).itemsize
    if gradients + budget(v, logits.dtype, logits.device, match.spec.memory_mb) <= saved:
        return None
    return (
        f"{1 + len(rows)} losses over one weight make a gradient of it each, "
        f"{size(gradients)} for {size(saved)} of logits"
    )


def others(match: Match, matches: Sequence[Match]) -> tuple[int | torch.SymInt, ...]:
    """The rows of each other match that makes a gradient of the same weight."""
    weight = _stored(match.chain.linear.weight)
    return tuple(
        m.shape[0]
        for m in matches
        if m is not match
        and "weight" in m.spec.gradients
        and _stored(m.chain.linear.weight) is weight
    )


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


def _stored(node: Node) -> Node:
    """The tensor behind casts, transposes and other views of all its elements."""
    while node.op in ("call_function", "call_method") and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if not is_tensor(source) or value(source).numel() != value(node).numel():
            break
        node = source
    return node
