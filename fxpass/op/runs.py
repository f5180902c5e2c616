"""What one call of an operator computes in forward and in backward, and with which Triton kernels.

In: the operator's spec. Out: the specs of its runs, or the launches of all of them::

    >>> forward(Spec(reduction="none", gradients=("x",)), torch.float32)
    (Spec(reduction='none', ...gradients=()...), False)
"""

from __future__ import annotations

import dataclasses

import torch

from fxpass.kernels.call import Gpu, Launch, OfReductions, for_reductions
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


def launches_of_reductions(
    spec: Reductions, operands: OfReductions, gpu: Gpu
) -> tuple[Launch, ...]:
    """The kernels of one call of ``fxpass::class_reductions``, in order, on a GPU, which need not
    exist."""
    found = for_reductions(spec, operands, gpu)
    if spec.gradients and not spec.total:
        found += for_reductions(spec, operands, gpu, forward=False)
    return found
