"""Where an operator call stands: after its operands, some of which are moved to it.

In: the nodes that a call reads, and the first node that it replaces. Out: the node after which the
call stands, and the operands that are moved::

    %lp = log_softmax(%z, -1);  %e = entropy(%lp);  %t = labels[1:];  %a = gather(%lp, -1, %t)
    ->  the call stands before %e, and %t is moved to it
"""

from __future__ import annotations

from collections.abc import Collection, Container

from torch.fx import Node

from fxpass.graph.calls import written
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import NoMatch, is_tensor, needs_gradient, value
from fxpass.match.classes import Flow
from fxpass.match.views import VIEWS


def movable(node: Node, first: Node, replaced: Container[Node]) -> list[Node] | None:
    """The nodes that have to be moved before ``first`` so that ``node`` exists there, in the
    graph's order; None if they cannot be moved, as the nodes that calls replace. A tensor with
    gradients would get another mode of autograd."""
    found, todo, between = set(), [node], first
    while todo:
        one = todo.pop()
        if one < first or one in found:
            continue
        if one.op == "placeholder" or not is_tensor(one) or value(one).requires_grad:
            return None
        if function_of(one) not in _PURE or written(one) or one in replaced:
            return None
        if any(map(needs_gradient, one.all_input_nodes)):  # it stands under no_grad
            return None
        found.add(one)
        todo += one.all_input_nodes
    while between < node:
        if written(between):
            return None
        between = between.next
    return sorted(found)


# Functions of indices and masks, and what makes them.
_PURE = {
    *VIEWS,
    *("add", "sub", "clamp", "clamp_min", "where", "masked_fill", "remainder", "to", "long"),
    *("eq", "ne", "lt", "gt", "le", "ge", "expand", "float", "type_as", "mul", "neg"),
    *("arange", "zeros", "ones", "full"),
}


def place(flow: Flow, operands: Collection[Node], first: Node) -> tuple[Node, tuple[Node, ...]]:
    """The node after which the call stands, and the operands that are moved to it; not those that
    calls replace."""
    moved: dict[Node, None] = {}
    for operand in operands:
        nodes = movable(operand, first, flow.replaced)
        if nodes is None:
            reason = f"%{operand.name} is an operand, and is computed after %{first.name}"
            raise NoMatch(operand, reason)
        moved |= dict.fromkeys(nodes)
    # what is moved may copy a tensor that has been written to
    read = {*operands, *(n for node in moved for n in node.all_input_nodes)} - moved.keys()
    writes = flow.writes({*read, *operands}, before=first)
    return max(flow.linear.node, *read, *writes), tuple(sorted(moved))
