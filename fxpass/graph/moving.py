"""Operands that can be moved to an earlier place of a graph.

In: a node, and the node before which it is wanted. Out: the nodes to move, or None::

    %lp = log_softmax(%z, -1);  %e = entropy(%lp);  %t = labels[1:];  %a = gather(%lp, -1, %t)
    ->  a call before %e may read %t, which is moved to it
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch.fx import Node

from fxpass.graph.calls import storage, written
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import is_tensor, needs_gradient, value

# Functions of indices, masks and weights, and what makes them.
_PURE = {
    *("getitem", "select", "index", "slice", "index_select", "contiguous", "clone", "expand"),
    *("transpose", "permute", "movedim", "t", "view", "reshape", "flatten", "unflatten"),
    *("unsqueeze", "squeeze", "narrow", "numpy_T", "mT", "gather"),
    *("add", "sub", "mul", "div", "neg", "clamp", "clamp_min", "clamp_max", "where"),
    *("masked_fill", "remainder", "reciprocal", "maximum", "minimum", "sum", "mean", "any", "all"),
    *("eq", "ne", "lt", "gt", "le", "ge", "bitwise_not", "invert", "logical_not", "logical_and"),
    *("to", "long", "float", "type_as", "arange", "zeros", "ones", "full"),
}


def movable(
    nodes: Iterable[Node], first: Node, fixed: Container[Node] = frozenset()
) -> list[Node] | None:
    """The nodes that have to be moved before ``first`` so that ``nodes`` exist there, in the
    graph's order; None if they cannot be moved. A tensor with gradients would get another mode of
    autograd.

    Args:
        nodes: what is wanted.
        first: the place.
        fixed: nodes that are not moved.
    """
    found, todo = set[Node](), [*nodes]
    while todo:
        one = todo.pop()
        if one < first or one in found:
            continue
        if one.op == "placeholder" or not is_tensor(one) or value(one).requires_grad:
            return None
        if function_of(one) not in _PURE or written(one) or one in fixed:
            return None
        if any(map(needs_gradient, one.all_input_nodes)):  # it stands under no_grad
            return None
        found.add(one)
        todo += one.all_input_nodes
    between = first
    memory = {storage(n) for one in found for n in one.all_input_nodes if is_tensor(n)}
    while found and between < max(found):
        if any(storage(n) in {None, *memory} or None in memory for n in written(between)):
            return None
        between = between.next
    return sorted(found)
