"""Plans: how many rows a chunk has, and which lowering runs where."""

from __future__ import annotations

import pytest
import torch

from fxpass import expression, schedule
from fxpass.schedule import MIB, ROWS, lowering_for, plan
from fxpass.spec import Spec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SOFTCAP = expression.parse("30*tanh(z/30)")


@pytest.mark.parametrize(
    ("n", "device", "rows"),
    [
        (2048, CPU, ROWS["cpu"]),
        (ROWS["cpu"] + 1, CPU, ROWS["cpu"]),
        (ROWS["cpu"] - 1, CPU, ROWS["cpu"] - 1),
        (1, CPU, 1),
        (0, CPU, 1),
        (10**9, CUDA, ROWS["cuda"]),
        (3, CUDA, 3),
        (2048, torch.device("meta"), ROWS["cpu"]),  # a device without an entry of its own
    ],
)
def test_rows_without_a_budget(n, device, rows):
    assert plan(n, 512, 32000, torch.float64, device, Spec()).rows == rows


@pytest.mark.parametrize(
    ("dtype", "spec", "bytes_per_logit"),
    [
        (torch.float32, Spec(), 4),
        (torch.bfloat16, Spec(), 4),  # ATen chunks are f32
        (torch.float64, Spec(), 8),
        (torch.float32, Spec(logits=SOFTCAP), 4),  # transformed a few rows at a time
        (torch.float64, Spec(target="probabilities", logits=SOFTCAP), 8),
    ],
)
@pytest.mark.parametrize("v", [3, 32000, 151936])
@pytest.mark.parametrize("memory_mb", [5, 7, 300])
def test_rows_fill_the_budget_and_stay_within_it(v, memory_mb, dtype, spec, bytes_per_logit):
    spec = Spec(target=spec.target, logits=spec.logits, memory_mb=memory_mb)
    rows = plan(10**9, 512, v, dtype, CPU, spec).rows
    row = v * bytes_per_logit
    assert rows * row <= memory_mb * MIB < (rows + 1) * row


@pytest.mark.parametrize(
    ("n", "v", "rows"),
    [
        (10**6, 10**6, 1),  # one row alone is more than the budget
        (1, 10, 1),
        (5, 10, 5),
        (0, 10, 1),
        (5, 0, 5),
    ],
)
def test_rows_are_at_least_one_and_at_most_n(n, v, rows):
    assert plan(n, 8, v, torch.float32, CPU, Spec(memory_mb=1)).rows == rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_kernels_work_in_place_on_chunks_of_the_operands_dtype(dtype, monkeypatch):
    monkeypatch.setattr(schedule, "lowering_for", lambda *_: ("triton", "because"))
    for spec in (Spec(memory_mb=64), Spec(memory_mb=64, target="probabilities", logits=SOFTCAP)):
        got = plan(10**9, 512, 32000, dtype, CUDA, spec)
        assert got == ("triton", "because", 64 * MIB // (32000 * dtype.itemsize))


def test_the_cpu_runs_aten_and_says_why():
    assert plan(5, 2, 3, torch.float32, CPU, Spec()) == (
        "aten",
        "ATen chunks run on cpu; the Triton kernels need CUDA or HIP",
        5,
    )


@pytest.mark.parametrize(
    ("installed", "dtype", "reason"),
    [
        (False, torch.float32, "triton is not installed"),
        (True, torch.float64, "the Triton kernels compute in f32"),
    ],
)
def test_a_gpu_runs_aten_where_triton_cannot(installed, dtype, reason, monkeypatch):
    monkeypatch.setattr(schedule, "has_triton", lambda: installed)
    assert lowering_for(CUDA, dtype) == ("aten", reason)


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels():
    reason = "generated Triton kernel over row chunks"
    assert lowering_for(CUDA, torch.bfloat16) == ("triton", reason)


def test_half_precision_is_computed_in_f32_and_f64_in_f64():
    low = (torch.float16, torch.bfloat16, torch.float32)
    assert {schedule.compute_dtype(dtype) for dtype in low} == {torch.float32}
    assert schedule.compute_dtype(torch.float64) == torch.float64
