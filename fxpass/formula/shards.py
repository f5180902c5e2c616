"""The classes of a head, as they are divided over ranks."""

from __future__ import annotations


def dealt(classes: int, ranks: int, rank: int) -> tuple[int, int]:
    """A rank's first class and its number of classes, divided as by ``torch.chunk``.

    >>> [dealt(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-classes // ranks)
    first = min(rank * step, classes)
    return first, min(classes, first + step) - first
