"""Sharded heads: how classes and rows of a loss are distributed over ranks, read from DTensors.

In: what a program computes of a linear's output. Out: a :class:`Sharding`, or None on one rank. The
nodes compute the same values on DTensors as on plain tensors, and ``redistribute`` changes
placements only. So the flow is read through placement nodes, and each rank computes the reductions
of its vocabulary shard of the weight, wherever the program gathers the logits::

    %x = from_local(%h, mesh, [Replicate()])     %weight: DTensor [Shard(0)]
    %z = linear(%x, %weight)                     classes 50 to 99 of 100 are on this rank
    %r = redistribute(%z, [Replicate()])         the all-gather that the rewrite saves
    %p = to_local(%r)                            from here on every rank computes the same
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Node

from fxpass.graph.calls import first_operand
from fxpass.graph.nodes import NoMatch, needs_gradient, value
from fxpass.graph.placements import (
    FROM_LOCAL,
    TO_LOCAL,
    is_dtensor,
    options_of,
    placement_name,
    placements_of,
)
from fxpass.match.classes import Flow, Reduced
from fxpass.match.edits import Scaled, Taken, symbols_of
from fxpass.match.linears import Linear
from fxpass.match.outputs import Summed, given_of
from fxpass.spec.outputs import Top

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Sharding:
    """How classes and rows of one loss are distributed over ranks.

    Attributes:
        first, count, classes: this rank's first class, its number of classes, the number of all.
        group: the process group that the classes are sharded over; None if each rank has all.
        ranks: the number of ranks in ``group``.
        row_groups: the groups that the rows are sharded over, if the loss reduces over all rows.
        rows: the number of ranks that the rows are sharded over.
        x, weight: the placements that the operands need, one for each dimension of the mesh. They
            are the present ones, but x is replicated over ``group``. None for plain tensors.
        dims: what each dimension of the mesh shards: ``classes``, ``rows`` or an empty string.
    """

    first: int
    count: int
    classes: int
    group: str | None
    ranks: int
    row_groups: tuple[str, ...]
    rows: int
    x: tuple[Placement, ...] | None
    weight: tuple[Placement, ...] | None
    dims: tuple[str, ...]

    @property
    def rows_move(self) -> bool:
        """Whether the rows are sharded, so that views have to be replayed on x as a DTensor."""
        return self.rows > 1

    def partial_where(self, kind: str, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """``placements``, but partial along the dimensions of the mesh that shard ``kind``."""
        from torch.distributed.tensor.placement_types import Partial

        pairs = zip(self.dims, placements, strict=True)
        return tuple(Partial() if of == kind else p for of, p in pairs)

    def rows_only(self, dim: int) -> tuple[Placement, ...]:
        """Placements of a tensor whose dimension ``dim`` is sharded like the rows."""
        from torch.distributed.tensor.placement_types import Replicate, Shard

        return tuple(Shard(dim) if of == "rows" else Replicate() for of in self.dims)

    def logits(self, dim: int) -> tuple[Placement, ...]:
        """Placements of logits whose class dimension ``dim`` is sharded like the weight."""
        from torch.distributed.tensor.placement_types import Replicate, Shard

        return tuple(Shard(dim) if of == "classes" else Replicate() for of in self.dims)

    def sums(self) -> tuple[Placement, ...]:
        """Placements of a sum over all rows, of which each rank has the sum of its rows."""
        return self.partial_where("rows", self.rows_only(0))

    def loss_placements(self, old: Sequence[Placement]) -> tuple[Placement, ...]:
        """Placements of the new loss, from those of the old. PyTorch's mean over sharded rows is
        the average of the ranks' means, which is wrong if the ranks count different numbers of
        rows."""
        from torch.distributed.tensor.placement_types import Replicate

        sums = self.sums()
        return tuple(
            Replicate() if p.is_partial() and p != of_sum else p
            for p, of_sum in zip(old, sums, strict=True)
        )

    def __str__(self) -> str:
        parts = []
        if self.group is not None:
            parts.append(f"classes sharded over {self.ranks} ranks")
        if self.rows > 1:
            parts.append(f"rows over {self.rows}")
        return ", ".join(parts)


def sharding_of(flow: Flow) -> Sharding | None:
    """The sharding of a head; None without DTensors.

    Raises:
        NoMatch: the operator does not support the placements of classes or rows.
    """
    linear = flow.linear
    operands = [n for n in (linear.x, linear.weight, linear.bias) if n is not None]
    if not any(is_dtensor(value(n)) for n in (*flow.classes, *operands)):
        return None
    if compiled_for_all_ranks():
        raise NoMatch(
            linear.node,
            "one rank compiles for all ranks (compile_on_one_rank), but the graph contains numbers "
            "of this rank's classes",
        )
    found = _of_weight(linear) if is_dtensor(value(linear.weight)) else _of_local_linear(flow)
    _check_placements(flow, found)
    _check_edits(flow, found)
    return _of_reductions(flow, found)


def _of_weight(linear: Linear) -> Sharding:
    """The sharding of a linear whose x and weight are DTensors."""
    from torch.distributed.tensor.placement_types import Replicate

    x, weight = value(linear.x), value(linear.weight)
    mesh: Any = weight.device_mesh  # type: ignore[attr-defined]
    if not is_dtensor(x):
        raise NoMatch(linear.node, "the head's weight is a DTensor and its input is not")
    _check_mesh(linear.x, mesh)
    class_dim = 1 if linear.transposed else 0
    placements = placements_of(weight)
    over = [i for i, p in enumerate(placements) if not p.is_replicate()]
    if len(over) > 1 or not all(_is_shard(placements[i], class_dim) for i in over):
        raise NoMatch(
            linear.node,
            f"the head's weight is placed {_names(placements)}; fxpass fuses weights that are "
            f"sharded over the classes, Shard({class_dim}), along one dimension of the mesh",
        )
    new: list[Placement] = []
    dims: list[str] = []
    for i, p in enumerate(placements_of(x)):
        if i in over or p.is_replicate() or p.is_partial():
            new.append(Replicate())
        elif any(_is_shard(p, d) for d in range(x.dim() - 1)):
            new.append(p)
        else:
            raise NoMatch(linear.node, f"the hidden states are placed {_names(placements_of(x))}")
        dims.append("classes" if i in over else "" if new[-1].is_replicate() else "rows")
    return _make(mesh, weight, class_dim, tuple(dims), tuple(new), _at_zero(placements, class_dim))


def _at_zero(placements: Sequence[Placement], class_dim: int) -> tuple[Placement, ...]:
    """The placements of the weight as ``[V, D]``."""
    from torch.distributed.tensor.placement_types import Shard

    return tuple(Shard(0) if _is_shard(p, class_dim) else p for p in placements)


def _of_local_linear(flow: Flow) -> Sharding:
    """The sharding of a linear of plain tensors whose output ``from_local`` makes a DTensor."""
    entry = next((n for n in flow.classes if placement_name(n.target) in FROM_LOCAL), None)
    if entry is None or is_dtensor(value(flow.linear.node)):
        raise NoMatch(flow.linear.node, "the head's input is a DTensor and its weight is not")
    logits = value(entry)
    placements, last = placements_of(logits), logits.dim() - 1
    over = [i for i, p in enumerate(placements) if not p.is_replicate()]
    if len(over) > 1 or not all(_is_shard(placements[i], last) for i in over):
        raise NoMatch(entry, f"the logits become a DTensor that is placed {_names(placements)}")
    dims = tuple("classes" if i in over else "" for i in range(len(placements)))
    mesh: Any = logits.device_mesh  # type: ignore[attr-defined]
    found = _make(mesh, logits, last, dims, None, None)
    if found.count != value(flow.linear.node).shape[-1]:
        raise NoMatch(entry, "this rank's logits are not its part of the DTensor that they become")
    return found


def _make(
    mesh: Any,
    of_classes: Tensor,
    class_dim: int,
    dims: tuple[str, ...],
    x: tuple[Placement, ...] | None,
    weight: tuple[Placement, ...] | None,
) -> Sharding:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        of_classes.shape, mesh, placements_of(of_classes)
    )
    over = next((i for i, kind in enumerate(dims) if kind == "classes"), None)
    rows = [i for i, kind in enumerate(dims) if kind == "rows"]
    count = 1
    for i in rows:
        count *= int(mesh.size(i))
    return Sharding(
        first=int(offset[class_dim]),
        count=int(shape[class_dim]),
        classes=int(of_classes.shape[class_dim]),
        group=None if over is None else group_name(mesh, over),
        ranks=1 if over is None else int(mesh.size(over)),
        row_groups=tuple(group_name(mesh, i) for i in rows),
        rows=count,
        x=x,
        weight=weight,
        dims=dims,
    )


def compiled_for_all_ranks() -> bool:
    """Whether all ranks run one compiled graph, which must not contain a rank's numbers."""
    return bool(getattr(one_rank_settings(), "compile_on_one_rank", False))


