"""The accuracy of a step: what is compared with what, and what Liger's scheme rounds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from benchmarks.accuracy import schemes as accuracy_schemes
from benchmarks.accuracy.cases import (
    ROWS,
    Problem,
    Row,
    Setting,
    compare,
    exact_step,
    rounded,
    step,
)
from benchmarks.accuracy.schemes import ROUNDED, SCHEMES, liger_rows, liger_scheme
from benchmarks.accuracy.worker import Session
from benchmarks.loss.case import Case
from benchmarks.loss.providers import plain
from tests.support.numerics import FLOOR, error

# Dynamo asks every input for its gradient, and the operands are cast before the compiled function.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SETTINGS = [
    Setting(F32),
    *(Setting(dtype, autocast) for dtype in (BF16, F16) for autocast in (False, True)),
    *(Setting(F16, autocast, scaled=True) for autocast in (False, True)),
]


@pytest.fixture
def problem() -> Problem:
    return Problem(48, 8, 200, F16)


# ---------------------------------------------------------------- one step


def test_the_reference_is_autograds_in_float64():
    x, weight = (torch.randn(*size, dtype=torch.float64) for size in ((ROWS + 3, 4), (50, 4)))
    target = torch.randint(50, (len(x),))
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    loss = F.cross_entropy(F.linear(*leaves), target)
    loss.backward()
    exact = exact_step(x, weight, target)
    for got, true in zip(exact.values(), (loss, leaves[0].grad, leaves[1].grad), strict=True):
        assert true is not None
        assert error(got, true) < FLOOR[torch.float64]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_step_runs_as_its_setting_says(setting, problem):
    seen = {}

    def loss_of(x, weight, target):
        seen["dtype"] = x.dtype, weight.dtype
        seen["autocast"] = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        loss = plain(x, weight, target)
        loss.register_hook(lambda grad: seen.update(scale=float(grad)))
        return loss

    got = step(loss_of, setting, problem)
    dtype = F32 if setting.autocast else setting.dtype
    assert seen["dtype"] == (dtype, dtype)
    assert seen["autocast"] == (setting.autocast and setting.dtype)
    assert seen["scale"] == (32768 if setting.scaled else 1)
    for what, value in got.items():
        assert error(value, problem.exact[what]) < FLOOR[setting.dtype]


def test_what_fp16_cannot_hold_is_zero_in_any_gradient(problem):
    problem.exact["dw"] = torch.full((4, 4), 1e-9, dtype=torch.float64)
    assert rounded(Setting(F16), problem).zeros["dw"] == 1
    assert rounded(Setting(F16), problem).errors["dw"] == 1
    assert rounded(Setting(F16, scaled=True), problem).zeros["dw"] == 0
    assert rounded(Setting(BF16), problem).zeros["dw"] == 0


def test_errors_and_zeros():
    exact = {k: torch.tensor([3.0, 4.0], dtype=torch.float64) for k in ("loss", "dx", "dw")}
    got = {"loss": exact["loss"], "dx": torch.tensor([3.0, 0.0]), "dw": exact["dw"] * 1.5}
    row = compare(got, exact)
    assert row.errors == {"loss": 0, "dx": 0.8, "dw": 0.5}
    assert row.zeros == {"dx": 0.5, "dw": 0}


# ---------------------------------------------------------------- Liger's scheme


def test_liger_takes_as_many_rows_as_make_logits_of_the_size_of_x():
    assert liger_rows(16384, 4096, 32000) == 2048  # the example in its source
    assert liger_rows(8192, 4096, 32000) == 1024
    assert liger_rows(8192, 16, 32000) == 8
    assert liger_rows(5, 64, 32) == 5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ligers_scheme_is_the_gradient_where_nothing_is_rounded(reduction, monkeypatch):
    monkeypatch.setattr(accuracy_schemes, "HIDDEN", 20)  # 16 rows at a time
    problem = Problem(37, 8, 50, F32)

    def loss_of(x, weight, target):
        count = 1 if reduction == "mean" else len(x)
        return liger_scheme(x, weight, target, reduction=reduction) / count

    for what, value in step(loss_of, Setting(F32), problem).items():
        assert error(value, problem.exact[what]) < FLOOR[F32]


def test_ligers_scheme_rounds_the_gradient_of_the_logits_before_it_is_scaled():
    problem = Problem(2048, 4, 4000, F16)  # p / N is 1e-7: two of fp16's smallest steps

    def measure(who: str) -> Row:
        found = step(SCHEMES[who].make(), Setting(F16, autocast=True, scaled=True), problem)
        return compare(found, problem.exact)

    eager, liger, added = map(measure, ("eager", "liger_scheme", "liger_scheme_sum"))
    assert liger.errors["dw"] > 20 * eager.errors["dw"]
    assert liger.errors["dx"] > 20 * eager.errors["dx"]
    assert added.errors["dx"] < 1.05 * eager.errors["dx"]


# ---------------------------------------------------------------- the worker


def test_a_session_steps_as_its_case_says(problem):
    """Its numbers are those of the functions above; the first row is float64's, rounded."""
    for who in (ROUNDED, "eager", "liger_scheme"):
        case = Case(who, 48, 8, 200, "float16", "cpu", autocast=True, scaled=True)
        setting = Setting(F16, autocast=True, scaled=True)
        row = rounded(setting, problem)
        if who != ROUNDED:
            row = compare(step(SCHEMES[who].make(), setting, problem), problem.exact)
        answer = Session(case).check()
        assert (answer["errors"], answer["zeros"]) == (row.errors, row.zeros)
