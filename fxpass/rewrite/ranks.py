"""This rank's part of the operands of a sharded head, and DTensors of its results.

In: nodes of DTensors, or of tensors that all ranks have. Out: nodes of plain tensors with this
rank's classes, and with its rows if they are sharded. On one rank, tensors stay as they are::

    %weight: DTensor [Shard(0)]    ->    %to_local = to_local(%weight)        classes 50 to 99
    %bias: [V]                     ->    %narrow = narrow(%bias, 0, 50, 50)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fxpass.capture.sharding import Sharding
from fxpass.graph.nodes import NoMatch, is_tensor, value
from fxpass.graph.placements import Placing, dtensors, is_dtensor, placements_of


class Ranks:
    """Inserts nodes that change placements.

    Attributes:
        sharding: that of the head; None on one rank.
        rows: the placements of a DTensor with this rank's rows.
    """

    def __init__(self, call: Callable[..., Node], sharding: Sharding | None) -> None:
        self.call, self.sharding = call, sharding
        self.rows: tuple[Any, ...] = () if sharding is None else sharding.placements("rows", 0)
        self._here: dict[tuple[Node, str], Node] = {}

    @property
    def group(self) -> str | None:
        """The process group that the classes are sharded over; None if each rank has all."""
        return None if self.sharding is None else self.sharding.group

    def forget(self) -> None:
        """Begins at another place of the graph."""
        self._here = {}

    def here(self, node: Node, role: str) -> Node:
        """An operand as a plain tensor, or a DTensor with sharded rows.

        Args:
            node: the operand.
            role: ``x``, ``weight`` or ``bias`` of a linear, or an empty string.
        """
        sharding = self.sharding
        if sharding is None or not is_tensor(node) or not is_dtensor(value(node)):
            return node
        if (node, role) not in self._here:
            self._here[node, role] = self._of_dtensor(node, role, sharding)
        return self._here[node, role]

    def _of_dtensor(self, node: Node, role: str, sharding: Sharding) -> Node:
        if role in ("weight", "bias"):
            # the weight may be [D, V], placed as the head needs it
            placements = sharding.weight if role == "bias" else None
            return self._to_local(node, placements, partial="rows")
        if role == "x":
            assert sharding.x is not None
            x = self._placed(node, sharding.x)
            # its gradient is partial over the group of the vocabulary shards
            return x if sharding.rows > 1 else self._to_local(x, partial="classes")
        sharded = any(not p.is_replicate() for p in placements_of(value(node)))
        if sharding.rows > 1 and sharded:
            return node
        return self.call(_method(node, "full_tensor"), node)

    def rows_of_x(self, x: Node) -> Node:
        """Hidden states ``[N, D]`` with this rank's rows. Those of a flattened batch of sharded
        sequences are strided."""
        if self.sharding is None or not is_dtensor(value(x)):
            return x
        self.rows = placements_of(value(x))
        return self._to_local(x, partial="classes")

    def rows_here(self, node: Node) -> Node:
        """This rank's rows of a tensor ``[N, ...]``."""
        if self.sharding is None or self.sharding.rows == 1:
            return node
        if not is_dtensor(value(node)):
            raise NoMatch(node, f"the rows are sharded, and %{node.name} is a plain tensor")
        return self._to_local(node, self.rows)

    def classes_here(self, node: Node) -> Node:
        """This rank's classes of a vector ``[V]``, or of values ``[N, V]``."""
        dim = value(node).dim() - 1
        if self.sharding is None or self.group is None:
            return node
        if int(value(node).shape[dim]) != self.sharding.classes:
            return node
        node = self.of_all_ranks(node)
        return self.call(torch.narrow, node, dim, self.sharding.first, self.sharding.count)

    def of_all_ranks(self, node: Node) -> Node:
        """A tensor that all ranks have. Each rank computes the part of its gradient that belongs to
        its classes."""
        if self.group is None:
            return node
        from fxpass.op.collectives import with_summed_gradient  # needs torch.distributed

        return self.call(with_summed_gradient, node, self.group)

    def logits(self, node: Node) -> Node:
        """This rank's classes of existing logits ``[..., V]``."""
        if self.sharding is None:
            return node
        if self.sharding.rows > 1:
            raise NoMatch(node, "its logits exist anyway, and their rows are sharded")
        dim = value(node).dim() - 1
        return self._to_local(node, self.sharding.placements("classes", dim))

    def of_rows(self, rows: Node) -> Node:
        """Rows ``[N, ...]`` of this rank as a DTensor, if the ranks have others."""
        if self.sharding is None or self.sharding.rows == 1:
            return rows
        return self._dtensor(rows, self.rows)

    def result(self, new: Node, old: Node) -> Node:
        """What takes the place of a node: a DTensor, with its placements, if it is one."""
        if self.sharding is None or not is_tensor(old) or not is_dtensor(value(old)):
            return new
        if not is_dtensor(value(new)):
            new = self._dtensor(new, (dtensors().Replicate(),) * len(self.sharding.dims))
        # a result is no part of a sum any more
        whole = (dtensors().Replicate() if p.is_partial() else p for p in placements_of(value(old)))
        return self._placed(new, tuple(whole))

    def _dtensor(self, node: Node, placements: tuple[Any, ...]) -> Node:
        like = self.sharding and self.sharding.like
        return self.call(Placing(_as_dtensor, placements=tuple(placements)), node, like)

    def _placed(self, node: Node, placements: Any) -> Node:
        """A DTensor with other placements."""
        if placements_of(value(node)) == tuple(placements):
            return node
        function = _method(node, "redistribute")
        return self.call(Placing(function, placements=tuple(placements)), node)

    def _to_local(self, node: Node, placements: Any = None, partial: str = "") -> Node:
        """This rank's part of a DTensor, under other ``placements``. The gradient has them too, but
        is ``partial`` along the dimensions of the mesh that shard this: ``rows`` or ``classes``."""
        if self.sharding is None or not is_dtensor(value(node)):
            return node
        if placements is not None:
            node = self._placed(node, placements)
        gradient = placements_of(value(node))
        gradient = self.sharding.partial_where(partial, gradient) if partial else gradient
        function = _method(node, "to_local")
        return self.call(Placing(function, grad_placements=tuple(gradient)), node)


def _method(node: Node, name: str) -> Any:
    return getattr(type(value(node)), name)


def _as_dtensor(tensor: Tensor, like: Any, *, placements: tuple[Any, ...]) -> Tensor:
    """A DTensor of each rank's local ``tensor``, on the mesh of ``like``."""
    from_local = dtensors().DTensor.from_local
    return from_local(tensor, like.device_mesh, placements, run_check=False)
