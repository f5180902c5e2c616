"""Which losses cost more fused than they save, and are left to the inner backend.

In: a match, the others of its graph, and the least size of logits that is worth an operator
(``FUSEDCE_MIN_LOGITS_MB``; 0 fuses all). Out: the reason to decline it, or None. A program never
takes more memory than with the inner backend alone, which keeps the logits of all losses for
backward and turns them into their gradients in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from fxpass.graph import hazards
from fxpass.graph.nodes import hint, is_tensor, value
from fxpass.plan.devices import gradient_dtype
from fxpass.plan.plan import MIB, budget

if TYPE_CHECKING:
    from fxpass.match.match import Match

# With fewer, the target, sums and gradients of a row are as long as its logits.
LEAST_CLASSES = 256


def too_small(match: Match, least: float) -> str | None:
    """Few logits, or short rows of them."""
    if not least:
        return None
    if match.logits_bytes < least * MIB:
        return f"its logits take {match.logits_bytes / MIB:.1f} MiB, fewer than {least:g}"
    if (classes := hint(match.shape[1])) < LEAST_CLASSES:
        return f"rows of {classes} logits are hardly longer than what is kept of each row"
    return None


def kept_for_users(match: Match, least: float) -> str | None:
    """Logits that something else in the graph reads: they exist, and backward can reuse them.
    Those that leave the graph cannot be reused, so that their loss gains."""
    if not least or not match.spec.gradients or hazards.leaves(match.chain.base):
        return None
    return "something else in the graph reads its logits, which are kept for backward in any case"


def many_gradients(match: Match, matches: Sequence[Match], least: float) -> str | None:
    """Several losses over one weight, each of which makes a gradient of its own: together they
    take more than the logits."""
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
        f"{gradients / MIB:.0f} MiB for {saved / MIB:.0f} MiB of logits"
    )


def others(match: Match, matches: Sequence[Match]) -> tuple[int | torch.SymInt, ...]:
    """Rows of the other matches over the same weight, each of which makes a gradient of it."""
    weight = _stored(match.chain.linear.weight)
    return tuple(
        m.shape[0]
        for m in matches
        if m is not match
        and "weight" in m.spec.gradients
        and _stored(m.chain.linear.weight) is weight
    )


def _stored(node: Node) -> Node:
    """The tensor that a node is a cast, a transpose or another view of all of."""
    while node.op in ("call_function", "call_method") and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if not is_tensor(source) or value(source).numel() != value(node).numel():
            break
        node = source
    return node
