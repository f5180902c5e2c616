"""What one call of the operator computes in forward and in backward, and with which Triton kernels.

In: the operator's spec and the operands without their data. Out: the specs of its runs, and the
launches of all of them::

    >>> forward(Spec(reduction="none", gradients=("x",)), torch.float32)
    (Spec(reduction='none', ...gradients=()...), False)
"""

from __future__ import annotations

import dataclasses

import torch

from fxpass.kernels.call import Gpu, Launch, OfReductions, Operands, for_call, for_reductions
from fxpass.spec.dtypes import gradient_dtype
from fxpass.spec.reductions import Reductions
from fxpass.spec.spec import Spec


def forward(spec: Spec, dtype: torch.dtype) -> tuple[Spec, bool]:
    """The spec of the run in forward, for operands of ``dtype``, and whether the run scales its
    gradients by the 1 / N of ``mean``.

    The scale spares backward a pass over the gradients. fp16 has no range for it.
    """
    now = dataclasses.replace(spec, gradients=()) if spec.gradients_in_backward else spec
    wide = gradient_dtype(dtype) == dtype
    return now, spec.reduction == "mean" and bool(now.gradients) and wide


def backward(spec: Spec) -> Spec:
    """The spec of the run in backward. A run's spec names its outputs; its inputs show which
    incoming gradients exist."""
    return dataclasses.replace(spec, lse=False)


def of_rank(spec: Spec, group: str | None, row_groups: tuple[str, ...]) -> Spec:
    """The spec of one rank's operator call, for a loss over the shards of ``group`` and over the
    rows of ``row_groups``, whose ranks divide by the number of all rows."""
    if group is not None:
        return spec.of_shard()
    by_all = spec.reduction == "mean" and bool(row_groups)
    return dataclasses.replace(spec, reduction="sum") if by_all else spec


def launches(spec: Spec, operands: Operands, gpu: Gpu) -> tuple[Launch, ...]:
    """The kernels of one call, in order, where every output that is named has a gradient.

    Args:
        spec: the operator's.
        operands: those of the call; the scales of rows, which the operator adds, are not read.
        gpu: the device, which need not exist.
    """
    now, scaled = forward(spec, operands.x.dtype)
    found = for_call(now, operands._replace(row_scaled=scaled, lse_scaled=False), gpu)
    if spec.gradients and spec.gradients_in_backward:
        # a shard without targets has one output: the loss of its rows is their lse
        both = spec.lse and not (spec.shard_of and spec.target == "none")
        operands = operands._replace(row_scaled=True, lse_scaled=both)
        found += for_call(backward(spec), operands, gpu)
    return found


def launches_of_reductions(
    spec: Reductions, operands: OfReductions, gpu: Gpu
) -> tuple[Launch, ...]:
    """As :func:`launches`, of one call of ``fxpass::class_reductions``."""
    found = for_reductions(spec, operands, gpu)
    if spec.gradients and not spec.total:
        found += for_reductions(spec, operands, gpu, forward=False)
    return found
