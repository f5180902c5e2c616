"""The degree of each node in a tangent, AOTAutograd's name for the incoming gradient of an output.

In: a joint graph and one of its tangents. Out: for each node 1 (linear in the tangent), 0 (does not
depend on the tangent) or None (neither). Forward can compute a gradient of degree 1, for a tangent
of 1::

    dz = (softmax(z) - onehot) * tangent / N     degree 1
    dz = softmax(z) * clamp(tangent, max=1)      None
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from fxpass.rows.aten_calls import A, P
from fxpass.rows.rules import Rules
from fxpass.rows.sizes import packet

META = {A.sym_size, A.sym_numel, A.sym_stride}
# Linear in the first argument.
_LINEAR = {A.view, A._unsafe_view, A.reshape, A.permute, A.expand, A.unsqueeze, A.squeeze, A.slice}
_LINEAR |= {
    A.select,
    A.neg,
    A.sum,
    A.mean,
    A.clone,
    A.alias,
    A._to_copy,
    A.gather,
    A.index,
    A.split,
}
_LINEAR |= {A.split_with_sizes, A.unbind, A.t, A.transpose, A.cumsum, A.flip, A.roll, A.detach}
_LINEAR |= {A.index_select, A.constant_pad_nd, P.convert_element_type, operator.getitem}
_PRODUCTS = {A.mm, A.bmm}
# Linear in these arguments together: each is of degree 1, or is the number 0.
_SUMMED = {A.add: (0, 1), A.sub: (0, 1), A.where: (1, 2), A.slice_scatter: (0, 1)}
_SUMMED |= {A.select_scatter: (0, 1), A.index_put: (0, 2), A.scatter: (0, 3), A.scatter_add: (0, 3)}
_SUMMED |= {A.masked_fill: (0, 2), A.copy: (1,), A.scatter_reduce: (0, 3)}


def degrees(rules: Rules, graph: Graph, *tangents: Node) -> dict[Node, int | None]:
    """The degree of each node in one scalar tangent, or in all tangents together."""
    found: dict[Node, int | None] = {}
    for node in graph.nodes:
        found[node] = 1 if node in tangents else _degree(rules, node, found)
    return found


def _degree(rules: Rules, node: Node, found: dict[Node, int | None]) -> int | None:
    dependent = [a for a in node.all_input_nodes if found[a] != 0]
    if not dependent or packet(node) in META:
        return 0
    if any(found[a] is None for a in dependent):
        return None

    def degree(arg: Any) -> int:
        return (found[arg] or 0) if isinstance(arg, Node) else 0

    def is_linear(arg: Any) -> Any:
        """Is true for an argument of degree 1, and for the number 0."""
        if isinstance(arg, Node):
            zero = packet(arg) is A.scalar_tensor and arg.args[0] == 0
            return found[arg] == 1 or zero or rules.fill_value(arg) == 0
        return arg == 0

    target = packet(node)
    args: Any = node.args
    linear = False
    if target in (A.mul, *_PRODUCTS):
        linear = degree(args[0]) + degree(args[1]) == 1
    elif target is A.div:
        linear = degree(args[0]) == 1 and not degree(args[1]) and not node.kwargs
    elif target is P.fma:
        linear = degree(args[0]) + degree(args[1]) == 1 and is_linear(args[2])
    elif target is A.cat:
        linear = all(map(is_linear, args[0]))
    elif target in _SUMMED:
        summed = {args[i] for i in _SUMMED[target] if i < len(args)}
        linear = all(map(is_linear, summed)) and set(dependent) <= summed
    elif target in _LINEAR:
        linear = dependent == [args[0]]
    return 1 if linear else None
