"""Nodes that a rewrite inserts: with example values, and with this rank's part of DTensors.

In: a graph with an insertion point, the node that is replaced, and the head's
:class:`fxpass.match.sharding.Sharding`. Out: new nodes that have the example value and the stack
trace that later passes read. On one rank, tensors stay as they are::

    %weight: DTensor [Shard(0)]    ->    %to_local = to_local(%weight)        classes 50 to 99
    %labels: DTensor [Shard(0)]    ->    %to_local = to_local(%labels)        the rank's rows
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from fxpass.casts.casts import DYNAMO, Cast
from fxpass.graph.nodes import value
from fxpass.graph.placements import Placing, is_dtensor, placements_of
from fxpass.match.sharding import Sharding, as_dtensor


class Builder:
    """Inserts nodes at the insertion point of a graph.

    Attributes:
        graph: the graph.
        site: the node whose stack trace the new nodes get.
        sharding: that of the head; None on one rank, where no node is a DTensor.
        casts: the casts in place of autocast's.
        rows: the placements of a DTensor with this rank's rows.
    """

    def __init__(self, graph: Graph, site: Node, sharding: Sharding | None) -> None:
        self.graph, self.site, self.sharding = graph, site, sharding
        self.casts: list[Cast] = []
        self.rows: tuple[Any, ...] = () if sharding is None else sharding.placements("rows", 0)

    def cast(self, operand: Node, dtype: torch.dtype, at: Node, of: Node | None = None) -> Node:
        """An operand of ``at`` in a dtype; it may be a view ``of`` what the program has there."""
        if value(operand).dtype == dtype:
            return operand
        node, made = DYNAMO.make(self.graph, operand, dtype, at)
        self.casts.append(replace(made, operand=(of or operand).name))
        return node

    def size(self, tensor: Node, dim: int) -> int | Node:
        """One size of a tensor, as a node where it is symbolic."""
        size = value(tensor).shape[dim]
        return size if isinstance(size, int) else self.method("size", tensor, dim)

    def sizes(self, tensor: Node) -> list[int | Node]:
        """All sizes of a tensor."""
        return [self.size(tensor, dim) for dim in range(value(tensor).dim())]

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
        examples, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        function = getattr(type(examples[0]), target) if op == "call_method" else target
        with torch.no_grad(), _fake_mode_of(examples[0]):
            node.meta["example_value"] = function(*examples, **named)
        return node

    # ------------------------------------------------------------ DTensors

    def hidden_here(self, x: Node) -> Node:
        """The hidden states of which views are taken: local, unless the ranks share the rows."""
        if self.sharding is None or self.sharding.x is None:
            return x
        x = self._placed(x, self.sharding.x)
        return x if self.sharding.rows > 1 else self.x_to_local(x)

    def x_to_local(self, x: Node) -> Node:
        """Hidden states as a local tensor. Their gradient is partial over the group of the
        vocabulary shards."""
        return self._to_local(x, partial="classes")

    def weight_here(self, weight: Node) -> Node:
        """This rank's classes of the weight, ``[V_r, D]``."""
        return self._to_local(weight, self.sharding and self.sharding.weight, partial="rows")

    def classes_here(self, vector: Node) -> Node:
        """This rank's classes of a vector ``[V]``, or of values ``[N, V]``."""
        if self.sharding is None:
            return vector
        dim = value(vector).dim() - 1
        if dim == 0 and is_dtensor(value(vector)):
            return self.weight_here(vector)
        vector = self.rows_here(vector)
        if self.sharding.group is None or int(value(vector).shape[dim]) != self.sharding.classes:
            return vector
        vector = self.of_all_ranks(vector)
        return self.method("narrow", vector, dim, self.sharding.first, self.sharding.count)

    def of_all_ranks(self, node: Any) -> Any:
        """A tensor that all ranks have, or a number. Each rank computes the part of its gradient
        that belongs to its classes."""
        if self.sharding is None or self.sharding.group is None or not isinstance(node, Node):
            return node
        from fxpass.op.collectives import with_summed_gradient  # needs torch.distributed

        return self.function(with_summed_gradient, node, self.sharding.group)

    def same_rows(self, x: Node, others: list[Node]) -> tuple[Node, list[Node]]:
        """Hidden states and other tensors ``[N, ...]`` as local tensors with the same rows: those
        of a flattened batch of sharded sequences are strided, in all or in none."""
        if self.sharding is not None and is_dtensor(value(x)):
            self.rows = placements_of(value(x))
            if any(placements_of(value(n)) != self.rows for n in others if is_dtensor(value(n))):
                self.rows = self.sharding.placements("rows", 0)
                x = self._placed(x, self.rows)
        return self.x_to_local(x), [self.rows_here(node) for node in others]

    def rows_here(self, node: Node) -> Node:
        """This rank's rows of a tensor ``[N, ...]``."""
        return self._to_local(node, self.rows)

    def whole(self, node: Node) -> Node:
        """A tensor that all ranks have whole."""
        return self.method("full_tensor", node) if is_dtensor(value(node)) else node

    def logits_here(self, logits: Node) -> Node:
        """This rank's classes of existing logits."""
        dim = value(logits).dim() - 1
        return self._to_local(logits, self.sharding and self.sharding.placements("classes", dim))

    def result(self, new: Node, old: Node, weight: Node) -> Node:
        """What takes the place of a node: a DTensor, with its placements, if it is one. ``weight``
        is a DTensor on its mesh."""
        if self.sharding is None or not is_dtensor(value(old)):
            return new
        placements = self.sharding.sums() if value(old).dim() == 0 else self.rows
        new = self.function(Placing(as_dtensor, placements=tuple(placements)), new, weight)
        return self._placed(new, self.sharding.loss_placements(placements_of(value(old))))

    def _placed(self, node: Node, placements: Any) -> Node:
        """A DTensor with other placements."""
        if placements_of(value(node)) == tuple(placements):
            return node
        redistribute: Any = type(value(node)).redistribute  # type: ignore[attr-defined]
        return self.function(Placing(redistribute, placements=tuple(placements)), node)

    def _to_local(self, node: Node, placements: Any = None, partial: str = "") -> Node:
        """This rank's part of a DTensor, under other ``placements``. The gradient has them too, but
        is ``partial`` along the dimensions of the mesh that shard this: ``rows`` or ``classes``."""
        if self.sharding is None or not is_dtensor(value(node)):
            return node
        if placements is not None:
            node = self._placed(node, placements)
        gradient = placements_of(value(node))
        gradient = self.sharding.partial_where(partial, gradient) if partial else gradient
        to_local: Any = type(value(node)).to_local  # type: ignore[attr-defined]
        return self.function(Placing(to_local, grad_placements=tuple(gradient)), node)


def _fake_mode_of(example: Any) -> AbstractContextManager[Any]:
    """The fake mode of a tensor, of a DTensor's local tensor: functions make tensors of numbers and
    indices, which must be fake too."""
    local = example.to_local() if is_dtensor(example) else example
    return local.fake_mode if isinstance(local, FakeTensor) else nullcontext()
