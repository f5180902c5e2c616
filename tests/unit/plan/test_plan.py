"""Which implementation runs where, the budget, and plans for every size."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxpass.formula import expression
from fxpass.formula.outputs import Moment
from fxpass.formula.reductions import Reductions
from fxpass.plan import devices
from fxpass.plan import plan as plans
from fxpass.plan.budget import (
    CPU_BUDGET,
    CPU_LEAST,
    CPU_PARTS,
    GPU_BUDGET,
    MIB,
    scratch_budget,
    size_text,
)
from fxpass.plan.devices import implementation_for
from fxpass.plan.parts import BLOCK, EFFICIENT, FEW
from fxpass.plan.plan import MOST_ROUNDED
from tests.support.gpus import A100, H200, MI250, MI300, RADEON, T4, V100
from tests.support.planned import BF16, BOTH, CPU, CUDA, F32, F64, GIB, HEADS
from tests.support.specs import spec_of

F16 = torch.float16
STRATEGIES = ("chunked", "tiled")
SOFTCAP = expression.parse("30*tanh(z/30)")

# ---------------------------------------------------------------- implementations


def loss(
    gradients: tuple[str, ...] = (), strategy="chunked", read: Any = ("pick",), **more: Any
) -> Reductions:
    """A total, whose gradients forward computes, or rows, whose gradients are computed later, if
    there are any."""
    outputs, total = ((), read) if gradients and strategy == "chunked" else (read, ())
    return Reductions(outputs, gradients=gradients, total=total, **more)


def plan(n, d, v, dtype, device, spec):
    """The plan of the run that computes the gradients of a loss, or of forward without any."""
    return plans.plan_head(n, d, v, dtype, device, spec, False, bool(spec.gradients))


def test_the_cpu_runs_aten_and_says_in_which_dtype():
    assert implementation_for(CPU, F32) == ("aten", "ATen multiplies float32 in float32: its own")
    implementation, reason = implementation_for(CPU, BF16)
    multiplied = devices.multiplied_in(BF16, CPU)
    assert (implementation, multiplied in (F32, BF16)) == ("aten", True)
    assert reason.startswith(f"ATen multiplies bfloat16 in {str(multiplied)[6:]}: ")


@pytest.mark.parametrize(
    ("card", "hip", "dtype", "triton", "target", "why"),
    [
        (T4, None, BF16, True, "sm_75", ("triton", "")),
        (A100, None, BF16, True, "sm_80", ("triton", "")),
        (H200, None, F64, True, "sm_90", ("aten", "compute in f32")),
        (H200, None, F32, False, "sm_90", ("aten", "triton is not installed")),
        (V100, None, BF16, True, "sm_70", ("aten", "older than sm_75")),
        (MI250, "7.0", BF16, True, "gfx90a", ("triton", "")),
        (MI300, "7.0", BF16, True, "gfx942", ("triton", "")),
        (RADEON, "7.0", BF16, True, "gfx1100", ("triton", "")),
        # tensors without data may be of a CUDA build's device on a machine that has none
        (None, None, BF16, True, "cpu", ("triton", "")),
    ],
)
def test_a_gpu(card, hip, dtype, triton, target, why, gpus, monkeypatch):
    """Its name as compilers have it, and what it runs."""
    gpus.have(*[card] * (card is not None), hip=hip)
    if not triton:
        monkeypatch.setitem(sys.modules, "triton", None)  # what imports and find_spec look at
    assert devices.target_of(CUDA) == target
    implementation, reason = implementation_for(CUDA, dtype)
    assert (implementation, why[1] in reason) == (why[0], True)


def test_the_device_of_the_tests(device):
    """Where there is a GPU, it runs the kernels, whatever it is asked for."""
    implementation = "triton" if device.type == "cuda" else "aten"
    for dtype in (BF16, F16, F32):
        assert implementation_for(device, dtype)[0] == implementation
    got = plan(256, 64, 1000, BF16, device, loss())
    assert (got.implementation, got.rows) == (implementation, 256)


# ---------------------------------------------------------------- budgets


GPUS = {139: GIB, 80: GIB, 24: 384 * MIB, 8: 256 * MIB, 0: 256 * MIB}
LOW, HIGH = CPU_BUDGET
LOGITS = 4 * 1024 * 32000


@pytest.mark.parametrize(
    ("n", "v", "device", "total", "expected"),
    [
        *((8192, 128256, CUDA, total, expected) for total, expected in GPUS.items()),
        (8192, 128256, CUDA, None, GPU_BUDGET[0]),
        # a CPU gives room for some hundred rows, which are divided into chunks if they are few
        (10**8, 10, CPU, 0, LOW),
        (4096, 10**6, CPU, 0, HIGH),
        (1024, 32000, CPU, 0, LOGITS // CPU_PARTS),
        (256, 32000, CPU, 0, CPU_LEAST),
    ],
)
def test_budgets(n, v, device, total, expected, gpus):
    """A GPU gives a share of its memory; one that is not there the least."""
    gpus.have(*[] if total is None else [replace(H200, total_memory=total * GIB)])
    assert scratch_budget(n, v, F32, device, 0) == expected
    assert scratch_budget(n, v, F32, device, 3) == 3 * MIB
    assert LOW < scratch_budget(4096, 64000, F32, CPU, 0) < HIGH


# ---------------------------------------------------------------- every size

NS = (0, 1, 7, 512, 65536, 285_000, 10**7)
DS = (1, 64, 512, 10**4)
VS = (1, 2, 10, 1000, 128256, 10**6)
BUDGETS = (0, 1, 64, 1024)
LOSSES: dict[str, dict[str, Any]] = {
    "evaluated": {},
    "of all": {"gradients": ("x", "weight", "bias")},
    "frozen": {"gradients": ("x",)},
    "soft": {"read": (Moment(0, 1, 0),), "transform": SOFTCAP, "gradients": BOTH},
}


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("which", LOSSES)
def test_plans_for_every_size(which, dtype):
    """Within the budget or at the smallest block, and never a run of many small steps."""
    where_it_runs = {"aten": CPU, "triton": CUDA}
    every = itertools.product(where_it_runs, STRATEGIES, NS, DS, VS, BUDGETS)
    for runs, strategy, n, d, v, memory_mb in every:
        device = where_it_runs[runs]
        one = loss(strategy=strategy, memory_mb=memory_mb, **LOSSES[which])
        got = plan(n, d, v, dtype, device, one)
        where = f"{n=} {d=} {v=} {memory_mb=}: {got}"
        assert got.implementation == runs
        assert 1 <= got.rows <= max(1, n), where
        assert 1 <= got.classes <= v, where
        # (rows of a chunk hold all classes)
        classes = got.classes if got.strategy == "tiled" or got.in_place else v
        steps = -(-max(1, n) // got.rows) * -(-v // classes)
        # each step has a sensible amount of work: logits, or elements of operands
        work = got.rows * classes + (got.rows + classes) * d
        assert steps == 1 or work >= BLOCK, where
        assert got.rows >= min(n, 16), where
        allowed = scratch_budget(n, v, dtype, device, memory_mb)
        if "smallest block" not in got.reason:
            assert got.scratch <= allowed, where
        if not memory_mb and v * d <= 10**8 and runs == "aten":
            # the default budget is no reason for more than a few hundred steps a gigabyte
            most = 8 + (n * (v + d) + v * d) * 8 // MIB
            assert steps <= most, where


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("n", "v"), [(285_000, 2), (10**6, 10)])
def test_many_rows_of_few_classes_are_a_few_chunks(n, v, dtype):
    for strategy in STRATEGIES:
        got = plan(n, 64, v, dtype, CPU, loss(BOTH, strategy=strategy))
        assert -(-n // got.rows) <= 64
        assert strategy == "chunked" or got.classes == v


def test_a_strategy_that_is_set_beyond_the_budget_still_has_tiles():
    got = plan(65536, 4096, 128256, BF16, CPU, loss(BOTH, strategy="tiled", memory_mb=1))
    assert got.rows * got.classes >= 64 * 64
    assert "budget of 1.0 MiB" in got.reason


# ---------------------------------------------------------------- one chunk, or in place


def test_one_chunk_where_the_sums_of_several_would_take_more():
    """Chunks of bf16 need f32 sums of 4·V·D bytes; 2·N·V of logits are less up to N = 2·D."""
    for n, whole in ((1500, True), (4096, False)):
        got = plan(n, 700, 50000, BF16, CPU, loss(BOTH))
        assert (got.rows == n) == whole
        assert bool(got.sums) != whole
    assert plan(1500, 700, 50000, F32, CPU, loss(BOTH)).rows < 1500


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_logits_that_fit_into_the_weights_gradient_live_there(dtype):
    for gradients, n, expected in ((BOTH, 1024, True), (BOTH, 1025, False), (("x",), 1024, False)):
        got = plan(n, 1024, 128256, dtype, CPU, loss(gradients))
        assert (got.in_place, got.scratch < 48 * MIB) == (
            expected,
            expected or got.scratch < 48 * MIB,
        )
    # backward, beside the largest logits, computes no total
    spec = Reductions(("max", "lse"), gradients=("x", "weight"), detached=("max",))
    of_rows = plans.plan_head(512, 512, 32000, F32, CPU, spec, False, True)
    assert not of_rows.in_place
    assert of_rows.rows < 512


SETTINGS = list(itertools.product((1, 1024, 16384, 1 << 20), (0, 256), ("auto", "float32")))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(
    ("dtype", "unrounded"), [(BF16, ()), (BF16, ("weight",)), (F16, ()), (F16, ("weight",))]
)
def test_a_gpus_chunks(dtype, unrounded, head, h200):
    """Chunks add up in bf16 only where twice eager's error allows it, and nobody says otherwise."""
    d, v = HEADS[head]
    for n, memory_mb, accumulate in SETTINGS:
        asked = loss(BOTH, unrounded=unrounded, memory_mb=memory_mb, accumulate=accumulate)
        got = plans.plan_head(n, d, v, dtype, CUDA, asked, False, True)
        chunks = -(-n // got.rows)
        assert chunks == 1 or got.rows % 64 == 0
        may_round = dtype == BF16 and not unrounded and accumulate == "auto"
        assert got.rounded <= (may_round and 1 < chunks <= (MOST_ROUNDED if memory_mb else FEW))
        wide = unrounded or dtype == F16  # sums are what is returned
        assert bool(got.sums) == (chunks > 1 and not got.rounded and not wide)
        gradient = v * d * (4 if wide else 2)
        taken = max(got.scratch + (got.sums or gradient), (got.sums + gradient) * bool(got.sums))
        floor = 64 * 2 * (v + 16)
        if memory_mb:  # within the budget, or the smallest chunk, or what would take less than sums
            quarter = max(floor, memory_mb * MIB // 4)
            assert got.scratch + got.sums <= max(memory_mb * MIB, quarter + 4 * v * d)
        else:  # no more than chunks of the budget with f32 sums
            assert taken <= max(GIB + 2 * gradient, 3 * gradient) + floor
            assert not may_round or chunks == 1 or got.rows >= EFFICIENT


POLICY = "outputs=moment(1,1);pick gradients=x,weight"
LARGEST = "outputs=lse;max detached=max"


@pytest.mark.parametrize(
    ("text", "dtype", "implementation", "strategies"),
    [
        (POLICY, BF16, "triton", ("chunked", "tiled")),
        (POLICY, F64, "aten", ("tiled", "tiled")),
        ("outputs=moment(0,1,0) gradients=x", BF16, "triton", ("chunked", "tiled")),
        (f"{LARGEST} gradients=x", BF16, "triton", ("chunked", "chunked")),
        (f"{LARGEST} gradients=x", F64, "aten", ("chunked", "chunked")),
        ("gradients=x total=pick", BF16, "triton", ("chunked", "chunked")),
    ],
)
def test_the_implementation_of_reductions_on_a_gpu(text, dtype, implementation, strategies, h200):
    """Both passes have the same one."""
    for backward in (False, True):
        spec = spec_of(text)
        got = plans.plan_head(4096, 4096, 32000, dtype, CUDA, spec, False, backward)
        assert (got.implementation, got.strategy) == (implementation, strategies[backward])
        assert got.scratch <= 1024 * MIB


def test_sizes_that_are_planned_again_are_looked_up():
    first, again = (plan(2048, 512, 32000, F32, CPU, loss(BOTH)) for _ in range(2))
    assert again is first


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 KiB"),
        (160, "1 KiB"),
        (1.25 * MIB, "1.2 MiB"),
        (33 * MIB, "33 MiB"),
        (2.5 * GIB, "2.50 GiB"),
    ],
)
def test_bytes_as_text(number, text):
    assert size_text(int(number)) == text
