"""The sums of a fingerprint on a GPU, in one kernel.

In: integers with up to three dimensions and any strides, and factors. Out: the sums that
:mod:`fxpass.op.fingerprint` computes in ATen, bit for bit::

    sums(bits, factors)  # [2, 5000] int16 and factors [2, 1024]: five sums of each row
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # of a program, 16 in each thread
WARPS = 8


@triton.jit
def weighted_sums(
    bits,
    factors,
    out,
    count,
    pieces,
    rows,
    columns,
    outer_stride,
    row_stride,
    stride,
    BLOCK: tl.constexpr,
    SUMS: tl.constexpr,
):
    """``SUMS`` sums of up to ``BLOCK`` elements; each of ``rows`` rows has ``pieces`` sums."""
    number = tl.program_id(0).to(tl.int64) * SUMS + tl.arange(0, SUMS)  # every address is an int64
    row = number // pieces
    start = row // rows * outer_stride + row % rows * row_stride
    within = tl.arange(0, BLOCK)
    column = (number % pieces * BLOCK)[:, None] + within[None, :]
    there = (number < count)[:, None] & (column < columns)
    words = tl.load(bits + start[:, None] + column * stride, mask=there, other=0).to(tl.int64)
    low = tl.load(factors + within)[None, :]
    high = tl.load(factors + BLOCK + within)[None, :]
    tl.store(out + number, tl.sum(words * low + (words >> 32) * high, 1), mask=number < count)


def sums(bits: Tensor, factors: Tensor) -> Tensor:
    """The weighted sum of each ``block`` integers of the last dimension, the last of fewer; int64
    ``[sums]``.

    Args:
        bits: integers of 8 (unsigned) to 64 bits, ``[columns]``, ``[rows, columns]`` or ``[outer,
            rows, columns]``, not empty, on the current device.
        factors: int64 ``[2, block]``, contiguous.
    """
    bits = bits[(None,) * (3 - bits.dim())]
    outer, rows, columns = bits.shape
    block = factors.shape[1]
    pieces = -(-columns // block)
    sums_of_program = ELEMENTS // block
    out = factors.new_empty(outer * rows * pieces)
    outer_stride, row_stride, stride = bits.stride()
    launch: Any = weighted_sums[(-(-len(out) // sums_of_program),)]
    launch(
        bits,
        factors,
        out,
        count=len(out),
        pieces=pieces,
        rows=rows,
        columns=columns,
        outer_stride=outer_stride,
        row_stride=row_stride,
        stride=stride,
        BLOCK=block,
        SUMS=sums_of_program,
        num_warps=WARPS,
    )
    return out
