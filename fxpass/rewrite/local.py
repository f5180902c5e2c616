"""This rank's tensors in place of DTensors, and DTensors of results.

In: the operands of a sharded head in a graph, and its :class:`fxpass.match.sharding.Sharding`. Out:
nodes of local tensors. On one rank, tensors stay as they are::

    %weight: DTensor [Shard(0)]    ->    %to_local = to_local(%weight)        classes 50 to 99
    %labels: DTensor [Shard(0)]    ->    %to_local = to_local(%labels)        the rank's rows
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from fxpass.graph.nodes import value
from fxpass.graph.placements import Placing, is_dtensor, placements_of
from fxpass.match.sharding import Sharding, as_dtensor
from fxpass.rewrite.builder import Builder


class Local(Builder):
    """Inserts conversions between DTensors and local tensors.

    Attributes:
        sharding: that of the head; None on one rank.
        rows: the placements of a DTensor with this rank's rows.
    """

    def __init__(self, graph: Graph, site: Node, sharding: Sharding | None) -> None:
        super().__init__(graph, site)
        self.sharding = sharding
        self.rows: tuple[Any, ...] = () if sharding is None else sharding.rows_only(0)

    def hidden_here(self, x: Node) -> Node:
        """The hidden states of which views are taken: local, unless the ranks share the rows."""
        sharding = self.sharding
        if sharding is None or sharding.x is None:
            return x
        x = self._placed(x, sharding.x)
        return x if sharding.rows_move else self.x_to_local(x)

    def x_to_local(self, x: Node) -> Node:
        """Hidden states as a local tensor. Their gradient is partial over the group of the
        vocabulary shards."""
        if self.sharding is None or not is_dtensor(value(x)):
            return x
        gradient = self.sharding.partial_where("classes", placements_of(value(x)))
        return self._to_local(x, gradient)

    def weight_here(self, weight: Node) -> Node:
        """This rank's classes of the weight, ``[V_r, D]``."""
        if self.sharding is None or self.sharding.weight is None:
            return weight
        return self._to_local(weight, self._of_rows(self.sharding.weight))

    def of_all_ranks(self, node: Any) -> Any:
        """A tensor that all ranks have, or a number. Each rank computes the part of its gradient
        that belongs to its classes."""
        if self.sharding is None or self.sharding.group is None or not isinstance(node, Node):
            return node
        from fxpass.op.collectives import with_summed_gradient  # needs torch.distributed

        return self.function(with_summed_gradient, node, self.sharding.group)

    def classes_here(self, vector: Node) -> Node:
        """This rank's classes of a vector ``[V]``, or of values ``[N, V]``."""
        sharding = self.sharding
        if sharding is None:
            return vector
        dim = value(vector).dim() - 1
        if is_dtensor(value(vector)) and dim == 0:
            assert sharding.weight is not None
            return self._to_local(
                self._placed(vector, sharding.weight), self._of_rows(sharding.weight)
            )
        if is_dtensor(value(vector)):
            vector = self.rows_here(vector)
        if sharding.group is None or int(value(vector).shape[dim]) != sharding.classes:
            return vector
        vector = self.of_all_ranks(vector)
        return self.method("narrow", vector, dim, sharding.first, sharding.count)

    def same_rows(self, x: Node, others: list[Node]) -> tuple[Node, list[Node]]:
        """Hidden states and other tensors ``[N, ...]`` as local tensors with the same rows: those
        of a flattened batch of sharded sequences are strided, in all or in none."""
        if self.sharding is None:
            return x, others
        if is_dtensor(value(x)):
            self.rows = placements_of(value(x))
            if any(placements_of(value(n)) != self.rows for n in others if is_dtensor(value(n))):
                self.rows = self.sharding.rows_only(0)
                x = self._placed(x, self.rows)
        return self.x_to_local(x), [self.rows_here(node) for node in others]

    def rows_here(self, node: Node) -> Node:
        """This rank's rows of a tensor ``[N, ...]``."""
        if not is_dtensor(value(node)):
            return node
        node = self._placed(node, self.rows)
        return self._to_local(node, self.rows)

    def whole(self, node: Node) -> Node:
        """A tensor that all ranks have whole."""
        return self.method("full_tensor", node) if is_dtensor(value(node)) else node

    def logits_here(self, logits: Node) -> Node:
        """This rank's classes of existing logits."""
        if self.sharding is None or not is_dtensor(value(logits)):
            return logits
        placements = self.sharding.logits(value(logits).dim() - 1)
        return self._to_local(self._placed(logits, placements), placements)

    def result(self, new: Node, old: Node, weight: Node) -> Node:
        """What takes the place of a node: a DTensor, with its placements, if it is one. ``weight``
        is a DTensor on its mesh."""
        if self.sharding is None or not is_dtensor(value(old)):
            return new
        placements = self.sharding.sums() if value(old).dim() == 0 else self.rows
        new = self.function(Placing(as_dtensor, placements=tuple(placements)), new, weight)
        return self._placed(new, self.sharding.loss_placements(placements_of(value(old))))

    def _of_rows(self, placements: Any) -> Any:
        """Placements of the gradients of weight and bias: partial where the rows are sharded."""
        assert self.sharding is not None
        return self.sharding.partial_where("rows", placements)

    def _placed(self, node: Node, placements: Any) -> Node:
        """A DTensor with other placements."""
        if placements_of(value(node)) == tuple(placements):
            return node
        redistribute: Any = type(value(node)).redistribute  # type: ignore[attr-defined]
        return self.function(Placing(redistribute, placements=tuple(placements)), node)

    def _to_local(self, node: Node, gradient: Any) -> Node:
        to_local: Any = type(value(node)).to_local  # type: ignore[attr-defined]
        return self.function(Placing(to_local, grad_placements=tuple(gradient)), node)
