"""The spellings that the matcher knows, as tables: what stands in a Dynamo graph → what it means.

A graph may hold the same meaning as a function (``torch.tanh``), an operator (``operator.mul``) or
a method (the string ``"view"``); each is a key. A new spelling is a new row and a test. What is in
no table is unknown, and an unknown node between a linear and a loss means: no rewrite.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from sympy import Expr
from torch.fx import Node

Target = Any  # a function, or a method's name

# ---------------------------------------------------------------- signatures

# Parameter names and defaults, in order: what a call in a graph leaves out.
REQUIRED = object()

LINEARS: dict[Target, Mapping[str, Any]] = {
    F.linear: {"x": REQUIRED, "weight": REQUIRED, "bias": None},
}

LOSSES: dict[Target, Mapping[str, Any]] = {
    F.cross_entropy: {
        "input": REQUIRED,
        "target": REQUIRED,
        "weight": None,
        "size_average": None,
        "ignore_index": -100,
        "reduce": None,
        "reduction": "mean",
        "label_smoothing": 0.0,
    },
}


def arguments(node: Node, signature: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, positional and keyword forms alike, defaults filled in."""
    given = dict(zip(signature, node.args, strict=False)) | dict(node.kwargs)
    return {name: given.get(name, default) for name, default in signature.items()}


# ---------------------------------------------------------------- between linear and loss

# Judged by the dtypes and devices of the example values; the arguments do not matter.
CASTS: set[Target] = {"to", "float", "half", "bfloat16", "double", "type", "type_as"}

# Read a tensor's sizes and not its values.
METADATA: set[Target] = {"size", "dim", "numel", "ndimension"}


def _sigmoid(z: Expr) -> Expr:
    # the form in tanh cannot overflow
    return (1 + sympy.tanh(z / 2)) / 2


_ADD, _SUB = (lambda a, b: a + b), (lambda a, b: a - b)
_MUL, _DIV = (lambda a, b: a * b), (lambda a, b: a / b)

# Functions of one logit and of numbers; each is given its operands in order as expressions.
POINTWISE: dict[Target, Callable[..., Any]] = {
    operator.add: _ADD,
    torch.add: _ADD,
    "add": _ADD,
    operator.sub: _SUB,
    torch.sub: _SUB,
    "sub": _SUB,
    operator.mul: _MUL,
    torch.mul: _MUL,
    "mul": _MUL,
    operator.truediv: _DIV,
    torch.div: _DIV,
    "div": _DIV,
    operator.neg: operator.neg,
    torch.neg: operator.neg,
    "neg": operator.neg,
    torch.tanh: sympy.tanh,
    "tanh": sympy.tanh,
    torch.sigmoid: _sigmoid,
    "sigmoid": _sigmoid,
}

# A movement of rows: given the node, the shape [..., V] of its input and a last size, the call that
# moves the rows of a tensor [..., size] in the same way as the node moves those of the logits; None
# where nothing has to be done; a string says why it cannot.
Replay = tuple[str, Target, tuple[Any, ...]]
Movement = Callable[[Node, torch.Size, int], "Replay | str | None"]


def _reshape(node: Node, shape: torch.Size, size: int) -> Replay | str:
    new = node.args[1:] or (node.kwargs.get("shape", ()),)
    if len(new) == 1 and isinstance(new[0], tuple | list):
        new = tuple(new[0])
    if not new or not all(isinstance(n, int | Node) for n in new):
        return "its arguments are not a shape"
    return "call_method", "reshape", (*new[:-1], size)


def _flatten(node: Node, shape: torch.Size, size: int) -> Replay | str:
    given = arguments(node, {"input": REQUIRED, "start_dim": 0, "end_dim": -1})
    start, end = given["start_dim"], given["end_dim"]
    if end % len(shape) == len(shape) - 1 != start % len(shape):
        return "it flattens the class dimension"
    return "call_method", "flatten", (start, end)


def _contiguous(node: Node, shape: torch.Size, size: int) -> None:
    return None  # the operator reads any strides


def _getitem(node: Node, shape: torch.Size, size: int) -> Replay | str:
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if not all(i is Ellipsis or isinstance(i, int | slice | Node) for i in index):
        return "it indexes with something other than slices and numbers"
    if any(isinstance(i, Node) for i in index):
        return "it indexes with a tensor"
    if Ellipsis in index:
        from_end = index[index.index(Ellipsis) + 1 :]
        classes = from_end[-1] if from_end else slice(None)
    else:
        classes = index[-1] if len(index) == len(shape) else slice(None)
    v = shape[-1]
    if classes not in (slice(None), slice(0, None), slice(None, v), slice(0, v)):
        return "it selects classes"
    if classes != slice(None):
        index = (*index[:-1], slice(None))
    return "call_function", operator.getitem, (index,)


MOVEMENTS: dict[Target, Movement] = {
    "view": _reshape,
    "reshape": _reshape,
    torch.reshape: _reshape,
    "flatten": _flatten,
    torch.flatten: _flatten,
    "contiguous": _contiguous,
    operator.getitem: _getitem,
}

# ---------------------------------------------------------------- nodes that write

_IN_PLACE = (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift", "setitem", "delitem"),
)
_IN_PLACE_OPERATORS = {getattr(operator, name) for name in _IN_PLACE}
_IN_PLACE_METHODS = {f"__{name}__" for name in _IN_PLACE}


def writes(node: Node) -> bool:
    """Whether a node may change one of its tensor arguments in place."""
    if node.op == "call_method":
        name = str(node.target)
        return name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))
    if node.op != "call_function":
        return node.op == "call_module"
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    if node.target in _IN_PLACE_OPERATORS:
        return True
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    name = getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")
