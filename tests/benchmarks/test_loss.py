"""The benchmarks refuse numbers from a provider that computes something else."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest
import torch
import torch.nn.functional as F

from benchmarks.about import about, heading
from benchmarks.loss import __main__ as command
from benchmarks.loss import measure, picture, providers, reference
from benchmarks.loss.case import CHECKED_ROWS, Case
from benchmarks.loss.heads import HEADS, ROWS, SUITES
from benchmarks.loss.measure import Effort
from benchmarks.loss.rows import Result, Row, wrong
from benchmarks.loss.table import document, table
from benchmarks.loss.worker import errors
from benchmarks.process import Worker, WorkerError

EAGER = {"loss": 1e-7, "dx": 1e-6, "dw": 1e-6}
WHAT = about("cpu")


def case(
    provider: str = "", n: int = 8, softcap: float = 0.0, dtype: str = "float32", v: int = 16
) -> Case:
    return Case(provider, n, 4, v, dtype, "cpu", True, softcap)


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize(
    ("off", "reason"),
    [
        ({}, ""),
        ({"dw": 3e-6}, ""),  # within twice eager's error and the floor
        ({"dw": 1e-3}, "refused: dw is off by 1.0e-03 (bound 4.0e-06)"),
        ({"loss": float("nan")}, "refused: loss is off by nan"),
    ],
)
def test_what_counts_as_wrong(off, reason):
    found = wrong({**EAGER, **off}, EAGER, "float32")
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


# rows that repeat, not all equally often; several tiles of classes
@pytest.mark.parametrize(("n", "v"), [(8, 16), (CHECKED_ROWS + 72, 16), (8, reference.TILE + 9)])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_errors_are_against_float64(n, v, softcap):
    right = errors(providers.program(softcap), case(n=n, v=v, softcap=softcap))
    rounding = 1e-6 if n * v < 10**4 else 1e-5  # eager's own, over longer sums
    assert 0 < right["dw"] < rounding
    assert 0 < right["dx"] < rounding
    assert right["loss"] < rounding

    def wide(x, w, t):  # the program without its cast to f32
        z = x @ w.t()
        return F.cross_entropy(softcap * torch.tanh(z / softcap) if softcap else z, t)

    exact = errors(wide, case(n=n, v=v, softcap=softcap, dtype="float64"))
    assert max(exact.values()) < 1e-8 * rounding


def test_every_block_of_rows_is_compared():
    distinct = 100  # rows, of which a block does not hold a multiple
    x, w, t = case(n=reference.BLOCK + 9).tensors(distinct)
    loss = providers.plain(x, w, t)
    dx, dw = torch.autograd.grad(loss, (x, w))
    got = loss.detach(), dx, dw
    found = reference.errors(got, x, w, t, distinct, 0.0)
    assert max(found.values()) < 1e-5
    dx[-1] *= 2
    assert reference.errors(got, x, w, t, distinct, 0.0)["dx"] > 1e-3


@pytest.mark.parametrize(
    ("off", "name"),
    [
        (lambda x, w, t: providers.plain(x, w, t) / 2, "loss"),
        (lambda x, w, t: providers.plain(x.detach() + 1e-3 * (x - x.detach()), w, t), "dx"),
        (lambda x, w, t: providers.plain(x, torch.cat([w[:-1], w[-1:].detach()]), t), "dw"),
        # only what comes after the distinct rows is wrong
        (lambda x, w, t: providers.plain(x, w, torch.cat([t[:-1], (t[-1:] + 1) % 16])), "dx"),
    ],
)
def test_a_function_that_is_off_is_wrong(off, name):
    n = CHECKED_ROWS + 1
    eager = errors(providers.plain, case(n=n))
    assert not wrong(eager, eager, "float32")
    found = errors(off, case(n=n))
    assert found[name] > 1e-3
    assert wrong(found, eager, "float32").startswith("refused")


# ---------------------------------------------------------------- processes


WRONG = """
import os, sys
import torch
from benchmarks.loss import providers
from benchmarks.loss import worker
from benchmarks.loss.providers import Provider
from benchmarks.process import serve
providers.PROVIDERS["half"] = Provider("half", lambda cap: lambda *a: providers.plain(*a) / 2)
providers.PROVIDERS["dies"] = Provider("dies", lambda cap: dies)
providers.PROVIDERS["hangs"] = Provider("hangs", lambda cap: lambda *a: __import__("time").sleep(999))
def dies(*tensors):
    print("last words")
    sys.stdout.flush()
    os.abort()
