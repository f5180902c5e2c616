"""Which lowering runs where, the budget, and plans."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from planned import BF16, BOTH, CPU, CUDA, F32, F64, GIB, HEADS

from fxpass import cost, expression, rates, schedule
from fxpass.cost import MIB
from fxpass.schedule import CPU_BUDGET, GPU_BUDGET, budget, lowering_for, plan
from fxpass.spec import Spec
from fxpass.strategy import choose

SOFTCAP = expression.parse("30*tanh(z/30)")

# ---------------------------------------------------------------- lowerings


def test_the_cpu_runs_aten_and_says_why():
    reason = "ATen chunks run on cpu; the Triton kernels need CUDA or HIP"
    assert lowering_for(CPU, F32) == ("aten", reason)
    assert plan(5, 2, 3, F32, CPU, Spec()) == ("aten", "chunked", 5, 3, reason)


@pytest.mark.parametrize(
    ("installed", "dtype", "reason"),
    [
        (False, F32, "triton is not installed"),
        (True, F64, "the Triton kernels compute in f32"),
    ],
)
def test_a_gpu_runs_aten_where_triton_cannot(installed, dtype, reason, monkeypatch):
    monkeypatch.setattr(schedule, "has_triton", lambda: installed)
    assert lowering_for(CUDA, dtype) == ("aten", reason)


@pytest.mark.parametrize(("capability", "lowering"), [((7, 0), "aten"), ((7, 5), "triton")])
def test_an_old_gpu_runs_aten(capability, lowering, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(schedule, "has_triton", lambda: True)
    card = SimpleNamespace(name="a card", major=capability[0], minor=capability[1])
    monkeypatch.setattr(rates, "properties_of", lambda _: card)
    assert lowering_for(CUDA, BF16)[0] == lowering


def test_a_gpu_that_is_not_there_is_new(monkeypatch):
    """Tensors without data may be of a CUDA build's device on a machine that has none."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(rates, "properties_of", rates.properties_of.__wrapped__)
    monkeypatch.setattr(schedule, "has_triton", lambda: True)
    assert lowering_for(CUDA, BF16)[0] == "triton"


def test_the_device_of_the_tests(device):
    """Where there is a GPU, it runs the kernels, whatever it is asked for."""
    lowering = "triton" if device.type == "cuda" else "aten"
    for dtype in (BF16, torch.float16, F32):
        assert lowering_for(device, dtype)[0] == lowering
    got = plan(256, 64, 1000, BF16, device, Spec())
    assert (got.lowering, got.strategy, got.rows) == (lowering, "chunked", 256)


def test_half_precision_is_computed_in_f32_and_f64_in_f64():
    low = (torch.float16, BF16, F32)
    assert {schedule.compute_dtype(dtype) for dtype in low} == {F32}
    assert schedule.compute_dtype(F64) == F64


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (139 * GIB, GIB),
        (80 * GIB, GIB),
        (24 * GIB, 384 * MIB),
        (8 * GIB, 256 * MIB),
        (0, 256 * MIB),
    ],
)
def test_a_gpu_gives_a_share_of_its_memory(total, expected, monkeypatch):
    monkeypatch.setattr(rates, "properties_of", lambda _: SimpleNamespace(total_memory=total))
    assert budget(128256, BF16, CUDA, 0) == expected
    assert budget(128256, BF16, CUDA, 100) == 100 * MIB


def test_a_gpu_that_is_not_there_gives_the_least():
    assert budget(128256, BF16, torch.device("cuda:77"), 0) >= GPU_BUDGET[0]


def test_a_cpu_gives_room_for_some_hundred_rows():
    low, high = CPU_BUDGET
    assert budget(10, F32, CPU, 0) == budget(32000, BF16, torch.device("meta"), 0) == low
    assert budget(10**6, F32, CPU, 0) == high
    assert low < budget(64000, F32, CPU, 0) < high
    assert budget(64000, F32, CPU, 3) == 3 * MIB


# ---------------------------------------------------------------- plans

SPECS = [
    Spec(),
    Spec(gradients=("x", "weight", "bias")),
    Spec(logits=SOFTCAP, gradients=BOTH),
    Spec(target="probabilities", logits=SOFTCAP, gradients=BOTH),
]


