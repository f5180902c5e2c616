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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Node

from fxpass.graph.calls import first_operand
from fxpass.graph.nodes import NoMatch, is_tensor, value
from fxpass.graph.placements import (
    FROM_LOCAL,
    TO_LOCAL,
    dtensors,
    is_dtensor,
    options_of,
    placement_name,
    placements_of,
)
from fxpass.match.classes import Flow
from fxpass.match.edits import Taken, symbols_of
from fxpass.match.linears import Linear
from fxpass.spec.expression import Z
from fxpass.spec.shards import dealt

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
    def most(self) -> int:
        """The largest number of classes that a rank has."""
        return -(-self.classes // self.ranks)

    def partial_where(self, kind: str, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """``placements``, but partial along the dimensions of the mesh that shard ``kind``."""
        pairs = zip(self.dims, placements, strict=True)
        return tuple(dtensors().Partial() if of == kind else p for of, p in pairs)

    def placements(self, kind: str, dim: int) -> tuple[Placement, ...]:
        """Placements of a tensor whose dimension ``dim`` is ``classes`` or ``rows``."""
        tensor = dtensors()
        return tuple(tensor.Shard(dim) if of == kind else tensor.Replicate() for of in self.dims)

    def sums(self) -> tuple[Placement, ...]:
        """Placements of a sum over all rows, of which each rank has the sum of its rows."""
        return self.partial_where("rows", self.placements("rows", 0))

    def loss_placements(self, old: Sequence[Placement]) -> tuple[Placement, ...]:
        """Placements of the new loss, from those of the old. PyTorch's mean over sharded rows is
        the average of the ranks' means, which is wrong if the ranks count different numbers of
        rows."""
        pairs = zip(old, self.sums(), strict=True)
        return tuple(
            dtensors().Replicate() if p.is_partial() and p != of_sum else p for p, of_sum in pairs
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
        reason = (
            "one rank compiles for all ranks (compile_on_one_rank), but the graph contains numbers "
            "of this rank's classes"
        )
        raise NoMatch(linear.node, reason)
    found = _of_weight(linear) if is_dtensor(value(linear.weight)) else _of_local_linear(flow)
    _check_placements(flow, found)
    _check_edits(flow, found)
    return _of_reductions(flow, found)


def _of_weight(linear: Linear) -> Sharding:
    """The sharding of a linear whose x and weight are DTensors."""
    x, weight = value(linear.x), value(linear.weight)
    if not is_dtensor(x):
        raise NoMatch(linear.node, "the head's weight is a DTensor and its input is not")
    if _groups(x) != _groups(weight):
        reason = f"%{linear.x.name} and the head's weight are on different meshes"
        raise NoMatch(linear.x, reason)
    class_dim, replicate = int(linear.transposed), dtensors().Replicate()
    placements = placements_of(weight)
    over = _class_dims(placements, class_dim)
    if over is None:
        reason = (
            f"the head's weight is placed {_names(placements)}; fxpass fuses weights that are "
            f"sharded over the classes, Shard({class_dim}), along one dimension of the mesh"
        )
        raise NoMatch(linear.node, reason)
    new: list[Placement] = []
    dims: list[str] = []
    for i, p in enumerate(placements_of(x)):
        shards_rows = any(_is_shard(p, d) for d in range(x.dim() - 1))
        if i not in over and not (shards_rows or p.is_replicate() or p.is_partial()):
            raise NoMatch(linear.node, f"the hidden states are placed {_names(placements_of(x))}")
        rows = shards_rows and i not in over
        new.append(p if rows else replicate)
        dims.append("classes" if i in over else "rows" if rows else "")
    # the placements of the weight as [V, D]
    at_zero = tuple(dtensors().Shard(0) if i in over else p for i, p in enumerate(placements))
    return _make(weight, class_dim, dims, tuple(new), at_zero)


def _of_local_linear(flow: Flow) -> Sharding:
    """The sharding of a linear of plain tensors whose output ``from_local`` makes a DTensor."""
    node = flow.linear.node
    entry = next((n for n in flow.classes if placement_name(n.target) in FROM_LOCAL), None)
    if entry is None or is_dtensor(value(node)):
        raise NoMatch(node, "the head's input is a DTensor and its weight is not")
    logits = value(entry)
    placements, last = placements_of(logits), logits.dim() - 1
    over = _class_dims(placements, last)
    if over is None:
        raise NoMatch(entry, f"the logits become a DTensor that is placed {_names(placements)}")
    dims = ["classes" if i in over else "" for i in range(len(placements))]
    found = _make(logits, last, dims, None, None)
    if found.count != value(node).shape[-1]:
        raise NoMatch(entry, "this rank's logits are not its part of the DTensor that they become")
    if found.classes % found.ranks:  # of the sizes of plain tensors each rank sees its own
        raise NoMatch(entry, "the ranks have different numbers of classes of a plain weight")
    _check_local(flow)
    return found


def _check_local(flow: Flow) -> None:
    """``NoMatch`` if a rank's plain logits are more than transformed before they become a DTensor:
    what reads classes there reads those of the rank."""
    local = {flow.linear.node}
    for node, like in flow.classes.items():
        if placement_name(node.target) or local.isdisjoint((node, *node.all_input_nodes)):
            continue
        local.add(node)
        vectors = {s for s in symbols_of(like.expr) - {Z} if s.name.startswith("class_")}
        if not symbols_of(like.expr) <= {Z, *vectors}:
            raise NoMatch.at(node, "is of this rank's logits, not of all classes")
    # values and indices of a maximum are read from a tuple
    local |= {pair for pair in flow.pairs if not local.isdisjoint(pair.all_input_nodes)}
    for reduced in flow.reductions:
        if not local.isdisjoint(reduced.node.all_input_nodes):
            name = reduced.node.name
            raise NoMatch(reduced.node, f"%{name} is of this rank's logits, not of all classes")


def _class_dims(placements: Sequence[Placement], dim: int) -> list[int] | None:
    """The dimension of the mesh that shards the classes, at ``dim`` of a tensor, if there is one;
    None if the tensor is sharded in another way."""
    over = [i for i, p in enumerate(placements) if not p.is_replicate()]
    known = len(over) < 2 and all(_is_shard(placements[i], dim) for i in over)
    return over if known else None


def _make(
    of_classes: Any,
    class_dim: int,
    dims: Sequence[str],
    x: tuple[Placement, ...] | None,
    weight: tuple[Placement, ...] | None,
) -> Sharding:
    """The sharding of a DTensor with classes; ``dims`` are what the mesh shards."""
    mesh, groups = of_classes.device_mesh, _groups(of_classes)
    over = [i for i, kind in enumerate(dims) if kind == "classes"]
    rows = [i for i, kind in enumerate(dims) if kind == "rows"]
    classes, ranks = int(of_classes.shape[class_dim]), math.prod(int(mesh.size(i)) for i in over)
    first, count = dealt(classes, ranks, int(mesh.get_local_rank(over[0])) if over else 0)
    return Sharding(
        first=first,
        count=count,
        classes=classes,
        group=groups[over[0]] if over else None,
        ranks=ranks,
        row_groups=tuple(groups[i] for i in rows),
        rows=math.prod(int(mesh.size(i)) for i in rows),
        x=x,
        weight=weight,
        dims=tuple(dims),
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


# ---------------------------------------------------------------- what cannot be fused


def _check_placements(flow: Flow, found: Sharding) -> None:
    """``NoMatch`` unless every rank has all classes of its rows where DTensors become plain."""
    for node in flow.classes:
        if is_dtensor(value(node)) and any(p.is_partial() for p in placements_of(value(node))):
            raise NoMatch.at(node, f"is placed {_names(placements_of(value(node)))}")
    for node in flow.classes:
        name = placement_name(node.target)
        call = f"%{node.name} ({name})"
        if name not in (*FROM_LOCAL, *TO_LOCAL):
            continue
        grads = options_of(node).get("grad_placements") or ()
        if any(p.is_partial() for p in grads):
            raise NoMatch(node, f"{call} has partial gradients")
        if name not in TO_LOCAL:
            continue
        before = value(first_operand(node))
        if not is_dtensor(before):
            raise NoMatch(node, f"{call} is not of a DTensor")
        whole = "full_tensor" in name
        for kind, p in zip(found.dims, placements_of(before), strict=True):
            replicated = whole or p.is_replicate()
            if kind == "classes" and not replicated:
                reason = (
                    f"{call} gives each rank only its part of the logits, "
                    f"{_names(placements_of(before))}; a loss of this part is not the loss of all "
                    "classes"
                )
                raise NoMatch(node, reason)
            if kind != "classes" and replicated != (kind == ""):
                raise NoMatch(node, f"{call} redistributes the rows before the loss")


def _check_edits(flow: Flow, found: Sharding) -> None:
    """``NoMatch`` if an operand or an output is not split between the ranks."""
    node = flow.linear.node
    scaled = any(base.scale != 1 for base in flow.bases)
    read = [s for base in flow.bases for s in base.given]
    reasons = {
        "logits with sharded rows are reduced with other tensors": (
            found.rows > 1 and (scaled or bool(read))
        ),
        f"%{node.name}: the program selects some classes of sharded logits": (
            any(isinstance(edit, Taken) for base in flow.bases for edit in base.edits)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise NoMatch(node, reason)


def _of_reductions(flow: Flow, found: Sharding) -> Sharding:
    """The sharding for reductions of DTensors, or of each rank's rows."""
    node = flow.linear.node
    read = [n for r in flow.reductions for n in r.node.all_input_nodes if n in flow.classes]
    if len({is_dtensor(value(n)) for n in read}) != 1:
        raise NoMatch(node, "some of its reductions are of DTensors, and some are not")
    if not is_dtensor(value(read[0])):
        for tensor in flow.tensors.values():
            if is_dtensor(tensor.meta["example_value"]):
                raise NoMatch.at(tensor, "is a DTensor and the logits are not")
        return replace(found, row_groups=())  # each rank reduces over its rows
    if found.weight is None:
        raise NoMatch(node, "its logits are a DTensor, but its linear is of plain tensors")
    for reduced in flow.reductions:
        _check_parts(reduced.node)
    for reduced in flow.reductions if found.rows > 1 else ():
        if reduced.loss is None or not reduced.is_scalar:
            reason = "its rows are sharded: only the mean or sum of a loss is fused"
            raise NoMatch(reduced.node, reason)
        target = reduced.loss.target
        if not is_dtensor(value(target)):
            reason = f"the rows are sharded, and %{target.name} is a plain tensor"
            raise NoMatch(reduced.node, reason)
    return found


def _check_parts(node: Node) -> None:
    """``NoMatch`` if ``to_local`` reads a rank's part of a sum: the new graph has the whole."""
    if not is_dtensor(value(node)) or not any(p.is_partial() for p in placements_of(value(node))):
        return
    for user in node.users:
        if placement_name(user.target).endswith("to_local"):
            raise NoMatch.at(user, "reads this rank's part of a sum")
        if is_tensor(user):
            _check_parts(user)


def _groups(dtensor: Any) -> list[str]:
    """The names of the process groups along the dimensions of a DTensor's mesh."""
    mesh = dtensor.device_mesh
    return [str(mesh.get_group(dim).group_name) for dim in range(mesh.ndim)]


def _is_shard(placement: Placement, dim: int) -> bool:
    """Whether it is ``Shard(dim)`` itself; a strided shard has another order."""
    shard = dtensors().Shard(dim)
    return type(placement) is type(shard) and placement == shard


def _names(placements: Sequence[Placement]) -> str:
    return f"[{', '.join(map(str, placements))}]"


# ---------------------------------------------------------------- in the rewritten graph


def as_dtensor(tensor: Tensor, like: Any, *, placements: tuple[Placement, ...]) -> Tensor:
    """A DTensor of each rank's local ``tensor``, on the mesh of ``like``."""
    from_local = dtensors().DTensor.from_local
    return from_local(tensor, like.device_mesh, placements, run_check=False)
