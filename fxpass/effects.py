"""What happens between two nodes that could make moving the first one down to the second wrong.

In: a graph's order, the two nodes, and the nodes whose values are read. Out: the first hazard, as a
node and a reason, or None.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from fxpass import rules
from fxpass.source import call_name


def hazard(
    order: dict[Node, int], first: Node, last: Node, read: Iterable[Node]
) -> tuple[Node, str] | None:
    """The first node between ``first`` and ``last`` that may write what ``read`` holds, or that
    switches gradients on or off."""
    storages = {_storage(node) for node in read}
    for node, position in order.items():
        if not order[first] < position < order[last]:
            continue
        if node.target is torch._C._set_grad_enabled:
            return node, "gradients are switched on or off between the linear and the loss"
        if not rules.writes(node):
            continue
        for operand in node.all_input_nodes:
            is_tensor = isinstance(operand.meta.get("example_value"), Tensor)
            if is_tensor and _storage(operand) in (None, *storages):
                return node, (
                    f"%{node.name} ({call_name(node)}) may change %{operand.name} in place between "
                    "the linear and the loss"
                )
    return None


def _storage(node: Node) -> int | None:
    """What aliases share; None if it cannot be known (tensors inside torch.func transforms)."""
    try:
        return node.meta["example_value"].untyped_storage()._cdata
    except NotImplementedError:
        return None
