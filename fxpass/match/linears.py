"""Linears: the spellings of ``x @ weight.T + bias``.

In: a node. Out: a :class:`Linear`, or None if the node is no linear::

    matmul(%x, transpose(%w, 0, 1))    ->    Linear(x=%x, weight=%w, bias=None)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpass.graph.calls import arguments, first_operand, is_cut, required
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.match.views import view_of


@dataclass(frozen=True)
class Linear:
    """One linear.

    Attributes:
        node: the call.
        x: ``[..., D]``.
        weight: ``[V, D]``, or ``[D, V]`` if ``transposed``.
        bias: ``[V]`` or None.
        dim: position of the class dimension in the output.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    transposed: bool
    dim: int


def linear_of(node: Node) -> Linear | None:
    """Reads ``node`` as a linear; None if it is no linear.

    Raises:
        NoMatch: a linear that cannot be fused.
    """
    read = LINEARS.get(function_of(node))
    return None if read is None else read(node)


def _linear(node: Node) -> Linear:
    given = arguments(node, {"input": REQUIRED, "weight": REQUIRED, "bias": None})
    return _make(node, *given.values(), transposed=False)


def _matmul(node: Node) -> Linear:
    return _product(node, *required(node, "input", "other"))


def _mm(node: Node) -> Linear:
    return _product(node, *required(node, "input", "mat2"))


def _addmm(node: Node) -> Linear:
    wanted = {"input": REQUIRED, "mat1": REQUIRED, "mat2": REQUIRED, "beta": 1, "alpha": 1}
    bias, x, weight, beta, alpha = arguments(node, wanted).values()
    if beta != 1 or alpha != 1:
        raise NoMatch.at(node, "has beta= or alpha= other than 1")
    return _product(node, x, weight, bias)


def _einsum(node: Node) -> Linear:
    equation, *operands = node.args or ("",)
    if node.kwargs:
        raise NoMatch.at(node, "has keyword arguments")
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    try:
        inputs, out = str(equation).replace(" ", "").replace("...", "_").split("->")
        x, weight = inputs.split(",")
    except ValueError:
        raise NoMatch(node, f"%{node.name}: einsum {equation!r} is not x, weight -> out") from None
    if len(operands) == 2 and len(weight) != 2:
        x, weight, operands = weight, x, operands[::-1]
    for v, d, transposed in ((weight[:1], weight[1:], False), (weight[1:], weight[:1], True)):
        letters = x + v
        if len(weight) != 2 or len(set(letters)) < len(letters) or "_" in weight:
            continue  # a repeated letter takes a diagonal
        if x.endswith(d) and out == x[:-1] + v:
            found = _make(node, operands[0], operands[1], None, transposed)
            if statically_known_true(
                value(found.x).shape[-1] == value(found.weight).shape[transposed - 1]
            ):
                return found  # einsum would broadcast a dimension of size one
    raise NoMatch(node, f"%{node.name}: einsum {equation!r} is not [..., D], [V, D] -> [..., V]")


def _product(node: Node, x: Any, weight: Any, bias: Any = None) -> Linear:
    """``x @ weight``; reads a weight ``w.t()`` as ``w``."""
    matrix = is_tensor(weight) and value(weight).dim() == 2
    turns = matrix and function_of(weight) in ("t", "numpy_T", "mT", "transpose", "permute")
    if turns and not is_cut(weight) and view_of(weight, 0).after == 1:
        return _make(node, x, first_operand(weight), bias, transposed=False)
    return _make(node, x, weight, bias, transposed=True)


def _make(node: Node, x: Any, weight: Any, bias: Any, transposed: bool) -> Linear:
    for name, operand in (("x", x), ("weight", weight), ("bias", bias)):
        if not is_tensor(operand) and not (name == "bias" and operand is None):
            raise NoMatch(node, f"the linear's operand {operand!r} is not a tensor of the graph")
    shape = value(weight).shape
    if len(shape) != 2:
        raise NoMatch(node, f"the linear's weight has shape {list(shape)}, not [V, D]")
    if bias is not None and (
        value(bias).dim() != 1 or value(bias).shape[0] != value(node).shape[-1]
    ):
        raise NoMatch(node, f"the linear's bias has shape {list(value(bias).shape)}, not [V]")
    return Linear(node, x, weight, bias, transposed, value(node).dim() - 1)


LINEARS: dict[str, Callable[[Node], Linear]] = {
    "linear": _linear,
    "matmul": _matmul,
    "mm": _mm,
    "addmm": _addmm,
    "einsum": _einsum,
}


def shape_of(linear: Linear) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """Rows and classes."""
    rows = list(value(linear.node).shape)
    classes = rows.pop(linear.dim)
    return math.prod(rows), classes