def full(cap):
    def loss(x, w, t):
        if len(w) < 20:  # not the small call beforehand
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB\\nmore text")
        return providers.plain(x, w, t)
    return loss
providers.PROVIDERS["full"] = Provider("full", full)
if __name__ == "__main__":
    serve(lambda fields: worker.Session(worker.Case(**fields)))
"""


@pytest.fixture
def strange(tmp_path, monkeypatch):
    """Providers that are wrong, die, hang and run out of memory, in real processes."""
    (tmp_path / "strange_worker.py").write_text(WRONG)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{measure.__file__.rsplit('/', 2)[0]}")
    monkeypatch.setattr(measure, "WORKER", "strange_worker")
    for name in ("half", "dies", "hangs", "full"):
        monkeypatch.setitem(providers.PROVIDERS, name, providers.PROVIDERS["eager"])


def test_a_provider_that_fails_has_a_reason_and_no_numbers(strange):
    result, told = Result("", case()), []
    names = ["bare", "half", "dies", "full", "no such provider", "liger", "eager"]
    measure.run(result, names, Effort(rounds=2), told.append)
    rows = {row.name: row for row in result.rows}
    assert list(rows) == names
    for name in ("bare", "eager"):
        assert len(rows[name].seconds) == 2
        assert not rows[name].failure
    assert re.match(r"refused: loss is off by 5\.0e-01", rows["half"].failure)
    assert rows["dies"].failure == "ended with status -6: last words"
    assert "last words" in rows["dies"].log
    assert rows["full"].failure == "out of memory: CUDA out of memory. Tried to allocate 99 GiB"
    assert rows["no such provider"].failure == "not run: no provider no such provider"
    assert rows["liger"].failure == "not run: its kernels need a GPU, and this is cpu"
    assert all(not row.seconds for name, row in rows.items() if name not in ("bare", "eager"))
    assert result.eager == rows["eager"].errors
    assert any("half: refused" in line for line in told)


def test_a_provider_that_hangs_is_given_up(strange):
    begin = time.monotonic()
    hangs = Worker("strange_worker", case("hangs"), timeout=600)
    hangs.timeout = 0.2  # the import takes longer; the first call, which hangs, comes before it
    with pytest.raises(WorkerError, match=r"took more than 0\.2 s"):
        hangs.answer()
    assert time.monotonic() - begin < 500
    assert hangs.process.returncode is not None


def test_a_missing_package_is_told(monkeypatch):
    for package in ("liger_kernel", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, package, None)  # what find_spec looks at first
    found = {name: providers.PROVIDERS[name].problem(case()) for name in ("liger", "cce", "eager")}
    assert found == {
        "liger": "liger-kernel is not installed",
        "cce": "cut-cross-entropy is not installed",
        "eager": "",
    }


def test_heads_with_a_cap_are_not_given_to_those_who_have_none():
    capped = case(softcap=30.0)
    without = {
        name for name, p in providers.PROVIDERS.items() if p.problem(capped) == "it has no soft-cap"
    }
    assert without == {"core"}  # QuACK needs a GPU first of all
    assert not providers.PROVIDERS["quack"].softcap


class Scripted:
    """A worker that answers what it is told to, and counts."""

    asked: list[tuple[str, str]]

    def __init__(self, module: str, job: Case, timeout: float) -> None:
        self.name = job.provider
        self.log = ""

    def answer(self) -> dict[str, object]:
        return {}

    def ask(self, command: str) -> dict[str, object]:
        Scripted.asked.append((self.name, command))
        slow = self.name == "core"
        found = {"seconds": 60.0 if slow else 2.0, "bytes": 1 << 20}
        if command == "step" and self.name == "inductor" and len(Scripted.asked) > 12:
            raise KeyboardInterrupt
        if command == "check":
            return {**found, "errors": EAGER, "rehearsed": self.name == "inductor"}
        return found

    def kill(self) -> None:
        Scripted.asked.append((self.name, "kill"))

    def close(self) -> None:
        Scripted.asked.append((self.name, "close"))


def test_rounds_are_taken_in_turn_while_there_is_time(monkeypatch):
    monkeypatch.setattr(measure, "Worker", Scripted)
    Scripted.asked = []
    result = Result("", case())
    measure.run(result, ["eager", "core"], Effort(rounds=9, seconds=5), lambda text: None)
    eager, core = result.rows
    assert eager.seconds == [2.0, 2.0]  # a third would end after 6 s
    assert not eager.alone
    assert core.seconds == [60.0]  # the checked step: another would take too long
    assert core.alone
    assert core.extra_bytes == 1 << 20
    assert Scripted.asked == [
        ("eager", "check"), ("eager", "measure"), ("core", "check"), ("core", "close"),
        ("eager", "step"), ("eager", "step"), ("eager", "close"),
    ]  # fmt: skip


def test_an_interruption_keeps_what_there_is(monkeypatch):
    monkeypatch.setattr(measure, "Worker", Scripted)
    Scripted.asked = []
    result = Result("", case())
    names = ["eager", "inductor", "auto_chunker"]
    with pytest.raises(KeyboardInterrupt):
        measure.run(result, names, Effort(rounds=9), lambda text: None)
    eager, inductor, chunker = result.rows
    assert len(eager.seconds) == 3
    assert len(inductor.seconds) == len(chunker.seconds) == 2
    assert [name for name, command in Scripted.asked if command == "kill"] == names


# ---------------------------------------------------------------- what comes out


def synthetic() -> Result:
    """N=1024 D=512 V=1024 in bf16: gradients of 2 MiB, 6 N D V operations."""
    rows = [
        Row("bare", seconds=[1.0, 1.5, 3.0]),
        Row("inductor", "", dict(EAGER), [1.0, 2.0, 4.0], False, 9.0, 4 << 20),
        Row("core", "", dict(EAGER), [8.0], True, 9.0, 3 << 20),
        Row("fusedce", "", dict(EAGER), [0.5, 1.0, 2.0], False, 9.0, 3 << 20),
        Row("half", failure="refused: dx is off | by 0.5"),
    ]
    return Result("llama", Case("", 1024, 512, 1024, "bfloat16", "cpu", True), rows, dict(EAGER))


def test_the_table():
    lines = table(synthetic()).splitlines()
    errors = "1.0e-07, 1.0e-06, 1.0e-06"
    assert lines[2:] == [
        "| bare GEMMs | 1500 | 1000-3000 | 3 | 100% | 0.75 | - | - | - | - |",
        f"| inductor | 2000 | 1000-4000 | 3 | 75% | 1.00 | 4 | 1.00 | 2 | {errors} |",
        "| core's `linear_cross_entropy(options=...)` | 8000 | 8000-8000 | 1 (not in turn) | 19% "
        f"| 4.00 | 3 | 0.75 | 1 | {errors} |",
        f"| **fusedce** | 1000 | 500-2000 | 3 | 150% | 0.50 | 3 | 0.75 | 1 | {errors} |",
        "| half | - | - | - | - | - | - | - | - | refused: dx is off \\| by 0.5 |",
    ]


def test_the_document_says_where_and_beside_whom():
    text = document([synthetic()], WHAT)
    assert text.startswith(f"## Benchmarks: {heading(WHAT)}\n")
    assert WHAT["device_name"] in text
    assert f"torch {torch.__version__}" in text
    assert WHAT["date"][:10] in text
    assert "### llama: N=1024 D=512 V=1024, bfloat16, training" in text
    assert (
        "- fusedce: 0.50 x inductor's time, the fastest other, 0.75 x inductor's extra peak, "
        "1.00 x core's extra peak" in text
    )


def test_json_and_back():
    value = json.loads(json.dumps(synthetic().as_json()))
    assert Result.from_json(value) == synthetic()
    assert value["rows"][3]["seconds"] == [0.5, 1.0, 2.0]
    assert value["rows"][3]["share_of_bare"] == 1.5
    assert value["rows"][3]["scratch_bytes"] == 1 << 20
    assert value["rows"][3]["flops_per_second"] == 6 * 1024 * 512 * 1024


def test_scratch_is_what_the_gradients_do_not_need():
    training, evaluation = (Case("", 10, 4, 6, "bfloat16", "cpu", b) for b in (True, False))
    assert training.gradient_bytes == (10 + 6) * 4 * 2
    assert evaluation.gradient_bytes == 0
    assert (training.flops, evaluation.flops) == (6 * 240, 2 * 240)
    row = Row("fusedce", extra_bytes=1000)
    assert Result("", training).scratch(row) == 1000 - 128
    assert Result("", evaluation).scratch(row) == 1000


def test_the_picture(tmp_path):
    file = tmp_path / "picture.png"
    lone = Result("", synthetic().case, [Row("fusedce", failure="no numbers at all")])
    picture.draw([synthetic(), lone], WHAT, file)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert [row.name for row, _, _ in picture.points(synthetic())] == [
        "inductor",
        "core",
        "fusedce",
    ]
    assert len(set(picture.STYLE.values())) == len(picture.STYLE)
    assert set(picture.STYLE) == set(providers.PROVIDERS) - {"bare"}


def test_without_matplotlib_nothing_is_measured_in_vain(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what find_spec looks at first
    with pytest.raises(SystemExit, match="the picture needs matplotlib"):
        command.main(["--suite", "quick", "--picture", str(tmp_path / "p.png")])


# ---------------------------------------------------------------- what is measured


def test_the_heads():
    assert HEADS["llama-3-8b"] == (4096, 128256, 0)
    assert HEADS["llama-3.2-1b"] == (2048, 128256, 0)
    assert HEADS["qwen3-8b"] == (4096, 151936, 0)
    assert HEADS["gemma-2-2b"] == (2304, 256000, 30)
    assert HEADS["gpt-2"] == (768, 50257, 0)
    assert (ROWS[0], ROWS[-1]) == (1024, 32768)
    shapes = {(c.n, c.d, c.v, c.dtype, c.backward) for _, c in SUITES["cpu"].cases("cpu")}
    assert shapes == {
        (*shape, dtype, backward)
        for shape in ((2048, 512, 32000), (1024, 1024, 128256))
        for dtype in ("float32", "bfloat16")
        for backward in (True, False)
    }
    assert len(list(SUITES["gpu"].cases("cuda"))) == 5 * len(ROWS) * 2


def planned(*argv: str) -> list[str]:
    cases, _ = command.plan(command.parser().parse_args([*argv, "--device", "cpu"]))
    return [f"{head}: {case}" for head, case in cases]


def test_what_the_command_line_measures():
    assert planned("--n", "8", "--v", "16", "--dtype", "bfloat16", "--forward") == [
        ": N=8 D=512 V=16, bfloat16, evaluation"
    ]
    assert planned("--suite", "gpu", "--heads", "gemma-2-2b", "--n", "64", "--forward") == [
        "gemma-2-2b: N=64 D=2304 V=256000, soft-cap 30, bfloat16, evaluation"
    ]
    assert len(planned()) == 8
    _, effort = command.plan(command.parser().parse_args(["--suite", "quick", "--rounds", "5"]))
    assert effort == Effort(rounds=5, seconds=SUITES["quick"].seconds)


def test_the_quick_suite_as_a_user_runs_it(tmp_path, capsys, monkeypatch):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "markdown", "png")}
    argv = ["--suite", "quick", "--device", "cpu", "--n", "32", "--rounds", "2"]
    argv += ["--providers", "bare", "eager", "fusedce", "cce", "--json", str(files["json"])]
    argv += ["--markdown", str(files["markdown"]), "--picture", str(files["png"])]
    monkeypatch.setenv("FUSEDCE_INNER", "eager")  # Inductor would be tested for nothing
    assert command.main(argv) == 0
    said = capsys.readouterr()
    assert "[2/2] tiny: N=32 D=64 V=4000, float32, evaluation" in said.err
    assert "| **fusedce** |" in said.out
    assert "not run: cut-cross-entropy is not installed" in said.out
    value = json.loads(files["json"].read_text())
    assert value["about"]["versions"]["torch"] == torch.__version__
    assert [c["case"]["backward"] for c in value["cases"]] == [True, False]
    for result in value["cases"]:
        bare, eager, fused, _ = result["rows"]
        assert bare["share_of_bare"] == 1
        for row in (eager, fused):
            assert len(row["seconds"]) == 2
            assert row["share_of_bare"] > 0
            assert not wrong(row["errors"], result["eager_errors"], "float32")
    assert files["markdown"].read_text().count("\n### ") == 2
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    # nothing is left to measure, so this only writes the tables again
    files["markdown"].unlink()
    assert command.main([*argv, "--resume"]) == 0
    assert "[1/2] " not in capsys.readouterr().err
