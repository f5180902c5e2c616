"""Nodes with example values: what a rewrite inserts into a graph.

In: a graph with an insertion point, and the node that is replaced. Out: new nodes that have the
example value and the stack trace that later passes read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fxpass.casts.casts import Cast, cast
from fxpass.graph.nodes import value
from fxpass.graph.placements import is_dtensor


class Builder:
    """Inserts nodes at the insertion point of a graph.

    Attributes:
        graph: the graph.
        site: the node whose stack trace the new nodes get.
        casts: the casts in place of autocast's.
    """

    def __init__(self, graph: Graph, site: Node) -> None:
        self.graph, self.site = graph, site
        self.casts: list[Cast] = []

    def cast(self, operand: Node, dtype: torch.dtype, at: Node) -> Node:
        """An operand of ``at`` in a dtype."""
        node, made = cast(self.graph, operand, dtype, at)
        self.casts += [made] if made else []
        return node

    def size(self, tensor: Node, dim: int) -> int | Node:
        """One size of a tensor, as a node where it is symbolic."""
        size = value(tensor).shape[dim]
        return size if isinstance(size, int) else self.method("size", tensor, dim)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """A call of a method."""
        return self.call("call_method", name, *args, **kwargs)

    def function(self, function: Any, *args: Any) -> Node:
        """A call of a function."""
        return self.call("call_function", function, *args)

    def call(self, op: str, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A new node with its example value and the stack trace of the site."""
        node = self.graph.create_node(op, target, args, kwargs)
        node.meta["stack_trace"] = self.site.meta.get("stack_trace")
        examples = torch.fx.map_arg(args, lambda n: n.meta["example_value"])
        function = getattr(type(examples[0]), target) if op == "call_method" else target
        with torch.no_grad(), _fake_mode_of(examples[0]):
            node.meta["example_value"] = function(*examples, **kwargs)
        return node


def _fake_mode_of(example: Any) -> AbstractContextManager[Any]:
    """The fake mode of a tensor, of a DTensor's local tensor: functions make tensors of numbers and
    indices, which must be fake too."""
    local = example.to_local() if is_dtensor(example) else example
    return local.fake_mode if isinstance(local, FakeTensor) else nullcontext()
