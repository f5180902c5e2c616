"""Plans of row regions for every size: within the budget, in parts that are worth their overhead."""

from __future__ import annotations

import itertools

import pytest
import torch

from fxpass.plan.budget import CPU_LEAST, MIB, scratch_budget
from fxpass.plan.parts import EFFICIENT
from fxpass.plan.plan import LEAST_ROWS
from fxpass.plan.regions import HeadSizes, plan_region
from tests.support.gpus import H100
from tests.support.planned import BF16, CPU, CUDA, F32, F64

F16 = torch.float16
LLAMA = HeadSizes(4096, 128256, BF16, BF16, True)


def logits(*heads: HeadSizes) -> int:
    """Bytes of a row of logits."""
    return sum(head.v * head.dtype.itemsize for head in heads)


@pytest.mark.parametrize(
    ("multiplied", "dtype"), [(F32, F32), (F64, F64), (BF16, BF16), (F32, BF16), (F32, F16)]
)
@pytest.mark.parametrize("memory_mb", [0, 64])
def test_scratch_is_within_the_budget(dtype, multiplied, memory_mb):
    """But for the smallest chunk."""
    sizes = itertools.product(
        (1, 100, 4096, 10**6), (1, 64, 4096), (2, 1000, 128256), (1, 2), (2, 8)
    )
    for n, d, v, count, buffers in sizes:
        heads = (HeadSizes(d, v, dtype, multiplied, True),) * count
        row = buffers * logits(*heads)
        found = plan_region(n, heads, row, CPU, memory_mb)
        widest = F64 if dtype == F64 else F32
        allowed = scratch_budget(n, max(v * count, row // widest.itemsize), widest, CPU, memory_mb)
        # one chunk may take the memory of the sums
        sums = count * v * d * 4 if dtype.itemsize == 2 else 0
        smallest = 2 * max(LEAST_ROWS, 2**14 // v) * (row + 2 * d * 4 * count)
        tile = max(CPU_LEAST, 2**18 * 16)
        limit = allowed if found.rows < n else allowed + sums
        assert found.scratch <= max(limit, smallest + tile), (n, d, v, count, buffers)
        assert 1 <= found.rows <= n
        assert all(1 <= classes <= v for classes in found.classes)


def test_few_rows_are_one_chunk():
    head = HeadSizes(256, 1000, F32, F32, True)
    assert plan_region(100, (head,), 3 * logits(head), CPU).rows == 100
    assert plan_region(0, (head,), 3 * logits(head), CPU).rows == 1


def test_many_rows_of_few_classes_are_many_at_a_time():
    head = HeadSizes(64, 2, F32, F32, True)
    assert plan_region(10**6, (head,), 2 * logits(head), CPU).rows >= 2**13


def test_all_rows_where_sums_would_take_as_much():
    """A weight's gradient in f32 takes 4 * V * D bytes: as many rows of logits may exist."""
    head = HeadSizes(2048, 32000, BF16, BF16, True)
    frozen = head._replace(trained=False)
    assert plan_region(1024, (head,), 4 * logits(head), CPU).rows == 1024
    found = plan_region(1024, (frozen,), 4 * logits(head), CPU)
    assert (found.rows < 1024, found.sums) == (True, 0)
    found = plan_region(4096, (head,), 4 * logits(head), CPU)
    assert (found.rows < 4096, found.sums) == (True, 4 * 32000 * 2048)


def test_the_more_a_row_needs_the_fewer_rows():
    head = HeadSizes(256, 32000, F32, F32, True)
    rows = [plan_region(4096, (head,), k * logits(head), CPU, 64).rows for k in (1, 2, 4, 8)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > rows[-1]


def test_chunks_are_equal():
    head = HeadSizes(256, 32000, F32, F32, True)
    found = plan_region(1000, (head,), 4 * logits(head), CPU)
    count = -(-1000 // found.rows)
    assert found.rows % 16 == 0
    assert found.rows * count - 1000 < 16 * count


def test_casts_and_sums_take_some_classes_at_a_time():
    """A product of a cast weight, and one that is added to an f32 sum."""
    native, cast = HeadSizes(512, 128256, BF16, BF16, True), HeadSizes(512, 128256, BF16, F32, True)
    for head in (native, cast):
        found = plan_region(4096, (head,), 4 * logits(head), CPU)
        assert found.classes[0] < head.v
    assert plan_region(64, (native,), 4 * logits(native), CPU).classes == (128256,)
    exact = HeadSizes(512, 128256, F32, F32, True)
    assert plan_region(4096, (exact,), 4 * logits(exact), CPU).classes == (128256,)


@pytest.mark.parametrize("heads", [1, 2])
def test_few_chunks_of_a_gpu_round_their_sums(gpus, heads):
    """Where that takes no more memory than f32 sums; within the user's budget up to six chunks."""
    gpus.have(H100)
    every = (LLAMA, *[LLAMA._replace(trained=False)] * (heads - 1))
    of_row = 2 * logits(*every)
    found = plan_region(8192, every, of_row, CUDA)
    assert (found.rounded, found.sums, found.rows) == (True, 0, 8192 // 4)
    wide = plan_region(8192, every, of_row, CUDA, accumulate="float32")
    assert not wide.rounded
    gradient = 2 * LLAMA.d * LLAMA.v
    assert found.scratch + gradient <= wide.sums + max(wide.scratch, gradient)
    assert not plan_region(8192, every, of_row, CUDA, 256).rounded
    assert plan_region(8192, every, of_row, CUDA, 1024 * heads).rounded
    assert not plan_region(2048, every, of_row, CUDA).rounded  # one chunk
    thin = tuple(head._replace(d=8) for head in every)
    assert plan_region(512, thin, of_row, CUDA, 32 * heads).scratch <= 32 * heads * MIB
    half = [head._replace(dtype=F16, product_dtype=F16) for head in every]
    assert not plan_region(8192, tuple(half), of_row, CUDA).rounded  # sums in fp16 may overflow
    master = LLAMA._replace(unrounded=True)
    assert not plan_region(8192, (master,), of_row, CUDA).rounded


def test_chunks_of_a_gpu(gpus):
    gpus.have(H100)
    found = plan_region(32768, (LLAMA,), 2 * logits(LLAMA), CUDA)
    assert EFFICIENT <= found.rows <= 32768 // 4
    assert found.scratch <= scratch_budget(32768, LLAMA.v, F32, CUDA, 0) == 1024 * MIB
    assert found.classes == (LLAMA.v,)  # its GEMMs add to sums
    # the user's budget includes the sums, but leaves a quarter for chunks
    assert plan_region(32768, (LLAMA,), 2 * logits(LLAMA), CUDA, 1024).scratch <= 256 * MIB
    frozen = LLAMA._replace(trained=False)
    assert plan_region(16384, (frozen,), 2 * logits(LLAMA), CUDA).rows == EFFICIENT
    small = HeadSizes(1024, 1000, BF16, BF16, False)
    assert plan_region(32768, (small,), 2 * logits(small), CUDA).rows == 32768 // 2
