"""Leaves rows that add nothing out of all products.

In: the operands of a call, and which of its rows add something: those with a coefficient of a total
or with an incoming gradient. Out: the operands of these rows, and afterwards gradients for all
rows. Padding and prompts are often more than half of a batch, and an ignored row would cost as many
operations as any other row. A row that is left out does not change the gradients if it holds nan or
inf. Eager multiplies it by 0 and gets nan gradients; so does a call that leaves no rows out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.spec.operands import Operands

# The minimum share of rows left out that is worth the copies of x and of its gradient; and one more
# product of the others, where backward takes three.
WORTH_COPIES, WORTH_A_PRODUCT = 1 / 16, 1 / 3
# Operations of a head's three products that are worth a wait for the mask. An H200 is idle for 0.2
# ms then, and computes these in 6 ms.
WORTH_A_WAIT = 4e12


def selected(values: Tensor, least: float, operands: Operands) -> Tensor | None:
    """The indices of the rows that have a value other than 0 in ``[R, N]``; None if fewer than this
    share of rows is left out. Also None on a GPU, which has to wait for the values, if the products
    are small, and while a CUDA graph is captured, which must not depend on values."""
    if values.is_cuda:
        operations = 6.0 * operands.x.numel() * len(operands.weight)
        if operations < WORTH_A_WAIT or torch.cuda.is_current_stream_capturing():
            return None
    index, n = values.any(0).nonzero(), values.shape[1]
    return index.squeeze(1) if n - index.shape[0] > n * least else None


def rows_of(operands: Operands, index: Tensor) -> Operands:
    """The operands of some rows."""
    return operands._replace(
        x=operands.x[index],
        scale=None if operands.scale is None else operands.scale[index],
        picks=None if operands.picks is None else operands.picks[index],
        given=tuple(t if t.dim() == 1 else _rows(t, index) for t in operands.given),
    )


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """Some rows of ``[N, V]``; one value of each row remains one that is expanded."""
    alike = values.stride(1) == 0
    return values[:, :1][index].expand(-1, values.shape[1]) if alike else values[index]


def of_all_rows(grads: dict[str, Tensor], operands: Operands, index: Tensor) -> dict[str, Tensor]:
    """The gradients with zeros in the rows that were left out."""
    per_row = {"x", "scale", *(f"given{i}" for i, t in enumerate(operands.given) if t.dim() == 2)}
    n = operands.x.shape[0]
    return {
        name: t.new_zeros(n, *t.shape[1:]).index_copy_(0, index, t) if name in per_row else t
        for name, t in grads.items()
    }
