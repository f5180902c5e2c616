"""Sizes of the parts in which logits are computed: rows of a chunk, classes of a tile.

In: the size of the whole, and the size that fits into a budget. Out: the size of a part::

    >>> part_size(1000, most=300, align=16), few_part_size(16384), padded(50257)
    (256, 4096, 50272)
"""

from __future__ import annotations

# Minimum sizes that are worth the overhead of an operation: elements of a block of logits,
# elements of an operand, rows or classes of a tile.
BLOCK = 1 << 14
OPERAND = 1 << 18
LEAST = 64
# Parts of a GPU's logits by default, and the rows (or classes) that keep its GEMMs efficient. On an
# H100, 4 chunks of 2048 x 128256 logits take 1.03 of the time of one chunk, and half of its memory.
FEW = 4
EFFICIENT = 2048
# Rows and classes are multiples of the GEMM kernels' tile sizes.
ALIGNMENT = {"aten": 16, "triton": 64}
# The Triton kernels pad a row of logits to a multiple of this many elements: a mask that ends
# inside a vector splits its load and store into single elements.
PADDING = 16


def rows_of_chunk(
    n: int, v: int, row: int, most: int, sums: int, implementation: str, least: int
) -> int:
    """The rows of a chunk of ``n`` rows and ``v`` classes.

    Equal chunks of at most ``most`` rows, but not below the minimum ``least``. All rows, if they
    take no more memory than ``most`` rows and the ``sums``. A row takes ``row`` bytes."""
    if n * row <= most * row + sums:
        return n
    return part_size(n, max(most, least, BLOCK // v), ALIGNMENT[implementation])


def classes_of_product(v: int, d: int, rows: int, column: int, share: int) -> int:
    """The classes of one product with a chunk of ``rows`` rows, where operands are cast or products
    added to a wider sum: a class takes ``column`` bytes of the ``share``."""
    return part_size(v, max(share // max(1, column), least_of_tile(rows, d)), ALIGNMENT["aten"])


def few_part_size(total: int) -> int:
    """The rows (or classes) of each of a few parts that keep GEMMs efficient."""
    return -(-total // max(1, min(FEW, total // EFFICIENT)))


def padded(classes: int) -> int:
    """The elements from one row of padded logits to the next."""
    return -(-classes // PADDING) * PADDING


def least_of_tile(others: int, d: int) -> int:
    """The minimum of a tile's rows (or classes), for ``others`` classes (or rows)."""
    return max(LEAST, min(BLOCK // others, OPERAND // d))


def part_size(total: int, most: int, align: int) -> int:
    """The size of the parts if ``total`` is divided evenly into parts of at most ``most``.

    ``most`` is at least 1. The size is a multiple of ``align`` if ``most`` allows one; the last
    part may be smaller."""
    if most >= total:
        return total
    if most < align:
        return most
    most -= most % align
    even = -(-total // -(-total // most))
    return min(most, -(-even // align) * align)
