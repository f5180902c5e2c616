"""Explicit casts: the dtypes that autocast would have used, written into the graph.

In: a match. Out: ``.to`` nodes in front of the operands whose dtype differs from the one that the
original linear computed in, and a :class:`Cast` for each, for the log and the report. The operator
is not on autocast's list, so without them it would meet bf16 hidden states and f32 weights.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from fxpass.region import Region
from fxpass.source import source_line

log = logging.getLogger(__name__)

LOW_PRECISION = (torch.float16, torch.bfloat16)


class MixedDtypeError(RuntimeError):
    """Operands of unlike dtypes outside autocast, under ``FUSEDCE_MIXED_DTYPES=error``."""


@dataclass(frozen=True)
class Cast:
    """One cast that was put in: which value, from and to which dtype, and the user's line."""

    operand: str
    old: torch.dtype
    new: torch.dtype
    source: str

    def __str__(self) -> str:
        return f"cast: %{self.operand} {short(self.old)} -> {short(self.new)}: {self.source}"


def short(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def cast(graph: Graph, operand: Node, dtype: torch.dtype, site: Node) -> tuple[Node, Cast | None]:
    """``operand`` in ``dtype``, for use at the graph's insertion point.

    Returns the operand itself and no record where it has the dtype already; else a visible ``.to``
    node with the stack trace of ``site``, whose gradient comes back in the operand's own dtype.
    """
    example = operand.meta["example_value"]
    if example.dtype == dtype:
        return operand, None
    node = graph.call_method("to", (operand, dtype))
    node.meta["example_value"] = example.to(dtype)
    node.meta["stack_trace"] = site.meta.get("stack_trace")
    return node, Cast(operand.name, example.dtype, dtype, source_line(site))


def common_dtype(x: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """The dtype for operands that no autocast has made alike.

    One low precision and one wider dtype give the low precision, as under autocast; float16 with
    bfloat16 gives float32, since neither holds the other.
    """
    low = [dtype for dtype in (x, weight) if dtype in LOW_PRECISION]
    if len(set(low)) == 2:
        log.warning(
            "float16 meets bfloat16: computed in float32. A weight was probably read with the "
            "wrong dtype, and then its values are wrong too: check how it was loaded"
        )
        return torch.float32
    return low[0] if low else torch.promote_types(x, weight)


def autocast_dtype(region: Region, site: Node, device: torch.device) -> torch.dtype | None:
    """The dtype of the autocast in force at ``site``, in the graph or around it; None if off."""
    if region.outer is not None and region.call is not None:
        ambient = autocast_dtype(region.outer, region.call, device)
    else:
        enabled = torch.is_autocast_enabled(device.type)
        ambient = torch.get_autocast_dtype(device.type) if enabled else None
    stack = [ambient]
    for node in region.module.graph.nodes:
        if node is site:
            break
        if node.target is torch.amp.autocast_mode._enter_autocast:
            kind, dtype, on, _ = node.args
            chosen = (dtype or torch.get_autocast_dtype(device.type)) if on else None
            stack.append(chosen if kind == device.type else stack[-1])
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            stack.pop()
    return stack[-1]
