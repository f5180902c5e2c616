"""Reductions over rows, merged over chunks, against torch on all rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fxpass.op.rows import rows
from fxpass.region.merging import MERGES, merged_dtype
from fxpass.rows.columns import exponentials
from tests.fuzz.small import small

N = 12
INF, NAN = math.inf, math.nan
# Columns, with what a chunk of rows may have alone.
COLUMNS = {
    "plain": [0.3, -1.0, 2.5, 0.1, 7.0, -3.0, 0.5, 1.5, -0.2, 0.9, 4.0, -8.0],
    "-inf alone": [-INF] * N,
    "-inf first": [-INF] * 7 + [1.0, 2.0, -3.0, 0.5, 1.0],
    "-inf last": [1.0, 2.0, -3.0, 0.5, 1.0] + [-INF] * 7,
    "inf": [1.0] * 5 + [INF] + [2.0] * 6,
    "two infs, and -inf": [-INF] * 3 + [INF] + [2.0] * 6 + [INF, -INF],
    "nan first": [NAN] + [5.0] * 11,
    "two nans": [5.0] * 4 + [NAN, 9.0, 1.0, INF, NAN, 3.0, 2.0, -INF],
    "ties": [1.0, 4.0, 0.0, 4.0, -9.0, -9.0, 4.0, 1.0, 4.0, -9.0, 2.0, 4.0],
    "one number": [3.0] * N,
    "large": [3e4, -3e4, 3e4, 0.0, 1.0, 3e4 - 1, -2.0, 5.0, 3e4, 7.0, -1.0, 0.5],
    "none": [0.0] * N,
    "one": [0.0] * 9 + [1.0] + [0.0] * 2,
}


class Reduction(NamedTuple):
    """The reduction of a chunk; the result from what is merged; and torch's."""

    of_chunk: Callable[[Tensor], Tensor]
    of_all: Callable[[Tensor], Tensor]
    finished: Callable[[Tensor], Tensor] = lambda total: total


def log_sum(state: Tensor) -> Tensor:
    largest, total = state
    return torch.where(largest == INF, INF, largest + total.log())


def place(extreme: Callable[..., Tensor], places: Callable[..., Tensor]) -> Reduction:
    return Reduction(
        lambda z: torch.stack([extreme(z, 0).double(), places(z, 0).double()]),
        lambda z: places(z, 0),
        lambda total: total[1].long(),
    )


REDUCTIONS = {
    "amax": Reduction(lambda z: z.amax(0), lambda z: z.amax(0)),
    "amin": Reduction(lambda z: z.amin(0), lambda z: z.amin(0)),
    "any": Reduction(lambda z: (z != 0).any(0), lambda z: (z != 0).any(0)),
    "all": Reduction(lambda z: (z != 0).all(0), lambda z: (z != 0).all(0)),
    "exponentials": Reduction(
        lambda z: exponentials(z, 0)[:, 0], lambda z: z.logsumexp(0), log_sum
    ),
    "argmax": place(torch.amax, torch.argmax),
    "argmin": place(torch.amin, torch.argmin),
}


def test_these_are_all():
    assert REDUCTIONS.keys() == MERGES.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_random_chunks(name, dtype):
    reduction, random = REDUCTIONS[name], torch.Generator().manual_seed(0)
    z = torch.tensor(list(COLUMNS.values())).t().to(dtype)
    wanted = reduction.of_all(z.float() if dtype == torch.bfloat16 else z)
    for _ in range(40):
        cuts = torch.rand(N - 1, generator=random) < torch.rand((), generator=random)
        starts = [0, *(cuts.nonzero().flatten() + 1).tolist(), N]
        chunks = [(reduction.of_chunk(z[a:b]), a) for a, b in itertools.pairwise(starts)]
        (first, _), *others = chunks
        total = first.to(merged_dtype(name, first.dtype))
        for chunk, start in others:
            MERGES[name](total, chunk, start)
        got = reduction.finished(total).to(wanted.dtype)
        torch.testing.assert_close(got, wanted, equal_nan=True)


TEXT = """rows rows=0 sums=0 wide= memory_mb=0 compiled=0 merge=1:amax,2:all,3:any
%0 = input float32[n, 2]
%1 = input float32[2, 9]
%2 = aten.mm.default(%0, %1)
%3 = aten.sum.dim_IntList(%2, [0])
%4 = aten.amax.default(%2, [0])
%5 = aten.lt.Scalar(%2, 0)
%6 = aten.all.dims(%5, [0])
%7 = aten.any.dims(%5, [0])
return %3, %4, %6, %7"""


@pytest.mark.parametrize("n", [1, 2, 23])
def test_a_loop(n):
    x, w = torch.randn(n, 2), torch.randn(2, 9)
    z = x @ w
    with small():
        got = rows([x, w], TEXT)
    torch.testing.assert_close(got, [z.sum(0), z.amax(0), (z < 0).all(0), (z < 0).any(0)])


def test_a_loop_without_rows():
    """As in eager: all of no rows, none of them; they have no maximum."""
    x, w = torch.randn(0, 2), torch.randn(2, 9)
    text = (
        TEXT.replace("1:amax,", "")
        .replace("%3, %4, %6", "%3, %3, %6")
        .replace("sums=0", "sums=0,1")
    )
    total, _, every, some = rows([x, w], text)
    assert (total.tolist(), every.tolist(), some.tolist()) == ([0.0] * 9, [True] * 9, [False] * 9)
    with pytest.raises(IndexError, match="non-zero size"):
        rows([x, w], TEXT)
