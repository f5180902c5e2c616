"""Products of the ATen implementation, in the dtype that the device multiplies fastest.

In: operands in their own dtype. Out: products, rounded as that dtype rounds them, and sums of
several products in the dtype of what they are added to.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements that are widened at a time, while they are in the caches.
_ADDED_AT_A_TIME = 1 << 18


class Rows:
    """Rows of an operand in the dtype that they are multiplied in: themselves, or copies in one
    place. (New copies would leave holes of unlike sizes between them.)"""

    def __init__(self, operand: Tensor, most: int, dtype: torch.dtype) -> None:
        self._operand, self._place = operand, None
        if operand.dtype != dtype:
            self._place = operand.new_empty((most, operand.shape[1]), dtype=dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        """``[rows, D]``; valid until the next call."""
        some = self._operand[rows]
        return some if self._place is None else self._place[: some.shape[0]].copy_(some)


def add_product(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """``out = a @ b``, or ``out +=``; what is there is not read where nothing is added."""
    if add and out.dtype == a.dtype:
        out.addmm_(a, b)
    elif add:  # a sum of 16-bit products is wider than they are
        _add(out, a @ b)
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _add(out: Tensor, narrow: Tensor) -> None:
    """``out += narrow``, some rows at a time: torch widens a whole operand before it adds it."""
    rows = max(1, _ADDED_AT_A_TIME // max(1, out.shape[1]))
    for some, more in zip(out.split(rows), narrow.split(rows), strict=True):
        some.add_(more)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``x @ weight.T + bias`` in ``out``; all of one dtype, in which the sum is rounded once."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def split_bias(bias: Tensor | None, stored: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The bias that is a part of logits stored in a dtype, and the wider one that is added later;
    None for what there is not."""
    if bias is None or bias.dtype == stored:
        return bias, None
    return None, bias
