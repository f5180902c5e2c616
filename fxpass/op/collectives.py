"""All-reduces over a process group that a compiler can trace.

In: a tensor and the name of a group. Out: the reduced tensor, the same on all ranks. Functional
collectives start at once; those that do not read each other run at the same time until
:func:`waited`::

    total, least = started(a, "sum", group), started(b, "min", group)
    total, least = waited(total), waited(least)
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed._functional_collectives as funcol
from torch import Tensor


def started(tensor: Tensor, op: str, group: str) -> Tensor:
    """``sum``, ``max`` or ``min`` over the ranks of the group with this name; not differentiable.
    Read it after :func:`waited`."""
    return funcol.all_reduce(tensor, op, cast(Any, group))


def waited(tensor: Tensor) -> Tensor:
    """The result of a functional collective as a plain tensor, after it has finished."""
    if isinstance(tensor, funcol.AsyncCollectiveTensor):
        return cast(Tensor, tensor.wait())
    return tensor


def all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    """The result of :func:`started`."""
    return waited(started(tensor, op, group))
