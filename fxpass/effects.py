"""What happens between two nodes that could make moving the first one down to the second wrong.

In: a graph's order, the two nodes, and the nodes whose values are read. Out: the first hazard, as a
node and a reason, or None.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch.fx import Node

from fxpass.rules import is_tensor, reads_values, writes
from fxpass.source import call_name, source_line


def hazard(
    order: dict[Node, int], first: Node, last: Node, read: Iterable[Node], own: Collection[Node]
) -> tuple[Node, str] | None:
    """The first node between ``first`` and ``last`` that may write what ``read`` holds, or that
    switches gradients on or off.

    ``own`` are the nodes on the way from ``first`` to ``last``. Such a node may write to the one
    before it, if nobody else reads that memory: then it is as good as a node that returns a new
    tensor.
    """
    storages = {_storage(node) for node in read if is_tensor(node)}
    for node, position in order.items():
        if not order[first] < position < order[last]:
            continue
        if node.target is torch._C._set_grad_enabled:
            return node, "gradients are switched on or off between the linear and the loss"
        if not writes(node):
            continue
        if node in own:
            if found := _second_reader(node, {first, last, *own}):
                return found
            continue
        for operand in node.all_input_nodes:
            if is_tensor(operand) and _storage(operand) in (None, *storages):
                return node, (
                    f"%{node.name} ({call_name(node)}) may change %{operand.name} in place between "
                    "the linear and the loss"
                )
    return None


def _second_reader(writer: Node, own: Collection[Node]) -> tuple[Node, str] | None:
    """Somebody who may see what ``writer``, a node on the way, writes to its operand."""
    written = {_storage(n) for n in writer.all_input_nodes if is_tensor(n)}
    aliases = [n for n in own if is_tensor(n) and n.op != "placeholder" and _storage(n) in written]
    before = [n for n in aliases if _comes_before(n, writer)]
    for alias in before:
        for user in alias.users:
            if user not in own and reads_values(user, alias):
                return writer, (
                    f"%{writer.name} ({call_name(writer)}) changes %{alias.name} in place, which "
                    f"is also read by %{user.name} ({source_line(user)})"
                )
    return None


def _comes_before(a: Node, b: Node) -> bool:
    return a < b


def _storage(node: Node) -> int | None:
    """What aliases share; None if it cannot be known (tensors inside torch.func transforms)."""
    try:
        return node.meta["example_value"].untyped_storage()._cdata
    except NotImplementedError:
        return None
