"""Autocast in a Dynamo graph: enabled around the graph, or entered inside it.

In: a node of a region. Out: the dtype of autocast at this node, and whether autocast casts the
operands of an operation: it does for ``addmm``, but not for ``addmm_``, for ``out=`` overloads, or
for fused operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxpass.graph.region import Region


def autocast_dtype(region: Region, site: Node, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast at ``site``, entered in the graph or around it; None if disabled."""
    if region.backward:
        # the backward pass runs after the user's autocast context has ended
        ambient = None
    elif region.outer is not None and region.call is not None:
        ambient = autocast_dtype(region.outer, region.call, device)
        if region.call.target is torch.ops.higher_order.wrap_with_autocast:  # of torch.export
            ambient = _entered(ambient, device, *region.call.args[:3])
    else:
        enabled = torch.is_autocast_enabled(device.type)
        ambient = torch.get_autocast_dtype(device.type) if enabled else None
    stack = [ambient]
    for node in region.module.graph.nodes:
        if node is site:
            break
        if node.target is torch.amp.autocast_mode._enter_autocast:
            stack.append(_entered(stack[-1], device, *node.args[:3]))
        elif node.target is torch.amp.autocast_mode._exit_autocast:
            stack.pop()
        # the calls in place of a context, in a graph of make_fx
        elif node.target is torch.set_autocast_enabled and node.args[0] == device.type:
            stack[-1] = torch.get_autocast_dtype(device.type) if node.args[1] else None
        elif node.target is torch.set_autocast_dtype and node.args[0] == device.type:
            stack[-1] = stack[-1] and node.args[1]  # type: ignore[assignment]
    return stack[-1]


def _entered(
    outside: torch.dtype | None, device: torch.device, kind: Any, dtype: Any, enabled: Any
) -> torch.dtype | None:
    """The dtype of autocast on ``device`` in a context for the device type ``kind``."""
    if kind != device.type:
        return outside
    return (dtype or torch.get_autocast_dtype(device.type)) if enabled else None


def covers(operator: str, device: torch.device) -> bool:
    """True if autocast on ``device`` casts the operands of ``aten::<name>[.<overload>]``.

    The dispatcher has an autocast kernel for such an operation.
    """
    name = {"privateuseone": "PrivateUse1"}.get(device.type, device.type.upper())
    key = f"Autocast{name}"
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key)
    except RuntimeError:
        return False  # no such operation, or no autocast on this device
