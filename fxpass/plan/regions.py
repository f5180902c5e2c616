"""Plans the rows of a chunk of a loop over any function of rows, and the classes of its products.

In: the sizes of the loop's heads, and the bytes that one row takes. Out: a :class:`RegionPlan`
within the budget. Like :mod:`fxpass.plan.plan` it measures nothing, and runs at every call::

    >>> cpu, f32 = torch.device("cpu"), torch.float32
    >>> head = HeadSizes(256, 32000, f32, f32, False)
    >>> plan_region(2048, (head,), 3 * 4 * 32000, cpu)  # a row takes three times its logits
    RegionPlan(rows=256, classes=(32000,), scratch=98304000, sums=0, rounded=False)

The rules are those of :mod:`fxpass.plan.parts`: :func:`rows_of_chunk` and
:func:`classes_of_product`. The heads are computed one after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fxpass.formula.dtypes import compute_dtype
from fxpass.plan.budget import scratch_budget
from fxpass.plan.parts import (
    ALIGNMENT,
    LEAST,
    classes_of_product,
    few_part_size,
    part_size,
    rows_of_chunk,
)
from fxpass.plan.plan import CPU_TILE, FEW_BYTES, LEAST_ROWS, MOST_ROUNDED


class HeadSizes(NamedTuple):
    """A head of a loop: x ``[n, d]``, weight ``[v, d]``, and the dtypes of its products."""

    d: int
    v: int
    dtype: torch.dtype  # of the operands and the logits
    product_dtype: torch.dtype  # in which operands are multiplied
    trained: bool  # whether the run computes the weight's gradient
    unrounded: bool = False  # whether this gradient leaves in the dtype of its sums


class RegionPlan(NamedTuple):
    """How one loop over rows runs."""

    rows: int  # of a chunk
    classes: tuple[int, ...]  # of a product of each head
    scratch: int  # bytes allocated beside the results, at most
    sums: int  # bytes of the f32 sums of the weights' gradients, if several chunks need them
    rounded: bool = False  # whether a few chunks add these gradients up in bf16


def plan_region(
    n: int,
    heads: tuple[HeadSizes, ...],
    row_bytes: int,
    device: torch.device,
    memory_mb: int = 0,
    accumulate: str = "auto",
) -> RegionPlan:
    """The plan of a run over ``n`` rows.

    ``row_bytes`` are the bytes that a row of all heads' logits, their gradients and the temporaries
    of the function take at a time; ``memory_mb`` is the user's budget (0: the default);
    ``accumulate`` is as of :class:`fxpass.formula.reductions.Reductions`. The scratch is within the
    budget, unless the smallest chunk is larger, or few larger ones need no f32 sums."""
    n = max(1, n)
    by_user = bool(memory_mb)
    v = max(1, sum(head.v for head in heads))
    dtypes = [torch.float32, *(compute_dtype(head.dtype) for head in heads)]
    widest = max(dtypes, key=lambda dtype: dtype.itemsize)
    # a budget grows with the logits: here with all bytes of a row
    allowed = scratch_budget(n, max(v, row_bytes // widest.itemsize), widest, device, memory_mb)
    sums = sum(map(_sums, heads))
    # the user's budget includes the sums
    beside_sums = max(allowed // 4, allowed - sums * by_user)
    on_gpu = device.type == "cuda"  # its GEMMs add to f32 sums
    tiled = any(_in_tiles(head, several=not on_gpu) for head in heads)
    share = min(beside_sums // 4, CPU_TILE) if tiled else 0
    row = max(1, row_bytes + sum(map(_beside, heads)))
    most = (beside_sums - share) // row
    if on_gpu and not by_user:  # a quarter of the rows, but enough for its GEMMs
        most = min(most, max(few_part_size(n), FEW_BYTES // row))
    implementation = "triton" if on_gpu else "aten"
    least = LEAST if on_gpu else LEAST_ROWS
    rows = rows_of_chunk(n, v, row, most, sums, implementation, least)
    in_bf16 = all(head.dtype == torch.bfloat16 for head in heads if _sums(head))
    if on_gpu and sums and rows < n and accumulate == "auto" and in_bf16 and not tiled:
        few = allowed // row if by_user else max(few_part_size(n), FEW_BYTES // row)
        larger = part_size(n, max(few, LEAST), ALIGNMENT["triton"])
        gradients = sum(h.v * h.d * h.dtype.itemsize for h in heads if _sums(h))
        bytes_in_f32 = sums + max(rows * row, gradients)
        fits = n <= MOST_ROUNDED * larger if by_user else larger * row + gradients <= bytes_in_f32
        if fits:
            return RegionPlan(larger, tuple(h.v for h in heads), larger * row, 0, larger < n)
    classes = tuple(_classes(head, rows, share, rows < n and not on_gpu) for head in heads)
    each = zip(classes, heads, strict=True)
    tiles = max((c * _column(h, rows) * (c < h.v) for c, h in each), default=0)
    return RegionPlan(rows, classes, rows * row + tiles, sums if rows < n else 0)


def _casts(head: HeadSizes) -> bool:
    return head.product_dtype != head.dtype


def _added(head: HeadSizes) -> int:
    """Bytes of the f32 sums of the weight's gradient, if products are narrower."""
    itemsize = compute_dtype(head.dtype).itemsize
    return head.v * head.d * itemsize if head.trained and head.dtype.itemsize < itemsize else 0


def _sums(head: HeadSizes) -> int:
    """Bytes of these sums, if the returned gradient is narrower."""
    return 0 if head.unrounded else _added(head)


def _beside(head: HeadSizes) -> int:
    """Bytes that a row takes beside its logits: the cast of x, the wide sum of its gradient."""
    return 2 * head.d * head.product_dtype.itemsize if _casts(head) else 0


def _in_tiles(head: HeadSizes, several: bool) -> bool:
    """Tells if products have some classes at a time: their operands are cast, or ``several`` of
    them are added to a wider sum."""
    return _casts(head) or (several and _added(head) > 0)


def _column(head: HeadSizes, rows: int) -> int:
    """Bytes of a class of a product: the cast logits and weight, the product of its gradient."""
    return head.product_dtype.itemsize * (
        rows * _casts(head) + head.d * (_casts(head) + head.trained)
    )


def _classes(head: HeadSizes, rows: int, share: int, several: bool) -> int:
    if not _in_tiles(head, several):
        return head.v
    return classes_of_product(head.v, max(1, head.d), rows, _column(head, rows), share)
