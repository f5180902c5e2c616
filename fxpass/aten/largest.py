"""The largest logit of each row, and its class.

In: logits ``[rows, classes]``. Out: columns ``[rows, 1]``. On a CPU, ``torch.max`` over a dimension
takes nine times as long as ``amax``, because it compares one element at a time to find the index.
So the largest logit of each ``BLOCK`` classes comes first, and the class is searched in one block::

    >>> logit, index = largest(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]))
    >>> logit.flatten().tolist(), index.flatten().tolist()
    ([3.0, 2.0], [1, 0])
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
LEAST = 8 * BLOCK  # classes that are worth several operations


def largest(z: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logits and their first classes; nan is larger than all numbers."""
    whole = z.shape[1] // BLOCK * BLOCK
    if not z.is_cpu or whole < LEAST:
        highest, index = z.max(1, True)
        return highest, index
    blocks = z[:, :whole].unflatten(1, (-1, BLOCK))
    highest, block = blocks.amax(2).max(1, True)
    rows = torch.arange(z.shape[0], device="cpu")
    index = blocks[rows, block.squeeze(1)].argmax(1, True) + block * BLOCK
    if whole == z.shape[1]:
        return highest, index
    return larger(highest, index, *z[:, whole:].max(1, True), whole)


def larger(
    before: Tensor, of_before: Tensor, after: Tensor, of_after: Tensor, start: int
) -> tuple[Tensor, Tensor]:
    """The larger logits of two columns and their classes, the first of equal logits; the classes
    ``of_after`` count from ``start``."""
    later = (after > before) | (after.isnan() & ~before.isnan())
    return torch.maximum(before, after), torch.where(later, of_after + start, of_before)
