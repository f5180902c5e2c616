"""Which nodes of backward are a number of the tangent times what they would be for a tangent of 1.

In: a joint graph and one of its tangents. Out: for each node 1, 0 (it does not read the tangent) or
None (neither). A gradient of degree 1 can be computed in forward::

    dz = (softmax(z) - onehot) * tangent / N     degree 1
    dz = softmax(z) * clamp(tangent, max=1)      None
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, Node

from fxpass.rows.rules import A, P, Rules
from fxpass.rows.sizes import packet

META = {A.sym_size, A.sym_numel, A.sym_stride}
# Linear in their first argument; the others are not of the tangent.
LINEAR = {A.view, A._unsafe_view, A.reshape, A.permute, A.expand, A.unsqueeze, A.squeeze, A.slice}
LINEAR |= {A.select, A.neg, A.sum, A.mean, A.clone, A.alias, A._to_copy, A.gather, A.index, A.split}
LINEAR |= {A.split_with_sizes, A.unbind, A.t, A.transpose, A.cumsum, A.flip, A.roll, A.detach}
LINEAR |= {A.index_select, A.constant_pad_nd, P.convert_element_type, operator.getitem}
PRODUCTS = {A.mm, A.bmm}
# Of these arguments, each is of degree 1 or 0 itself, and the others do not read the tangent.
SUMMED = {A.add: (0, 1), A.sub: (0, 1), A.where: (1, 2), A.slice_scatter: (0, 1)}
SUMMED |= {A.select_scatter: (0, 1), A.index_put: (0, 2), A.scatter: (0, 3), A.scatter_add: (0, 3)}
SUMMED |= {A.masked_fill: (0, 2), A.copy: (1,), A.scatter_reduce: (0, 3)}


def degrees(rules: Rules, graph: Graph, *tangents: Node) -> dict[Node, int | None]:
    """The degree of each node in the tangents: in one of one element, or in all together."""
    found: dict[Node, int | None] = {}
    for node in graph.nodes:
        found[node] = 1 if node in tangents else _degree(rules, node, found)
    return found


def _degree(rules: Rules, node: Node, found: dict[Node, int | None]) -> int | None:
    read = [a for a in node.all_input_nodes if found[a] != 0]
    if not read or packet(node) in META:
        return 0
    if any(found[a] is None for a in read):
        return None

    def of(arg: Any) -> int:
        return (found[arg] or 0) if isinstance(arg, Node) else 0

    def fits(arg: Any) -> Any:
        """Whether an argument is of degree 1, or 0 itself."""
        if isinstance(arg, Node):
            zero = packet(arg) is A.scalar_tensor and arg.args[0] == 0
            return found[arg] == 1 or zero or rules.fill(arg) == 0
        return arg == 0

    what = packet(node)
    args: Any = node.args
    if what in (A.mul, *PRODUCTS):
        return 1 if of(args[0]) + of(args[1]) == 1 else None
    if what is A.div:
        return 1 if of(args[0]) == 1 and not of(args[1]) and not node.kwargs else None
    if what is P.fma:
        return 1 if of(args[0]) + of(args[1]) == 1 and fits(args[2]) else None
    if what is A.cat:
        return 1 if all(map(fits, args[0])) else None
    if what in SUMMED:
        summed = {args[i] for i in SUMMED[what] if i < len(args)}
        return 1 if all(map(fits, summed)) and set(read) <= summed else None
    if what in LINEAR:
        return 1 if read == [args[0]] else None
    return None
