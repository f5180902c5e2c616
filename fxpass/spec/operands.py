"""The tensors that one run of a fused loss reads and returns, and the rows that count.

In: the operands of a call. Out: records, whose fields are None where a call has no such tensor::

    >>> Inputs(torch.ones(4, 8), torch.ones(9, 8), None, torch.tensor([1, 2, -100, 3])).logits
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fxpass.spec.spec import Spec


class Inputs(NamedTuple):
    """The tensors of one fused loss.

    Attributes:
        x: ``[N, D]``.
        weight: ``[V, D]``, dtype of x.
        bias: ``[V]`` in the dtype of x or in the compute dtype, or None; a wider bias is added in
            the compute dtype.
        target: class indices ``[N]`` int64, class probabilities ``[N, V]``, or None.
        class_weight: ``[V]`` or None.
        logits: ``[N, V]`` if they exist already.
        row_scale: incoming gradients of the row losses, ``[N]``; None for ones.
        lse_scale: incoming gradients of the lse, ``[N]``; None for zeros.
        lse, lse_rest: ``[N]`` in the compute dtype, as forward returned them.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    class_weight: Tensor | None = None
    logits: Tensor | None = None
    row_scale: Tensor | None = None
    lse_scale: Tensor | None = None
    lse: Tensor | None = None
    lse_rest: Tensor | None = None


class Results(NamedTuple):
    """The outputs that the spec asks for.

    Attributes:
        loss, lse: ``[N]`` in the compute dtype.
        x, weight, bias: gradients, in the dtype of their operand or in the compute dtype.
        lse_rest: ``[N]``, the rounding error of lse; for ``tiled`` only.
    """

    loss: Tensor | None = None
    lse: Tensor | None = None
    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    lse_rest: Tensor | None = None


def is_valid(target: Tensor, spec: Spec) -> Tensor:
    """A mask ``[rows]``: False where a class index ``[rows]`` int64 is ``ignore_index``."""
    if spec.ignore_index is None:
        return torch.ones_like(target, dtype=torch.bool)
    return target != spec.ignore_index