def one_rank_settings() -> Any:
    """The module of the setting ``compile_on_one_rank``; None if torch has no such module."""
    import torch.distributed

    # from torch 2.14 on, which warns about the old module
    if hasattr(torch.compiler.config, "compile_on_one_rank"):
        return torch.compiler.config
    return getattr(torch.distributed, "config", None)


def group_name(mesh: Any, dim: int) -> str:
    """The name of the process group along one dimension of a mesh."""
    return str(mesh.get_group(dim).group_name)


# ---------------------------------------------------------------- what cannot be fused


def _check_placements(flow: Flow, found: Sharding) -> None:
    """``NoMatch`` unless every rank has all classes of its rows where DTensors become plain."""
    for node in flow.classes:
        if not is_dtensor(value(node)):
            continue
        placements = placements_of(value(node))
        if any(p.is_partial() for p in placements):
            raise NoMatch(node, f"%{node.name} is placed {_names(placements)}")
    for node in flow.classes:
        name = placement_name(node.target)
        if name not in (*FROM_LOCAL, *TO_LOCAL):
            continue
        grads = options_of(node).get("grad_placements") or ()
        if any(p.is_partial() for p in grads):
            raise NoMatch(node, f"%{node.name} ({name}) has partial gradients")
        if name not in TO_LOCAL:
            continue
        before = value(first_operand(node))
        if not is_dtensor(before):
            raise NoMatch(node, f"%{node.name} ({name}) is not of a DTensor")
        whole = "full_tensor" in name
        for kind, p in zip(found.dims, placements_of(before), strict=True):
            if kind == "classes" and not whole and not p.is_replicate():
                raise NoMatch(
                    node,
                    f"%{node.name} ({name}) gives each rank only its part of the logits, "
                    f"{_names(placements_of(before))}; a loss of this part is not the loss of all "
                    "classes",
                )
            if kind != "classes" and (whole or p.is_replicate()) != (kind == ""):
                raise NoMatch(node, f"%{node.name} ({name}) redistributes the rows before the loss")


