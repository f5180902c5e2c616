"""All-reduces over a process group that a compiler can trace.

In: a tensor and the name of a group. Out: the reduced tensor, the same on all ranks::

    total = all_reduce(a, "sum", "group")

A tensor that all ranks have, of which each computes a part of the gradient::

    scale = with_summed_gradient(scale, "group")
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor


def waited(tensor: Tensor) -> Tensor:
    """The result of a functional collective as a plain tensor, after it has finished."""
    if isinstance(tensor, funcol.AsyncCollectiveTensor):
        return cast(Tensor, tensor.wait())
    return tensor


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Any:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_reduce(grad, "sum", ctx.group), None


def with_summed_gradient(tensor: Tensor, group: str) -> Tensor:
    """The same tensor; its gradient is the sum of the ranks' gradients."""
    return _SumGradient.apply(tensor, group)  # type: ignore[return-value]


def all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    """``sum``, ``max`` or ``min`` over the ranks of the group with this name; no autograd."""
    return waited(funcol.all_reduce(tensor, op, cast(Any, group)))
