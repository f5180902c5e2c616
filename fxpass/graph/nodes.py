"""Shared by the readers of nodes: example values, and the exception for a loss that stays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxpass import messages

Target = Any  # a function, or a method's name

REQUIRED: Any = object()  # in a signature: a parameter without a default


class NoMatch(Exception):  # noqa: N818
    """The reason why a loss is not fused, for a :class:`fxpass.rewrite.rejections.Rejection`."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


def value(node: Node) -> Tensor:
    """The example tensor of a node: its shape, dtype, device and whether it needs a gradient."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        raise NoMatch(node, messages.NO_EXAMPLE.format(name=node.name))
    return example


def hint(size: Any) -> int:
    """A size as a number: for a symbolic size, its value when the graph was traced; for the jagged
    size of a nested tensor, which has no value, a large number."""
    if isinstance(size, int):
        return size
    return _JAGGED if size.node.is_nested_int() else int(size.node.hint or 0)


_JAGGED = 1 << 20


def is_tensor(argument: Any) -> bool:
    """True if an argument of a call is a node whose value is a tensor."""
    return isinstance(argument, Node) and isinstance(argument.meta.get("example_value"), Tensor)


def is_number(node: Node) -> bool:
    """True if a node's value is a float that varies from call to call."""
    return isinstance(node.meta.get("example_value"), torch.SymFloat)


def needs_gradient(node: Any) -> bool:
    """True if an argument of a call is a tensor that needs a gradient."""
    return is_tensor(node) and value(node).requires_grad


def nested_graph(argument: Any) -> GraphModule | None:
    """The nested graph that an argument of a call refers to, or None."""
    if not isinstance(argument, Node) or argument.op != "get_attr":
        return None
    body = getattr(argument.graph.owning_module, str(argument.target), None)
    return body if isinstance(body, GraphModule) else None
