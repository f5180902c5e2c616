"""Tensors of the logits' shape that are made of one-hot tensors, or multiples of other tensors.

In: an operand of a pointwise function of logits. Out: its expression, so that no such tensor is
computed: a margin ``0.35 * one_hot(%labels, V)`` at the target is ``0.35 * hot_labels``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy import Expr, Symbol
from torch import Tensor
from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand, written
from fxpass.graph.functions import CASTS, function_of, out_of_place
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.match.classes import OF_CLASS, Classes, Flow
from fxpass.match.edits import symbols_of
from fxpass.match.operands import keeps_order
from fxpass.match.outputs import WRAPPED
from fxpass.match.pointwise import MASKS, POINTWISE, check_size
from fxpass.spec.expression import Z
from fxpass.spec.functions import exact


def made_of(flow: Flow, node: Node, like: Classes, whole: Tensor) -> Expr | None:
    """The expression of a tensor in the place of the logits; None if it is made of other
    tensors, or if it, or what it is made of, is written to."""
    if value(node).shape != whole.shape or node in flow.classes:
        return None
    key = node, like.dim, whole.dtype
    if key not in flow.made:  # a residual network reaches each layer over 2**layers paths
        flow.made[key] = _made_of(flow, node, like, whole)
    return flow.made[key]


def _made_of(flow: Flow, node: Node, like: Classes, whole: Tensor) -> Expr | None:
    function = out_of_place(function_of(node))
    if like.dim != whole.dim() - 1 or any(writer is not node for writer in flow.writes([node])):
        return None
    if function in (*CASTS, "bool", "long", "int") and node.args and is_tensor(node.args[0]):
        return _cast(node, made_of(flow, first_operand(node), like, whole))
    if function == "one_hot":
        return hot(flow, node, first_operand(node))
    if function == "scatter":
        return _scattered(flow, node, like)
    rounded = whole.dtype == torch.float64 and value(node).dtype == torch.float32
    if written(node) or rounded:
        return None

    def read(operand: Node) -> Expr | None:
        known, tensor = (*flow.classes, *flow.rows, *flow.cut), value(operand)
        if tensor.requires_grad and not value(node).requires_grad:
            return None
        made = made_of(flow, operand, like, whole)
        if made is not None or operand in known or flow.writes([operand]):
            return made
        if is_row(tensor, like, whole):
            return flow.tensor(operand, "row")
        of_floats = tensor.shape == whole.shape and tensor.is_floating_point()
        return flow.given(operand, like.dim) if of_floats else None

    made = function_over(node, read)
    return made if made is None or _is_simple(flow, made) else None


def _is_simple(flow: Flow, made: Expr) -> bool:
    """Whether a tensor is made of one-hot tensors and numbers, is a product of them and rows, or a
    multiple of other values. Several terms would be added up in sums that may cancel."""
    symbols = symbols_of(made)
    if values := [s for s in symbols if s in flow.dims]:
        return bool((made / values[0]).is_number)
    one_hot = all(s.name.startswith("hot_") for s in symbols)
    return one_hot or (made.is_Mul and any(s.name.startswith("hot_") for s in symbols))


def is_row(tensor: Tensor, like: Classes, whole: Tensor) -> bool:
    """Whether a tensor has one value for each row, where the classes are."""
    return tensor.dim() == whole.dim() and list(tensor.shape) == [
        1 if i == like.dim else size for i, size in enumerate(whole.shape)
    ]


def function_over(node: Node, read: Callable[[Node], Expr | None]) -> Expr | None:
    """A pointwise function of numbers and of tensors that ``read`` knows; None for another node."""
    function = out_of_place(function_of(node))
    spelling, dtype = POINTWISE.get(function) or MASKS.get(function), value(node).dtype
    is_logical = dtype == torch.bool and (function in MASKS or function == "mul")
    if spelling is None or not (dtype in _EXACT or dtype.is_floating_point or is_logical):
        return None  # small integers wrap, and a sum of booleans is a logical or
    try:
        given = arguments(node, spelling.signature).values()
        if any(isinstance(n, Node) and not is_tensor(n) for n in given):  # a number that varies
            return None
        found = [read(n) if is_tensor(n) else number_of(n) for n in given]
        tensors = [one for n, one in zip(given, found, strict=True) if isinstance(n, Node)]
        if not tensors or None in tensors:
            return None
        check_size(found)
        if dtype in _EXACT and any(isinstance(o, sympy.Rational) and o.q != 1 for o in found):
            return None  # the result is rounded
        return spelling.value(*found)
    except (ValueError, NoMatch):
        return None


_EXACT = (torch.int64,)


def number_of(argument: Any) -> Any:
    """A number of Python as an expression; None, booleans and strings as they are. ``ValueError``
    for infinity and nan."""
    if isinstance(argument, bool) or not isinstance(argument, int | float):
        return argument
    return exact(argument)


SCATTER = {
    **{"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED},
    **{"src": None, "value": None, "reduce": None},
}


def _scattered(flow: Flow, node: Node, like: Classes) -> Expr | None:
    """``zeros_like(%z).scatter(-1, %index, number)``."""
    try:
        given = arguments(node, SCATTER)
    except NoMatch:
        return None
    zeros, index = given["input"], given["index"]
    number = given["src"] if given["value"] is None else given["value"]
    fresh = is_tensor(zeros) and function_of(zeros) in ("zeros_like", "zeros", "new_zeros")
    if not fresh or list(zeros.users) != [node] or given["reduce"] is not None:
        return None
    rows = [*value(node).shape[:-1], 1]
    of_classes = isinstance(given["dim"], int) and given["dim"] % len(rows) == like.dim
    if not of_classes or not is_tensor(index) or list(value(index).shape) != rows:
        return None
    if not isinstance(number, bool | int | float) or value(index).dtype != torch.int64:
        return None
    dtype = value(node).dtype
    kept = dtype.is_floating_point or (dtype in _EXACT and isinstance(number, int))
    if not kept and number not in (0, 1):
        return None  # it is rounded
    one_hot = hot(flow, node, index)
    return None if one_hot is None else exact(float(number)) * one_hot


def hot(flow: Flow, node: Node, index: Node, *, wraps: bool = False) -> Symbol | None:
    """The symbol of a one-hot tensor; None if its class indices change after ``node``. ``wraps``:
    whether negative ones are counted from the end."""
    base = index_of(index)
    if flow.writes([base], base):
        base = index  # a view may be a copy, from before
    return None if flow.writes([base], node) else flow.tensor(base, WRAPPED if wraps else "hot")


def index_of(node: Node) -> Node:
    """The tensor of which class indices are a view that keeps their order."""
    while keeps_order(node) and function_of(node) not in CASTS:
        node = first_operand(node)
    return node


def _cast(node: Node, made: Expr | None) -> Expr | None:
    """A one-hot tensor is the same in every dtype; another tensor loses digits as an integer."""
    is_hot = isinstance(made, Symbol) and made.name.startswith("hot_")
    old, new = value(first_operand(node)), value(node)
    cut = old.requires_grad and not new.requires_grad
    narrows = old.is_floating_point() and new.dtype.itemsize < old.dtype.itemsize
    rounds = narrows or not new.is_floating_point()
    return made if is_hot or not (cut or rounds) else None


def of_classes_alone(expr: Any, *, rows: bool = False) -> bool:
    """Whether an expression is one of a logit and of what is given at its class, without a softmax;
    ``rows``: or of what is given for its row."""
    names = (*OF_CLASS, "row_") if rows else OF_CLASS
    return all(s == Z or s.name.startswith(names) for s in expr.free_symbols)
