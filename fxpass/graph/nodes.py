"""Shared by the tables of spellings: example values, casts, and functions that read no values.

A graph may call one operation as a function (``torch.tanh``), an operator (``operator.mul``) or a
method (the string ``"view"``); each spelling is a key of a table. A new spelling is a new row and a
test. A node without a row between a linear and its loss prevents the fusion.
:mod:`fxpass.graph.calls` reads the arguments of a call. The other tables are in
:mod:`fxpass.match.linears`, :mod:`fxpass.match.losses`, :mod:`fxpass.match.views` and
:mod:`fxpass.match.pointwise`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

Target = Any  # a function, or a method's name

REQUIRED: Any = object()  # in a signature: a parameter without a default


class NoMatch(Exception):  # noqa: N818
    """Why one loss is not fused; becomes a :class:`fxpass.match.match.Rejection`."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node, self.reason = node, reason


def value(node: Node) -> Tensor:
    """The example tensor of a node: its shape, dtype, device and whether it needs a gradient."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        raise NoMatch(node, f"%{node.name} is not a tensor whose shape and dtype are known")
    return example


def hint(size: Any) -> int:
    """A size as a number; for a symbolic size, its value when the graph was traced."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def is_tensor(argument: Any) -> bool:
    """Whether an argument of a call is a node whose value is a tensor."""
    return isinstance(argument, Node) and isinstance(argument.meta.get("example_value"), Tensor)


def is_number(node: Node) -> bool:
    """Whether a node's value is a float that varies from call to call."""
    return isinstance(node.meta.get("example_value"), torch.SymFloat)


# Attributes of a tensor that are operations. The node calls getattr; from torch 2.14 on, these.
ATTRIBUTES: dict[Target, str] = {
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.mT: "mT",
    torch.ops.aten.matrix_H: "H",
    torch.ops.aten.mH: "mH",
}


def attribute_of(node: Node) -> str:
    """The attribute of a tensor that a node reads; empty for any other node."""
    return str(node.args[1]) if node.target is getattr else ATTRIBUTES.get(node.target, "")


# ---------------------------------------------------------------- casts and metadata

# The example values show dtypes and devices; nothing reads the arguments.
CASTS: set[Target] = {
    *("to", "float", "half", "bfloat16", "double", "type", "type_as"),
    *("cpu", "cuda"),
}

# Read a tensor's sizes, not its values.
METADATA: set[Target] = {
    *("size", "dim", "numel", "ndimension", "stride", "is_floating_point"),
    *(torch.numel, torch.ops.aten.sym_size, torch.ops.aten.sym_size.int),
    *("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
}

# Read only the sizes, the dtype or the device of their second operand.
_LIKE: set[Target] = {"to", "type_as", "view_as", "reshape_as", "expand_as"}


def reads_values(user: Node, node: Node) -> bool:
    """Whether ``user`` reads the values of ``node``, not only its sizes or its dtype."""
    if user.target in METADATA:
        return False
    first = user.args[0] if user.args else None
    return not (user.target in _LIKE and first is not node)
