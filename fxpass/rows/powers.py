"""Loss scaling inside a call: gradients in fp16 that do not depend on the size of the tangent.

In: the operands of a call that are linear in a tangent. Out: the operands times a power of two that
brings the largest near 1, and the power's inverse, for the results. The call is linear in these
operands, so its results are exact where fp16 would underflow. The device computes the power, and
the host does not wait for it::

    0.5 / 50000 in each row    * 2 ** 16 → 0.66    results * 2 ** -16, in f32

Where forward computes gradients, an fp16 tangent is ``ONE``: a mean over many rows divides it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from fxpass.rows.aten_calls import A, P
from fxpass.rows.builder import GraphBuilder
from fxpass.rows.sizes import example, packet

ONE = 256
_LEAST = 2.0**-100  # a lower bound of the largest value: the power and its inverse stay finite
_VIEWS = {A.expand, A.view, A._unsafe_view, A.reshape, A.unsqueeze, A.squeeze, A.permute, A.t}


class Power:
    """A power of two for some operands.

    Args:
        builder: adds the nodes that compute the power.
        operands: floating-point nodes.

    Attributes:
        inverse: the node of the power's inverse, 0-dim f32.
    """

    def __init__(self, builder: GraphBuilder, operands: Iterable[Node]) -> None:
        self.builder = builder
        self._scaled: dict[Node, Node] = {}
        call = builder.call
        largest = None
        for node in dict.fromkeys(map(_view_base, operands)):
            of_node = self._largest(node)
            largest = of_node if largest is None else call(A.maximum.default, largest, of_node)
        assert largest is not None
        is_zero = call(A.eq.Scalar, largest, 0)
        one = builder.full([], 1.0, torch.float32)
        largest = call(A.where.self, is_zero, one, call(A.clamp_min.default, largest, _LEAST))
        mantissa = call(operator.getitem, call(A.frexp.Tensor, largest), 0)
        # a quotient of numbers with the same mantissa is an exact power of two
        self._factor = call(A.div.Tensor, mantissa, largest)
        self.inverse = call(A.div.Tensor, largest, mantissa)

    def _largest(self, node: Node) -> Node:
        """The largest finite absolute value, 0-dim f32; 0 if there is none."""
        call = self.builder.call
        made = call(A.abs.default, self._upcast(node))
        zero = self.builder.full([], 0.0, torch.float32)
        made = call(A.where.self, call(A.lt.Scalar, made, math.inf), made, zero)  # nan is not less
        made = call(A.reshape.default, made, [-1])
        return call(A.amax.default, call(A.constant_pad_nd.default, made, [0, 1]), [0])

    def _upcast(self, node: Node) -> Node:
        if example(node).dtype == torch.float32:
            return node
        return self.builder.call(P.convert_element_type.default, node, torch.float32)

    def scaled(self, node: Node) -> Node:
        """An operand times the power, in its dtype. Of a view, the source is multiplied."""
        if node not in self._scaled:
            call = self.builder.call
            if node is not _view_base(node):
                source: Any
                source, *args = node.args
                made = call(node.target, self.scaled(source), *args, **node.kwargs)
            else:
                made = call(A.mul.Tensor, self._upcast(node), self._factor)
                if example(made).dtype != example(node).dtype:
                    made = call(P.convert_element_type.default, made, example(node).dtype)
            self._scaled[node] = made
        return self._scaled[node]


def _view_base(node: Node) -> Node:
    """The node of which a node is a view, or the node itself."""
    while packet(node) in _VIEWS and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    return node