@pytest.mark.parametrize("dtype", [F32, BF16, F64])
@pytest.mark.parametrize("spec", range(len(SPECS)))
@pytest.mark.parametrize(("d", "v"), [(64, 3), (512, 32000), (4096, 151936)])
@pytest.mark.parametrize("memory_mb", [0, 8, 50, 300])
def test_a_plan_keeps_the_budget(dtype, spec, d, v, memory_mb):
    one = SPECS[spec]
    one = Spec(target=one.target, logits=one.logits, gradients=one.gradients, memory_mb=memory_mb)
    got = plan(9999, d, v, dtype, CPU, one)
    work = schedule.work_of(9999, d, v, dtype, CPU, "aten", one, one.gradients)
    allowed = budget(v, dtype, CPU, memory_mb)
    assert cost.scratch("aten", "chunked", work, got.rows, got.classes) <= allowed
    assert (got.lowering, got.strategy) == ("aten", "chunked")
    if memory_mb and got.rows < 9999:  # and uses it, unless less is as fast
        work = work._replace(n=10300)
        assert cost.scratch("aten", "chunked", work, 2 * got.rows + 32, 1) > allowed / 20


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
    assert plan(n, 8, v, F32, CPU, Spec(memory_mb=1)).rows == rows


def test_a_budget_that_is_too_small_is_named():
    reason = plan(4096, 8, 10**6, F32, CPU, Spec(memory_mb=1)).reason
    assert reason.endswith("; the least it can take, 4.3 MiB, is over its budget of 1.0 MiB")
    assert "budget" not in plan(4096, 8, 1000, F32, CPU, Spec(memory_mb=1)).reason


def test_plans_know_nothing_of_measured_rates(monkeypatch):
    """Else the chunks, and with them the order of sums, would differ between machines."""
    monkeypatch.setattr(rates, "device_rates", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(rates, "_measure", lambda: pytest.fail("measured"))
    schedule._plan.cache_clear()
    plan(2048, 512, 32000, BF16, CPU, Spec(gradients=BOTH))


def test_sizes_that_are_planned_again_are_looked_up():
    schedule._plan.cache_clear()
    for _ in range(3):
        plan(2048, 512, 32000, F32, CPU, Spec(gradients=BOTH))
    assert schedule._plan.cache_info().misses == 1


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("n", [1024, 4096, 32768])
@pytest.mark.parametrize("memory_mb", [0, 256])
def test_a_gpus_chunks(head, n, memory_mb, h200):
    d, v = HEADS[head]
    got = plan(n, d, v, BF16, CUDA, Spec(gradients=BOTH, memory_mb=memory_mb))
    padded = -(-v // 16) * 16
    assert got.rows % 64 == 0
    assert got.rows * padded * 2 <= (memory_mb or 1024) * MIB
    most = (memory_mb or 1000) * MIB // (padded * 2) // 64 * 64
    assert -(-n // got.rows) <= -(-n // most) * 1.1 + 1
    if head == "Llama-3-8B" and not memory_mb:
        assert got.rows == min(n, 4096)  # a gibibyte, beside the f32 dW


@pytest.mark.parametrize("gradients", [BOTH, ()])
def test_logits_that_exist_are_planned_as_predicted(gradients, typical_cpu):
    spec = Spec(gradients=gradients)
    (predicted,) = choose(2048, 512, 32000, F32, CPU, spec, "auto", kept=True).predictions()
    kept = plan(2048, 512, 32000, F32, CPU, spec, kept=True)
    assert (kept.rows, kept.classes) == (predicted.rows, predicted.classes)
    # no product whose rate more rows would raise: a few are enough to read them
    assert (kept.rows < plan(2048, 512, 32000, F32, CPU, spec).rows) == (not gradients)


# ---------------------------------------------------------------- as text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0.0 MiB"), (1.25 * MIB, "1.2 MiB"), (33 * MIB, "33 MiB"), (2.5 * GIB, "2.50 GiB")],
)
def test_bytes_as_text(number, text):
    assert schedule.size(int(number)) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.3, "12 s"),
        (1.14, "1.1 s"),
        (0.996, "1 s"),
        (0.45, "450 ms"),
        (3.21e-5, "32 µs"),
        (1e-9, "less than 1 µs"),
    ],
)
def test_seconds_as_text(seconds, text):
    assert schedule.duration(seconds) == text
