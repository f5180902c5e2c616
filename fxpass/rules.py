"""What the matcher's tables share: how a call is read, and the spellings that need no reading.

A graph may hold the same meaning as a function (``torch.tanh``), an operator (``operator.mul``) or
a method (the string ``"view"``); each is a key of a table. A new spelling is a new row and a test.
What is in no table is unknown, and an unknown node between a linear and a loss means: no rewrite.
The tables: :mod:`fxpass.linears`, :mod:`fxpass.losses`, :mod:`fxpass.movements`,
:mod:`fxpass.pointwise`, and here the casts and whatever reads no values.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

Target = Any  # a function, or a method's name

REQUIRED = object()  # in a signature: a parameter without a default


class NoMatch(Exception):  # noqa: N818
    """Ends the reading of one loss; becomes a :class:`fxpass.match.Rejection`."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


def arguments(node: Node, signature: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, positional and keyword forms alike, defaults filled in."""
    given = dict(zip(signature, node.args, strict=False)) | dict(node.kwargs)
    return {name: given.get(name, default) for name, default in signature.items()}


def value(node: Node) -> Tensor:
    """The example tensor of a node: its shape, dtype, device and whether it needs a gradient."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        raise NoMatch(node, f"%{node.name} is not a tensor whose shape and dtype are known")
    return example


def is_tensor(argument: Any) -> bool:
    """Whether an argument of a call is a node that holds a tensor."""
    return isinstance(argument, Node) and isinstance(argument.meta.get("example_value"), Tensor)


# A tensor's attribute that is an operation: a call of getattr, and from torch 2.14 on one of these.
ATTRIBUTES: dict[Target, str] = {
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.mT: "mT",
    torch.ops.aten.matrix_H: "H",
    torch.ops.aten.mH: "mH",
}


def attribute_of(node: Node) -> str:
    """The attribute of a tensor that a node reads; empty where it does something else."""
    return str(node.args[1]) if node.target is getattr else ATTRIBUTES.get(node.target, "")


# ---------------------------------------------------------------- spellings that need no reading

# Judged by the dtypes and devices of the example values; the arguments do not matter.
CASTS: set[Target] = {
    *("to", "float", "half", "bfloat16", "double", "type", "type_as"),
    *("cpu", "cuda"),
}

# Read a tensor's sizes and not its values.
METADATA: set[Target] = {
    *("size", "dim", "numel", "ndimension", "stride", "is_floating_point"),
    *(torch.numel, torch.ops.aten.sym_size, torch.ops.aten.sym_size.int),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
}

# Read of their second operand its sizes, its dtype or its device, and not its values.
_LIKE: set[Target] = {"to", "type_as", "view_as", "reshape_as", "expand_as"}


def reads_values(user: Node, node: Node) -> bool:
    """Whether ``user`` reads what is in ``node``, and not only its sizes or its dtype."""
    if user.target in METADATA:
        return False
    first = user.args[0] if user.args else None
    return not (user.target in _LIKE and first is not node)


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