def _check_edits(flow: Flow, found: Sharding) -> None:
    for base in flow.bases:
        node = flow.linear.node
        scaled = base.scale != 1 or any(isinstance(edit, Scaled) for edit in base.edits)
        if found.rows > 1 and (scaled or base.given):
            raise NoMatch(node, "logits with sharded rows are multiplied by a tensor")
        if not flow.selections.keys().isdisjoint(base.given):
            raise NoMatch(node, "some classes of sharded logits are assigned")
        if any(symbol.name.startswith("row_") for symbol in base.given):
            raise NoMatch(node, "a function of sharded logits reads a value of their row")
        if base.hits:
            raise NoMatch(node, "sharded logits have a margin at a class")
        for symbol in symbols_of(base.scale).union(base.factors, base.given):
            if needs_gradient(flow.tensors[symbol]):
                reason = "sharded logits are multiplied by a tensor that needs a gradient"
                raise NoMatch(node, reason)
        if any(isinstance(edit, Taken) for edit in base.edits):
            raise NoMatch(node, f"%{node.name}: the program selects some classes of sharded logits")
        for bias in (flow.tensors[symbol] for symbol in base.biases):
            example = value(bias)
            whole = not is_dtensor(example) and example.numel() != found.count
            if whole and example.requires_grad:
                reason = f"%{bias.name}, a bias of sharded logits, is not sharded"
                raise NoMatch(bias, reason)

    for _, output in flow.outputs.values():
        for symbol in given_of(output):
            if symbol.name.startswith("row_"):
                raise NoMatch(flow.linear.node, "a sum over sharded classes reads a value of a row")
            if any(map(needs_gradient, flow.nodes(symbol))):
                what = f"%{flow.tensors[symbol].name}, values of sharded classes"
                raise NoMatch(flow.linear.node, f"{what}, needs a gradient")
        if isinstance(output, Top):
            raise NoMatch(flow.linear.node, "the largest logits of sharded classes are read")
        if isinstance(output, Summed) and (output.late or output.hits):
            reason = "a sum over sharded classes reads a softmax, or a pick"
            raise NoMatch(flow.linear.node, f"{reason}: `{output.function}`")


