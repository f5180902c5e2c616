"""Sharded heads: which classes and rows a rank has, and what can be captured of them.

In: the product of a head that reads DTensors, or whose output becomes one. Out: its
:class:`Sharding`. A slice sees all classes and rows: each DTensor is a plain tensor of its global
shape, and a node that changes placements changes nothing::

    %z = linear(%x, %w)          %w: DTensor [Shard(0)]       classes over the mesh
    %full = full_tensor(%z)      the same tensor
    %local = to_local(%z)        refused: a rank's part of the logits
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from fxpass.capture.rows import A
from fxpass.capture.values import Head, Step, Value
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import NoMatch, is_tensor, value
from fxpass.graph.placements import (
    FROM_LOCAL,
    TO_LOCAL,
    compiled_for_all_ranks,
    dtensors,
    is_dtensor,
    options_of,
    placement_name,
    placements_of,
)
from fxpass.spec.shards import dealt

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Sharding:
    """How classes and rows of a head are distributed over ranks.

    Attributes:
        count, classes: this rank's number of classes, the number of all.
        group: the process group that the classes are sharded over; None if each rank has all.
        ranks: the number of ranks in ``group``.
        rows: the number of ranks that the rows are sharded over.
        dims: what each dimension of the mesh shards: ``classes``, ``rows`` or an empty string.
        like: a node of a DTensor on the mesh; None for a linear of plain tensors.
    """

    count: int
    classes: int
    group: str | None
    ranks: int
    rows: int
    dims: tuple[str, ...]
    like: Node | None

    @property
    def most(self) -> int:
        """The largest number of classes that a rank has."""
        return -(-self.classes // self.ranks)

    def __str__(self) -> str:
        parts = []
        if self.group is not None:
            parts.append(f"classes sharded over {self.ranks} ranks")
        if self.rows > 1:
            parts.append(f"rows over {self.rows}")
        return ", ".join(parts)


def of_head(head: Head) -> Sharding | None:
    """The sharding of a head by its operands; None if they are plain tensors.

    Raises:
        NoMatch: the operator does not support the placements of classes or rows.
    """
    x_node, _ = _source(head.x, -1)
    weight_node, dim = _source(head.weight, -2 if head.first else -1)
    x, weight = value(x_node), value(weight_node)
    if not is_dtensor(weight):
        if is_dtensor(x):
            raise NoMatch(head.node, "the head's input is a DTensor and its weight is not")
        return None
    _check_compiled(head.node)
    if not is_dtensor(x):
        raise NoMatch(head.node, "the head's weight is a DTensor and its input is not")
    if _groups(x) != _groups(weight):
        raise NoMatch(x_node, f"%{x_node.name} and the head's weight are on different meshes")
    placements = placements_of(weight)
    over = _class_dims(placements, dim)
    if over is None:
        reason = (
            f"the head's weight is placed {_names(placements)}; fxpass fuses weights that are "
            f"sharded over the classes, Shard({dim}), along one dimension of the mesh"
        )
        raise NoMatch(head.node, reason)
    dims: list[str] = []
    for i, p in enumerate(placements_of(x)):
        shards_rows = any(_is_shard(p, d) for d in range(x.dim() - 1))
        if i not in over and not (shards_rows or p.is_replicate() or p.is_partial()):
            raise NoMatch(head.node, f"the hidden states are placed {_names(placements_of(x))}")
        rows = shards_rows and i not in over
        dims.append("classes" if i in over else "rows" if rows else "")
    return _make(weight, dim, dims, weight_node)


# What a linear makes of its operands.
_RESHAPED = (A.view, A._unsafe_view, A.reshape)
_SAME = (A._to_copy, A.alias, A.clone, *_RESHAPED)


def _source(tensor: Value, dim: int) -> tuple[Node, int]:
    """The node that a factor of a product is a view or cast of, and where a dimension is there."""
    dim %= len(tensor.shape)
    while tensor.node is None:
        step = tensor.step
        if step is None or len(step.values) != 1:
            break
        (source,) = step.values
        if step.op.overloadpacket is A.t and len(tensor.shape) == 2:
            dim = 1 - dim
        elif step.op.overloadpacket is A.expand:
            dim -= len(tensor.shape) - len(source.shape)
        elif step.op.overloadpacket not in _SAME:
            break
        elif step.op.overloadpacket in _RESHAPED and dim == len(tensor.shape) - 1:
            dim = len(source.shape) - 1
        tensor = source
    if tensor.node is None:
        raise NoMatch(step.node if step else tensor.fake, "is a product of what is not known")  # type: ignore[arg-type]
    return tensor.node, dim


def entry_of(node: Node) -> Node | None:
    """The ``from_local`` that makes a DTensor of the plain logits of a product, if there is one."""
    todo, seen = [node], {node}
    while todo:
        for user in todo.pop().users:
            if placement_name(user.target) in FROM_LOCAL:
                return user
            if user not in seen and is_tensor(user) and not is_dtensor(value(user)):
                seen.add(user)
                todo.append(user)
    return None


def of_entry(node: Node, entry: Node) -> Sharding:
    """The sharding of a linear of plain tensors whose output ``from_local`` makes a DTensor.

    Raises:
        NoMatch: the ranks do not have equal parts of the classes.
    """
    _check_compiled(node)
    logits = value(entry)
    placements, last = placements_of(logits), logits.dim() - 1
    over = _class_dims(placements, last)
    if over is None:
        raise NoMatch(entry, f"the logits become a DTensor that is placed {_names(placements)}")
    dims = ["classes" if i in over else "" for i in range(len(placements))]
    found = _make(logits, last, dims, None)
    if found.count != value(node).shape[-1]:
        raise NoMatch(entry, "this rank's logits are not its part of the DTensor that they become")
    if found.classes % found.ranks:  # of the sizes of plain tensors each rank sees its own
        raise NoMatch(entry, "the ranks have different numbers of classes of a plain weight")
    return found


def class_dims_of(node: Node) -> Mapping[Node, int]:
    """The operands of a product of plain tensors that have its classes, and where.

    Raises:
        NoMatch: it is another product.
    """
    function, args = function_of(node), list(node.args)
    if node.kwargs or function not in ("linear", "matmul", "mm", "addmm"):
        raise NoMatch.at(node, "is a product of which it is not known where its classes are")
    if function == "linear":
        found = [(args[1], 0), *((a, 0) for a in args[2:])]
    elif function == "addmm":
        found = [(args[2], 1), (args[0], -1)]
    else:
        found = [(args[1], 1)]
    return {n: dim for n, dim in found if isinstance(n, Node)}


def global_of(example: Tensor) -> Tensor:
    """A plain tensor with the shape of a DTensor on all ranks."""
    local: Any = example._local_tensor if is_dtensor(example) else example  # type: ignore[attr-defined]
    if local is example:
        return example
    with torch.no_grad(), local.fake_mode:
        made = torch.empty_strided(
            example.shape, example.stride(), dtype=example.dtype, device=local.device
        )
    return made.requires_grad_(example.requires_grad)


# ---------------------------------------------------------------- what cannot be captured


def check_tensor(node: Node) -> None:
    """``NoMatch`` for a DTensor that is a part of a sum."""
    if is_dtensor(value(node)) and any(p.is_partial() for p in placements_of(value(node))):
        raise NoMatch.at(node, f"is placed {_names(placements_of(value(node)))}")


def check_placing(node: Node, source: Node, sharding: Sharding) -> None:
    """``NoMatch`` unless every rank has all classes and rows where a DTensor becomes plain."""
    name = placement_name(node.target)
    call = f"%{node.name} ({name})"
    if name not in (*FROM_LOCAL, *TO_LOCAL):
        return
    grads = options_of(node).get("grad_placements") or ()
    if any(p.is_partial() for p in grads):
        raise NoMatch(node, f"{call} has partial gradients")
    if name not in TO_LOCAL:
        return
    before = value(source)
    if not is_dtensor(before):
        raise NoMatch(node, f"{call} is not of a DTensor")
    whole = "full_tensor" in name
    for kind, p in zip(sharding.dims, placements_of(before), strict=True):
        if kind == "classes" and not (whole or p.is_replicate()):
            reason = (
                f"{call} gives each rank only its part of the logits, "
                f"{_names(placements_of(before))}; a loss of this part is not the loss of all "
                "classes"
            )
            raise NoMatch(node, reason)
        if kind != "classes" and (kind == "rows" or not (whole or p.is_replicate())):
            raise NoMatch(node, f"{call} redistributes the rows before the loss")


def check_local(node: Node, steps: Sequence[Step]) -> None:
    """``NoMatch`` for a call on a rank's plain logits that is more than a transform of each: what
    reads classes there reads those of the rank."""
    for step in steps:
        known = torch.Tag.pointwise in step.op.tags or step.op.overloadpacket is A._to_copy
        if not known and step.op.overloadpacket not in (A.view, A._unsafe_view, A.clone, A.alias):
            raise NoMatch.at(node, "is of this rank's logits, not of all classes")


def check_results(sharding: Sharding, results: Iterable[Node]) -> None:
    """``NoMatch`` for results that cannot take the place of a program's."""
    for node in filter(is_tensor, results):
        if is_dtensor(value(node)) and sharding.like is None:
            reason = "its logits are a DTensor, but its linear is of plain tensors"
            raise NoMatch.at(node, reason)
        _check_parts(node)


