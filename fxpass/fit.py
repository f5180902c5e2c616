"""How many rows and classes at a time: what fits into a budget and takes the least time.

In: a lowering, a strategy, the work and the bytes that it may take. Out: rows and classes::

    >>> work = Work(n=4096, d=4096, v=128256, e=2, a=4, gx=1, gw=1)
    >>> fit("triton", "chunked", work, 1024 * MIB, "cuda")
    (4096, 8192)

The model of :mod:`fxpass.cost` is evaluated at the rates of a typical device, never at measured
ones: the same sizes give the same chunks, and the same bits, on every machine and in every process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from fxpass import cost
from fxpass.cost import Work
from fxpass.rates import nominal

# Rows and classes come in multiples of what GEMM kernels work on at a time.
ALIGNMENT = {"cuda": 64}
CPU_ALIGNMENT = 16
# Up-cast classes beyond this many make no product faster.
MOST_CLASSES = 8192
# Less scratch is taken where the model says that it costs no more time than this.
SLACK = {"cuda": 1.01}
CPU_SLACK = 1.03
# A tile of logits that no gradient is taken of is all that a run needs beside its inputs. On CPUs
# saving it is worth a little more, and it is looked for in smaller steps and down to what stays in
# the caches: budgets grow with the rows of logits, a tile that is large enough does not. (From 8 to
# 3 MiB of scratch cost 3 % of the time on two cores with 1 MiB of L2 cache each.)
TILE_SLACK = 1.04


def fit(
    lowering: str, strategy: str, work: Work, allowed: int, device_type: str
) -> tuple[int, int]:
    """Rows and classes at a time: the least scratch that is about as fast as the fastest within
    ``allowed`` bytes; the smallest possible where none fits."""
    # batches of varying length share what was found for one that is slightly longer
    step = 1 << max(0, work.n.bit_length() - 5)
    longer = work._replace(n=-(-work.n // step) * step)
    rows, classes = _fit(lowering, strategy, longer, allowed, device_type)
    return _aligned(rows, work.n, ALIGNMENT.get(device_type, CPU_ALIGNMENT)), classes


@functools.lru_cache(maxsize=4096)
def _fit(
    lowering: str, strategy: str, work: Work, allowed: int, device_type: str
) -> tuple[int, int]:
    typical = nominal(device_type)
    found = []
    for rows, classes in _candidates(lowering, strategy, work, allowed, device_type):
        taken = cost.scratch(lowering, strategy, work, rows, classes)
        if taken <= allowed:
            seconds = cost.seconds(lowering, strategy, work, rows, classes, typical)
            found.append((taken, seconds, rows, classes))
    if not found:
        return (work.n if (lowering, strategy) == ("triton", "tiled") else 1), 1
    slack = TILE_SLACK if _only_a_tile(strategy, work, device_type) else CPU_SLACK
    limit = SLACK.get(device_type, slack) * min(seconds for _, seconds, *_ in found)
    _, _, rows, classes = min(each for each in found if each[1] <= limit)
    return rows, classes


def _only_a_tile(strategy: str, work: Work, device_type: str) -> bool:
    """Whether a tile of logits is about all that is allocated; GPUs keep to their own rules."""
    return strategy == "tiled" and not (work.gx or work.gw or work.gb) and device_type not in SLACK


def _candidates(
    lowering: str, strategy: str, work: Work, allowed: int, device_type: str
) -> Iterator[tuple[int, int]]:
    """Pairs of rows and classes that fill the budget, or half of it, or a quarter ...; a tile
    without gradients also three quarters of each.

    Scratch is affine in the classes, and in the rows in two pieces; more of either never takes
    longer. So for every number of the one the best of the other is what the budget leaves.
    """
    align = ALIGNMENT.get(device_type, CPU_ALIGNMENT)

    def taken(rows: int, classes: int) -> int:
        return cost.scratch(lowering, strategy, work, rows, classes)

    halves, quarters = 5, (4,)
    if _only_a_tile(strategy, work, device_type):
        halves, quarters = max(5, (allowed // cost.BLOCK_BYTES).bit_length()), (4, 3)
    for within in (allowed * part // (4 << shift) for shift in range(halves) for part in quarters):
        if strategy == "chunked":
            up_cast = min(work.v, MOST_CLASSES)
            for classes in {max(1, up_cast >> shift) for shift in _SHIFTS[: 1 + 7 * work.up]}:
                for at in (1, work.n):  # few rows hold no whole block of temporaries
                    each = taken(at + 1, classes) - taken(at, classes)
                    most = at + (within - taken(at, classes)) // each
                    yield _floor(most, work.n, align), classes
        else:
            for blocks in _BLOCKS if lowering == "aten" else (1,):
                rows = _parts(work.n, blocks, align)
                fixed = taken(rows, 0)
                yield rows, _left(within - fixed, taken(rows, 1) - fixed, work.v, align)


_SHIFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 13)
_BLOCKS = (1, 2, 4, 8, 16, 64, 256)


def _left(left: int, each: int, total: int, align: int) -> int:
    """How many that take ``each`` bytes there can be in those that are left, in equal parts."""
    return _aligned(left // each, total, align) if each else total


def _floor(most: int, total: int, align: int) -> int:
    """At most ``most`` (at least 1) of ``total``, in multiples of ``align`` where one fits."""
    if most >= total:
        return total
    return most - most % align if most >= align else max(1, most)


def _aligned(most: int, total: int, align: int) -> int:
    """Equal parts of ``total``, each at most ``most`` (at least 1), in multiples of ``align`` where
    that many fit: the last part is then not much smaller than the others."""
    most = _floor(most, total, align)
    return most if most == total or most < align else _parts(total, -(-total // most), align)


def _parts(total: int, parts: int, align: int) -> int:
    """The size of so many equal parts of ``total``, in multiples of ``align``."""
    return min(total, -(-total // (parts * align)) * align)
