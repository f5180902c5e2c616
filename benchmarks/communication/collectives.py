"""Counts the collectives of a process group.

In: the default process group. Out: a group that forwards every collective to it and records it::

    group, calls = counted()
    mesh = DeviceMesh.from_group(group, "cpu")
    ...
    calls  # [Call(op="all_reduce", numel=8192, itemsize=4), ...]

Compiled graphs, eager DTensors and autograd all call the methods of a process group, so no
collective is missed: a method that is not in ``METHODS`` finds no backend in this group and raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree


class Call(NamedTuple):
    """One collective on one rank.

    Attributes:
        op: a key of ``RING``.
        numel: elements of the whole tensor that is reduced, gathered or scattered.
        itemsize: bytes of an element.
    """

    op: str
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.itemsize


# op -> bytes that a rank sends, in units of (W - 1) / W of the whole tensor's: a ring takes W - 1
# steps, and sends one of W parts in each
RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
# method of a process group -> op; torch before 2.13 has other names for some
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
}
# used to distribute weights and to synchronise ranks; not counted
OTHERS = ("barrier", "broadcast", "scatter")


class _Counted(dist.ProcessGroup):
    """The default group, with a list of its collectives."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue], torch's stub lacks it
        self.calls: list[Call] = []
        self.inner: Any = dist.group.WORLD

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        return _NAME

    @property
    def group_name(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dist.distributed_c10d._world.pg_names[self]

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Does nothing: ``group_name`` reads the name that torch stores."""

    def setGroupDesc(self, name: str) -> None:  # noqa: N802
        """Does nothing: the description is never read."""


def _passed_on(method: str) -> Callable[..., Any]:
    def call(self: _Counted, *args: Any, **kwargs: Any) -> Any:
        if method in METHODS:
            self.calls.append(_call(METHODS[method], args))
        return getattr(self.inner, method)(*args, **kwargs)

    return call


def _call(op: str, args: tuple[Any, ...]) -> Call:
    sides = [pytree.tree_leaves(a) for a in args[:2]]  # out and in, but for what is in place
    sides = [[t for t in side if isinstance(t, Tensor)] for side in sides]
    whole = max(sides, key=lambda side: sum(t.numel() for t in side))
    return Call(op, sum(t.numel() for t in whole), whole[0].element_size())


_NAME = "fxpass_counted"

for _method in (*METHODS, *OTHERS):
    if hasattr(dist.ProcessGroup, _method):
        setattr(_Counted, _method, _passed_on(_method))


def counted() -> tuple[dist.ProcessGroup, list[Call]]:
    """A group of all ranks, and the list of its collectives; every rank has to call this."""
    if _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            _NAME, lambda store, rank, size, timeout: _Counted(rank, size), devices=["cpu", "cuda"]
        )
    group: Any = dist.new_group(backend=_NAME)
    return group, group.calls