def _check_parts(node: Node) -> None:
    """``NoMatch`` if ``to_local`` reads a rank's part of a sum: the new graph has the whole."""
    if not is_dtensor(value(node)) or not any(p.is_partial() for p in placements_of(value(node))):
        return
    for user in node.users:
        if placement_name(user.target).endswith("to_local"):
            raise NoMatch.at(user, "reads this rank's part of a sum")
        if is_tensor(user):
            _check_parts(user)


def _check_compiled(node: Node) -> None:
    if compiled_for_all_ranks():
        reason = (
            "one rank compiles for all ranks (compile_on_one_rank), but the graph contains numbers "
            "of this rank's classes"
        )
        raise NoMatch(node, reason)


def _class_dims(placements: Sequence[Placement], dim: int) -> list[int] | None:
    """The dimension of the mesh that shards the classes, at ``dim`` of a tensor, if there is one;
    None if the tensor is sharded in another way."""
    over = [i for i, p in enumerate(placements) if not p.is_replicate()]
    known = len(over) < 2 and all(_is_shard(placements[i], dim) for i in over)
    return over if known else None


def _make(of_classes: Any, dim: int, dims: Sequence[str], like: Node | None) -> Sharding:
    """The sharding of a DTensor with classes at ``dim``; ``dims`` are what the mesh shards."""
    mesh, groups = of_classes.device_mesh, _groups(of_classes)
    over = [i for i, kind in enumerate(dims) if kind == "classes"]
    rows = [i for i, kind in enumerate(dims) if kind == "rows"]
    classes, ranks = int(of_classes.shape[dim]), math.prod(int(mesh.size(i)) for i in over)
    _, count = dealt(classes, ranks, int(mesh.get_local_rank(over[0])) if over else 0)
    group = groups[over[0]] if over else None
    of_rows = math.prod(int(mesh.size(i)) for i in rows)
    return Sharding(count, classes, group, ranks, of_rows, tuple(dims), like)


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
