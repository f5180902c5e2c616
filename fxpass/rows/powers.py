"""Gradients of fp16 that do not depend on the size of the tangent.

In: the operands of a call that are linear in a tangent. Out: the operands times a power of two by
which the largest is near 1, and the power's inverse, for the results. What the call computes of
them is linear too, so results are exact where fp16 would underflow; both are computed on the
device, without a wait::

    0.5 / 50000 in each row    * 2 ** 16 → 0.66    results * 2 ** -16, in f32

A tangent that is taken for 1 is taken for ``ONE`` in fp16: a mean over many rows divides it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import torch
from torch.fx import Node

from fxpass.rows.outer import Outer
from fxpass.rows.rules import A, P
from fxpass.rows.sizes import packet, value

ONE = 256
# The largest operand is not taken for less: the power stays finite, and so does its inverse.
_LEAST = 2.0**-100
_VIEWS = {A.expand, A.view, A._unsafe_view, A.reshape, A.unsqueeze, A.squeeze, A.permute, A.t}


class Power:
    """A power of two for some operands.

    Args:
        outer: of the graph.
        operands: floating-point nodes.

    Attributes:
        inverse: a node, 0-dim f32.
    """

    def __init__(self, outer: Outer, operands: Iterable[Node]) -> None:
        self.outer = outer
        self._scaled: dict[Node, Node] = {}
        call = outer.call
        largest = None
        for node in dict.fromkeys(map(_base, operands)):
            one = self._largest(node)
            largest = one if largest is None else call(A.maximum.default, largest, one)
        assert largest is not None
        zero = call(A.eq.Scalar, largest, 0)
        one = outer.full([], 1.0, torch.float32)
        largest = call(A.where.self, zero, one, call(A.clamp_min.default, largest, _LEAST))
        mantissa = call(torch.ops.aten.frexp.Tensor, largest)
        with_mantissa = call(operator.getitem, mantissa, 0)
        # a quotient of numbers with the same mantissa is an exact power of two
        self._factor = call(A.div.Tensor, with_mantissa, largest)
        self.inverse = call(A.div.Tensor, largest, with_mantissa)

    def _largest(self, node: Node) -> Node:
        """The largest finite absolute value, 0-dim f32; 0 of none."""
        call = self.outer.call
        made = call(A.abs.default, self._wide(node))
        zero = self.outer.full([], 0.0, torch.float32)
        made = call(A.where.self, call(A.lt.Scalar, made, math.inf), made, zero)  # nan is not less
        made = call(A.reshape.default, made, [-1])
        return call(A.amax.default, call(A.constant_pad_nd.default, made, [0, 1]), [0])

    def _wide(self, node: Node) -> Node:
        if value(node).dtype == torch.float32:
            return node
        return self.outer.call(P.convert_element_type.default, node, torch.float32)

    def of(self, node: Node) -> Node:
        """An operand times the power, in its dtype. What is expanded is multiplied before."""
        if node not in self._scaled:
            call = self.outer.call
            if node is not _base(node):
                source, *args = node.args
                made = call(node.target, self.of(source), *args, **node.kwargs)  # pyright: ignore
            else:
                made = call(A.mul.Tensor, self._wide(node), self._factor)
                if value(made).dtype != value(node).dtype:
                    made = call(P.convert_element_type.default, made, value(node).dtype)
            self._scaled[node] = made
        return self._scaled[node]


def _base(node: Node) -> Node:
    """The source of a view."""
    while packet(node) in _VIEWS and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node
