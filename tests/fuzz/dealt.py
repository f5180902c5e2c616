"""Tensors whose classes are dealt to ranks, in the programs of :mod:`tests.fuzz.sharded`.

In: tensors that all ranks have. Out: DTensors, and the plain tensors of all of them again::

    z = gathered(F.linear(spread(x), dealt(w)))    # in eager: F.linear(x, w)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

T = TypeVar("T")


@functools.cache
def mesh() -> DeviceMesh:
    """All ranks; one, if there is no process group yet."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    return init_device_mesh("cpu", (dist.get_world_size(),))


def functions() -> dict[str, Callable[[Any], Tensor]]:
    """What the names of the programs mean on ranks."""
    ranks = mesh()

    def spread(x: Tensor) -> Tensor:
        return DTensor.from_local(x, ranks, [Replicate()], run_check=False)

    def dealt(w: Tensor) -> Tensor:
        return spread(w).redistribute(placements=[Shard(0)])  # type: ignore[attr-defined]

    def gathered(z: DTensor) -> Tensor:
        return z.redistribute(placements=[Replicate()]).to_local()

    return {"spread": spread, "dealt": dealt, "gathered": gathered}


def over_ranks(names: dict[str, Any], program: T) -> T:
    """A program whose global names mean this from now on."""
    names |= functions()
    return program


def first_of_all(verdict: T, failed: Callable[[T], bool]) -> T:
    """The first rank's value that has failed, or else this rank's: what all ranks agree on."""
    every: list[Any] = [None] * mesh().size()
    dist.all_gather_object(every, verdict)
    return next(filter(failed, every), verdict)
