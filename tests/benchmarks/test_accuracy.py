"""The accuracy table: every setting, every provider, and no good word for a fusedce that is worse."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from benchmarks.accuracy import __main__ as accuracy
from benchmarks.accuracy import schemes as accuracy_schemes
from benchmarks.accuracy.cases import (
    ROWS,
    Problem,
    Row,
    Setting,
    compare,
    exact_step,
    measure,
    rounded,
    settings,
    step,
)
from benchmarks.accuracy.schemes import SCHEMES, Scheme, liger_rows, liger_scheme
from benchmarks.accuracy.table import EXACT, section, worse
from benchmarks.loss.providers import plain
from tests.support.numerics import FLOOR, error

# Dynamo asks every input for its gradient, and the operands are cast before the compiled function.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TINY = ["--n", "48", "--d", "8", "--v", "200"]


@pytest.fixture
def problem() -> Problem:
    return Problem(48, 8, 200, F16)


# ---------------------------------------------------------------- one step


def test_settings():
    assert [str(setting) for setting in settings([F32, BF16, F16])] == [
        "float32",
        "bfloat16",
        "bfloat16 autocast of f32",
        "float16",
        "float16 + GradScaler",
        "float16 autocast of f32",
        "float16 autocast of f32 + GradScaler",
    ]


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


@pytest.mark.parametrize("setting", settings([F32, BF16, F16]), ids=str)
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


def test_a_provider_that_raises_is_a_row_with_its_first_line(problem):
    def broken(x, weight, target):
        raise RuntimeError("no | such\nkernel")

    row = measure(broken, Setting(F32), problem)
    assert row.failure == "RuntimeError: no | such"
    assert "| eager | RuntimeError: no \\| such | |" in section({"eager": row})


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
    eager, liger, added = (
        measure(SCHEMES[who].make(), Setting(F16, autocast=True, scaled=True), problem)
        for who in ("eager", "liger_scheme", "liger_scheme_sum")
    )
    assert liger.errors["dw"] > 20 * eager.errors["dw"]
    assert liger.errors["dx"] > 20 * eager.errors["dx"]
    assert added.errors["dx"] < 1.05 * eager.errors["dx"]


# ---------------------------------------------------------------- the command


def replaced(monkeypatch, loss_of) -> None:
    """fusedce becomes ``loss_of``."""
    monkeypatch.setitem(SCHEMES, "fusedce", Scheme("**fusedce**", lambda: loss_of))


def refused(*arguments: str) -> str:
    """What the command says when it ends with status 1."""
    with pytest.raises(SystemExit) as end:
        accuracy.main([*TINY, *arguments])
    assert isinstance(end.value.code, str)  # which Python prints, and makes a 1
    return end.value.code


def test_the_table(tmp_path, monkeypatch):
    replaced(
        monkeypatch, torch.compile(plain, backend="fusedce", options={"fusedce.inner": "eager"})
    )
    file = tmp_path / "table.md"
    core = ["core"] * hasattr(torch.nn, "LinearCrossEntropyOptions")  # torch 2.11 has none
    providers = ["eager", *core, "liger_scheme", "fusedce"]
    accuracy.main([*TINY, "--providers", *providers, "--table", str(file)])
    text = file.read_text()
    sections = text.split("\n## ")
    assert [part.splitlines()[0] for part in sections[1:]] == [
        "fusedce / eager",
        *map(str, settings([F32, BF16, F16])),
    ]
    labels = [f"*{EXACT}*", *(SCHEMES[who].label for who in providers)]
    for part in sections[2:]:
        rows = [line.split(" | ") for line in part.splitlines()[4:] if line.startswith("|")]
        assert [row[0].removeprefix("| ") for row in rows] == labels
        assert all(len(row) == 7 for row in rows)
    assert "nowhere worse" in sections[1]
    assert "N=48, D=8, V=200" in text
    assert f"`python -m benchmarks.accuracy {' '.join(TINY)} --providers" in text


WRONG = {
    "a gradient that is off": (
        lambda x, w, t: plain(x, w * 1.001, t),
        "float32: dw 0.00[0-9]+, eager [0-9.]+e-0[78], [0-9.]+e[+]0[34] times",
    ),
    "a loss that is off": (
        lambda x, w, t: plain(x, w, t) + 1e-4,
        "float32: loss 1.[0-9]+e-05, eager",
    ),
    "half the gradient is lost": (
        lambda x, w, t: plain(x[::2], w, t[::2]),
        "float32: share of zeros in dx 0.5, eager 0, inf times",
    ),
    "nan": (lambda x, w, t: plain(x, w, t) * float("nan"), "float32: loss nan, eager"),
    "it raises": (
        lambda x, w, t: plain(x, w.t(), t),
        "float32: not checked, fusedce: RuntimeError: ",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_fusedce_that_is_worse_ends_with_status_1(what, monkeypatch, tmp_path):
    loss_of, message = WRONG[what]
    replaced(monkeypatch, loss_of)
    arguments = ["--dtypes", "float32", "--providers", "eager", "fusedce"]
    file = tmp_path / "table.md"
    said = refused(*arguments, "--table", str(file))
    assert re.search(message, said), said
    assert "nowhere worse" not in file.read_text()


def test_what_was_not_compared_is_not_called_good():
    said = refused("--dtypes", "float32", "--providers", "eager")
    assert "float32: not checked, fusedce was not run" in said


def rows_of(eager: float, fusedce: float, least: float) -> dict[Setting, dict[str, Row]]:
    zeros = {"dx": 0.0, "dw": 0.0}
    made = {
        who: Row(dict.fromkeys(("loss", "dx", "dw"), value), zeros)
        for who, value in ((EXACT, least), ("eager", eager), ("fusedce", fusedce))
    }
    return {Setting(F16): made}


@pytest.mark.parametrize(
    ("eager", "fusedce", "least", "count"),
    [
        (3e-4, 3.1e-4, 2e-4, 0),
        (3e-4, 3.2e-4, 2e-4, 3),  # far below twice eager's
        (1e-4, 2e-4, 2e-4, 0),  # eager was lucky: no fp16 can be asked to be nearer
        (1e-9, 1.1e-7, 1e-9, 0),  # the last digit of an f32
        (1e-9, 1.4e-7, 1e-9, 3),
        (3e-4, float("nan"), 2e-4, 3),
    ],
)
def test_what_counts_as_worse(eager, fusedce, least, count):
    assert len(worse(rows_of(eager, fusedce, least))) == count
