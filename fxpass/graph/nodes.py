"""What the matcher's tables share: example values, and the spellings that need no reading.

A graph may hold the same meaning as a function (``torch.tanh``), an operator (``operator.mul``) or
a method (the string ``"view"``); each is a key of a table. A new spelling is a new row and a test.
What is in no table is unknown, and an unknown node between a linear and a loss means: no rewrite.
How a call's arguments are read: :mod:`fxpass.graph.calls`. The tables: :mod:`fxpass.match.linears`,
:mod:`fxpass.match.losses`, :mod:`fxpass.match.views`, :mod:`fxpass.match.pointwise`, and here
the casts and whatever reads no values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

Target = Any  # a function, or a method's name

REQUIRED: Any = object()  # in a signature: a parameter without a default


class NoMatch(Exception):  # noqa: N818
    """Ends the reading of one loss; becomes a :class:`fxpass.match.match.Rejection`."""

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
    """A size as a number: what it was when the graph was traced, where it may vary."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def is_tensor(argument: Any) -> bool:
    """Whether an argument of a call is a node that holds a tensor."""
    return isinstance(argument, Node) and isinstance(argument.meta.get("example_value"), Tensor)


def is_number(node: Node) -> bool:
    """Whether a node holds a float that varies from call to call."""
    return isinstance(node.meta.get("example_value"), torch.SymFloat)


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
