"""Reductions over all rows that chunks of rows merge: maxima, their places, sums of exponentials.

In: the reduction of the rows so far, and that of a chunk. Out: the former, with the chunk::

    >>> total = torch.tensor([[3.0, 1.0], [0.0, 1.0]])  # maxima of two columns, and their rows
    >>> MERGES["argmax"](total, torch.tensor([[2.0, 5.0], [0.0, 1.0]]), 4)
    >>> total.tolist()
    [[3.0, 5.0], [0.0, 5.0]]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Merge = Callable[[Tensor, Tensor, int], None]


def _merged(function: Callable[..., Tensor]) -> Merge:
    """The merge by a function of two tensors."""

    def merge(total: Tensor, chunk: Tensor, _: int) -> None:
        total.copy_(function(total, chunk.to(total.dtype)))

    return merge


def _merged_places(is_better: Callable[[Tensor, Tensor], Tensor]) -> Merge:
    """The merge of values and their rows, ``[2, ...]``: of equal values the first stays."""

    def merge(total: Tensor, chunk: Tensor, start: int) -> None:
        value, row = chunk
        best = total[0]
        better = is_better(value, best) | (value.isnan() & ~best.isnan())
        total.copy_(torch.where(better, torch.stack([value, row + start]), total))

    return merge


def _merge_exponentials(total: Tensor, chunk: Tensor, _: int) -> None:
    """Merges maxima, and sums of the exponentials of what is less than them: ``[2, ...]``."""
    states = total, chunk.to(total.dtype)
    largest = torch.maximum(total[0], chunk[0])
    # a column of -inf alone has the sum 0
    sums = (
        state[1] * torch.where(state[0] == largest, 1.0, (state[0] - largest).exp())
        for state in states
    )
    total.copy_(torch.stack([largest, sum(sums)]))  # pyright: ignore


# In: the total, which is changed; the result of a chunk; the number of the chunk's first row.
MERGES: dict[str, Merge] = {
    "amax": _merged(torch.maximum),
    "amin": _merged(torch.minimum),
    "any": _merged(torch.logical_or),
    "all": _merged(torch.logical_and),
    "exponentials": _merge_exponentials,
    "argmax": _merged_places(torch.gt),
    "argmin": _merged_places(torch.lt),
}


def merged_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a reduction is merged: sums round at each merge."""
    return torch.float64 if name == "exponentials" else dtype
