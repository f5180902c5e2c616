"""The shards of a head's classes on the ranks."""

from __future__ import annotations


def class_shard(classes: int, ranks: int, rank: int) -> tuple[int, int]:
    """A rank's first class and its number of classes, as ``torch.chunk`` divides them.

    >>> [class_shard(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-classes // ranks)
    first = min(rank * step, classes)
    return first, min(classes, first + step) - first