def _of_reductions(flow: Flow, found: Sharding) -> Sharding:
    """The sharding for reductions of DTensors, or of each rank's rows."""
    local = {not is_dtensor(value(n)) for r in flow.reductions for n in _logits_of(flow, r)}
    if len(local) != 1:
        raise NoMatch(flow.linear.node, "some of its reductions are of DTensors, and some are not")
    if True in local:
        for node in flow.tensors.values():
            if is_dtensor(node.meta["example_value"]):
                raise NoMatch(node, f"%{node.name} is a DTensor and the logits are not")
        return replace(found, row_groups=())  # each rank reduces over its rows
    if found.weight is None:
        raise NoMatch(
            flow.linear.node, "its logits are a DTensor, but its linear is of plain tensors"
        )
    for reduced in flow.reductions:
        if found.rows == 1:
            continue
        if reduced.loss is None or not reduced.is_scalar:
            reason = "its rows are sharded: only the mean or sum of a loss is fused"
            raise NoMatch(reduced.node, reason)
        target = reduced.loss.target
        if not is_dtensor(value(target)):
            reason = f"the rows are sharded, and %{target.name} is a plain tensor"
            raise NoMatch(reduced.node, reason)
    return found


def _logits_of(flow: Flow, reduced: Reduced) -> list[Node]:
    return [n for n in reduced.node.all_input_nodes if n in flow.classes]


def _check_mesh(node: Node, mesh: Any) -> None:
    other: Any = value(node).device_mesh  # type: ignore[attr-defined]
    if [group_name(other, i) for i in range(other.ndim)] != [
        group_name(mesh, i) for i in range(mesh.ndim)
    ]:
        raise NoMatch(node, f"%{node.name} and the head's weight are on different meshes")


def _is_shard(placement: Placement, dim: int) -> bool:
    """Whether it is ``Shard(dim)`` itself; a strided shard has another order."""
    from torch.distributed.tensor.placement_types import Shard

    return type(placement) is Shard and placement.dim == dim


def _names(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(str, placements))}]"


# ---------------------------------------------------------------- in the rewritten graph


def as_dtensor(tensor: Tensor, like: Tensor, *, placements: tuple[Placement, ...]) -> Tensor:
    """A DTensor of each rank's local ``tensor``, on the mesh of ``like``."""
    from torch.distributed.tensor import DTensor

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(tensor, mesh, placements, run_check=False)
