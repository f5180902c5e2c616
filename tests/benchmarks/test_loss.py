"""The benchmarks refuse numbers from a provider that computes something else."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks.about import about, heading
from benchmarks.accuracy.schemes import ROUNDED
from benchmarks.loss import exact, kinds, measure, picture, providers
from benchmarks.loss.case import CHECKED_ROWS, CROSS_ENTROPY, Case
from benchmarks.loss.heads import HEADS, ROWS, SUITES
from benchmarks.loss.kinds import KINDS, complaints, worse
from benchmarks.loss.measure import Effort
from benchmarks.loss.programs import PROGRAMS, function_of, plain
from benchmarks.loss.rows import Result, Row, wrong
from benchmarks.loss.worker import Session
from benchmarks.process import Worker, WorkerError

EAGER = {"loss": 1e-7, "dx": 1e-6, "dw": 1e-6}
WHAT = about("cpu")
QUICK = SUITES["quick"]


def case(provider: str = "", n: int = 8, dtype: str = "float32", v: int = 16, **more) -> Case:
    return Case(provider, n, 4, v, dtype, "cpu", **more)


def quiet(text: str) -> None:
    """Tells nobody."""


# ---------------------------------------------------------------- numerics


@pytest.mark.parametrize(
    ("off", "reason"),
    [
        ({}, ""),
        ({"dw": 3e-6}, ""),  # within twice eager's error and the floor
        ({"dw": 1e-3}, "refused: dw is off by 1.0e-03 (bound 4.0e-06)"),
        ({"loss": float("nan")}, "refused: loss is off by nan"),
        ({"dx": float("inf")}, "refused: dx is off by inf"),
    ],
)
def test_what_counts_as_wrong(off, reason):
    found = wrong({**EAGER, **off}, EAGER, "float32")
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def errors(function, given: Case, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """Of a step of all the case's rows, by a function of its operands."""
    program = PROGRAMS[given.program]
    operands = given.operands(program.names, given.distinct)
    operands = {k: t.to(dtype) if t.is_floating_point() else t for k, t in operands.items()}
    trained = program.trained if given.backward else ()
    return exact.errors(exact.results(function, operands, trained), exact.answer(given))


CASES = {
    **{name: case(n=2 * CHECKED_ROWS, program=name) for name in PROGRAMS},
    "a soft-cap": case(n=CHECKED_ROWS, softcap=3.0),
    "rows that do not repeat": case(n=CHECKED_ROWS + 72),
    "evaluation": case(backward=False),
    "behind layers": case(n=2 * CHECKED_ROWS, program="lora", layers=2),
}


@pytest.mark.parametrize("name", CASES)
def test_the_exact_answer_is_that_of_a_wide_program(name):
    given = CASES[name]
    found = errors(function_of(given, given.stack()), given)
    assert max(found.values()) < 1e-5
    trained = PROGRAMS[given.program].trained if given.backward else ()
    assert [k for k in found if "metric" not in k] == ["loss", *(f"d{k}" for k in trained)]
    wide = errors(function_of(given, given.stack().double()), given, torch.float64)
    assert max(wide.values()) < 1e-12


def test_every_block_of_rows_is_compared(monkeypatch):
    monkeypatch.setattr(exact, "BLOCK", 3)
    right = torch.randn(8, 2, dtype=torch.float64)
    got = right.repeat(2, 1)
    assert exact.distance(got, right) == 0
    for row in range(16):
        off = got.clone()
        off[row] += 1
        assert exact.distance(off, right) == pytest.approx(float(2**0.5 / got.norm()))
    assert exact.distance(got * float("nan"), right) != exact.distance(got, right)


@pytest.mark.parametrize(
    ("off", "name"),
    [
        (lambda x, w, t: plain(x, w, t) / 2, "loss"),
        (lambda x, w, t: plain(x.detach() + 1e-3 * (x - x.detach()), w, t), "dx"),
        (lambda x, w, t: plain(x, torch.cat([w[:-1], w[-1:].detach()]), t), "dw"),
        # only what comes after the distinct rows is wrong
        (lambda x, w, t: plain(x, w, torch.cat([t[:-1], (t[-1:] + 1) % 16])), "dx"),
        (lambda x, w, t: plain(x.detach(), w, t), "dx"),
    ],
)
def test_a_function_that_is_off_is_wrong(off, name):
    given = case(n=2 * CHECKED_ROWS)
    eager = errors(plain, given)
    assert not wrong(eager, eager, "float32")
    found = errors(off, given)
    assert found[name] > 1e-3
    assert wrong(found, eager, "float32").startswith("refused")


@pytest.mark.parametrize("layers", [0, 1])
def test_a_session_checks_measures_and_times(layers):
    given = case("eager", CHECKED_ROWS, program="kl", layers=layers)
    session = Session(given)
    answer = session.check()
    assert answer["errors"].keys() == {"loss", "dx", "dw"}
    assert max(answer["errors"].values()) < 1e-5
    assert session.measure().keys() == {"bytes", "seconds"}
    assert session.step()["seconds"] > 0
    leaves = [session.operands["w"], *session.stack.parameters()]
    assert all(leaf.grad is None for leaf in leaves)
    session._run()
    assert all(leaf.grad is not None for leaf in leaves)  # the layers are trained


# ---------------------------------------------------------------- processes


WRONG = """
import os, sys
import torch
from benchmarks.loss import providers
from benchmarks.loss import worker
from benchmarks.loss.providers import Provider
from benchmarks.process import serve
def put(name, function):
    providers.PROVIDERS[name] = Provider(name, lambda plain, cap: function)
put("half", lambda *a: providers.plain(*a) / 2)
put("hangs", lambda *a: __import__("time").sleep(999))
def dies(*tensors):
    print("last words")
    sys.stdout.flush()
    os.abort()
def full(x, w, t):
    if len(w) < 20:  # not the small call beforehand
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB\\nmore text")
    return providers.plain(x, w, t)
put("dies", dies)
put("full", full)
if __name__ == "__main__":
    serve(lambda fields: worker.Session(worker.Case(**fields)))
"""


@pytest.fixture
def strange(tmp_path, monkeypatch):
    """A kind whose providers are wrong, die, hang and run out of memory, in real processes."""
    (tmp_path / "strange_worker.py").write_text(WRONG)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{measure.__file__.rsplit('/', 3)[0]}")
    names = ("half", "dies", "hangs", "full")
    table = KINDS["loss"].providers
    return KINDS["loss"]._replace(
        worker="strange_worker", providers={**table, **dict.fromkeys(names, table["eager"])}
    )


def test_a_provider_that_fails_has_a_reason_and_no_numbers(strange):
    result, told = Result("", case()), []
    names = ["bare", "half", "dies", "full", "no such provider", "liger", "eager"]
    measure.run(result, names, Effort(rounds=2), strange, told.append)
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


def test_who_cannot_run_says_why(monkeypatch):
    for package in ("liger_kernel", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, package, None)  # what find_spec looks at first

    def problems(given: Case) -> dict[str, str]:
        found = {name: p.problem(given) for name, p in providers.PROVIDERS.items()}
        return {name: why for name, why in found.items() if why and name != "quack"}

    missing = {
        "liger": "liger-kernel is not installed",
        "cce": "cut-cross-entropy is not installed",
    }
    assert problems(case()) == missing
    assert problems(case(softcap=30.0)) == {**missing, "core": "it has no soft-cap"}
    nothing_else = "it computes nothing but the cross-entropy of a linear"
    without = {"bare", "core", "liger", "cce"}
    assert problems(case(program="jsd")) == dict.fromkeys(without, nothing_else)
    assert problems(case(layers=1)) == dict.fromkeys(without, nothing_else)
    assert not providers.PROVIDERS["quack"].softcap


class Scripted:
    """A worker that answers what it is told to, and counts."""

    asked: list[tuple[str, str]]
    errors: dict[str, float]
    log = ""

    def __init__(self, module: str, job: Case, timeout: float, **environ: str) -> None:
        self.name, self.again = job.provider, bool(environ)

    def answer(self) -> dict[str, object]:
        return {}

    def ask(self, command: str) -> dict[str, object]:
        Scripted.asked.append((self.name, command))
        found = {"seconds": 60.0 if self.name == "core" else 2.0, "bytes": 1 << 20}
        if self.again:
            found = {"seconds": 3.0 if command == "check" else 1.0, "bytes": 3 << 20}
        if command == "step" and self.name == "inductor" and len(Scripted.asked) > 12:
            raise KeyboardInterrupt
        if command == "step" and self.name == "auto_chunker":
            raise WorkerError("out of memory")
        if command == "check":
            off = {"loss": Scripted.errors.get(self.name, 1e-7)}
            found["seconds"] += 5.0 * (self.name == "fusedce")
            return {**found, "errors": {**EAGER, **off}, "rehearsed": self.name != "core"}
        return found

    def kill(self) -> None:
        Scripted.asked.append((self.name, "kill"))

    def close(self) -> None:
        Scripted.asked.append((self.name, "close"))


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(measure, "Worker", Scripted)
    Scripted.asked, Scripted.errors = [], {}
    return Scripted


def test_rounds_are_taken_in_turn_while_there_is_time(scripted):
    result = Result("", case())
    effort = Effort(rounds=9, seconds=5)
    measure.run(result, ["eager", "core"], effort, say=quiet)
    eager, core = result.rows
    assert eager.seconds == [2.0, 2.0]  # a third would end after 6 s
    assert not eager.alone
    assert core.seconds == [60.0]  # the checked step: another would take too long
    assert core.alone
    assert core.extra_bytes == 1 << 20
    assert scripted.asked == [
        ("eager", "check"), ("eager", "measure"), ("core", "check"), ("core", "close"),
        ("eager", "step"), ("eager", "step"), ("eager", "close"),
    ]  # fmt: skip


def test_an_interruption_keeps_what_there_is(scripted):
    result = Result("", case())
    names = ["eager", "inductor", "fusedce"]
    with pytest.raises(KeyboardInterrupt):
        measure.run(result, names, Effort(rounds=9), say=quiet)
    eager, inductor, fused = result.rows
    assert len(eager.seconds) == 3
    assert len(inductor.seconds) == len(fused.seconds) == 2
    assert [name for name, command in scripted.asked if command == "kill"] == names


def test_a_second_process_compiles_again_and_measures_memory(scripted):
    result = Result("", case(program="jsd"))
    names = ["eager", "fusedce", "auto_chunker", "core"]
    measure.run(result, names, Effort(rounds=1), KINDS["programs"], quiet)
    eager, fused, dies, core = result.rows
    assert (fused.compile_seconds, fused.second_seconds) == (5.0, 7.0)
    assert (eager.compile_seconds, eager.second_seconds) == (None, None)
    assert eager.extra_bytes == fused.extra_bytes == 3 << 20
    assert (dies.failure, dies.seconds) == ("out of memory", [])
    assert core.failure.startswith("not run")


def test_accuracy_is_not_refused_and_takes_no_time(scripted):
    scripted.errors |= {"fusedce": 1.0}
    result = Result("", case())
    measure.run(result, ["eager", "fusedce"], Effort(rounds=0), KINDS["accuracy"], quiet)
    assert {row.name: row.failure for row in result.rows} == dict.fromkeys(
        (ROUNDED, "eager", "fusedce"), ""
    )
    assert {command for _, command in scripted.asked} == {"check", "close"}


def test_the_exit_status_is_that_of_fusedce(scripted, tmp_path, capsys):
    file = tmp_path / "regions.md"
    argv = ["--suite", "regions", "--programs", "lora", "--n", "128", "--v", "16", "--rounds", "1"]
    argv += ["--providers", "eager", "fusedce", "--device", "cpu"]
    assert command.main([*argv, "--markdown", str(file)]) == 0
    assert "### low-rank adapter: N=128 D=256 V=16, float32, training\n" in file.read_text()
    scripted.errors["fusedce"] = 1.0
    assert command.main([*argv, "--layers", "2", "--markdown", str(file)]) == 1
    assert "float32, training, behind 2 transformer layers: fusedce: refused" in file.read_text()
    with pytest.raises(SystemExit, match="multiple of 128"):
        command.main([*argv, "--layers", "1", "--n", "130"])


# ---------------------------------------------------------------- what comes out


def synthetic() -> Result:
    """N=1024 D=512 V=1024 in bf16: gradients of 2 MiB, 6 N D V operations."""
    rows = [
        Row("bare", seconds=[1.0, 1.5, 3.0]),
        Row("inductor", errors=dict(EAGER), seconds=[1.0, 2.0, 4.0], extra_bytes=4 << 20),
        Row("core", errors=dict(EAGER), seconds=[8.0], alone=True, extra_bytes=3 << 20),
        Row("fusedce", errors=dict(EAGER), seconds=[0.5, 1.0, 2.0], extra_bytes=3 << 20),
        Row("half", failure="refused: dx is off | by 0.5"),
    ]
    return Result("llama", Case("", 1024, 512, 1024, "bfloat16", "cpu"), rows, dict(EAGER))


def lines_of(result: Result, kind: str) -> list[str]:
    return [line for line in command.section(result, kind).splitlines() if line.startswith("|")][2:]


def test_the_table():
    errors = "1.0e-07, 1.0e-06, 1.0e-06"
    assert lines_of(synthetic(), "loss") == [
        "| bare GEMMs | 1500 | 1000-3000 | 3 | 100% | 0.75 | - | - | - | - |",
        f"| inductor | 2000 | 1000-4000 | 3 | 75% | 1.00 | 4 | 1.00 | 2 | {errors} |",
        "| core's `linear_cross_entropy(options=...)` | 8000 | 8000-8000 | 1 (not in turn) | 19% "
        f"| 4.00 | 3 | 0.75 | 1 | {errors} |",
        f"| **fusedce** | 1000 | 500-2000 | 3 | 150% | 0.50 | 3 | 0.75 | 1 | {errors} |",
        "| half | - | - | - | - | - | - | - | - | refused: dx is off \\| by 0.5 |",
    ]


def test_the_table_of_programs():
    result = synthetic()
    for row, compiles, second in ((result.rows[1], 4.0, 2.0), (result.rows[3], 5.0, 1.0)):
        row.compile_seconds, row.second_seconds = compiles, second
    result.rows[3].matched, result.rows[3].rejected = 1, 2
    assert lines_of(result, "programs")[3] == (
        "| **fusedce** | 1000 | 500-2000 | 3 | 0.50 | 3 | 0.75 | 5.00 | 1.25 | 1.00 | 0.50 "
        "| 1 of 3 | 1.0e-06 |"
    )


def test_the_table_of_accuracy():
    rows = [
        Row(ROUNDED, errors=dict(EAGER), zeros={"dx": 0.0, "dw": 0.0}),
        Row("eager", errors=dict(EAGER), zeros={"dx": 0.5, "dw": 0.0012}),
        Row("fusedce", errors={**EAGER, "dw": 2e-9}, zeros={"dx": 0.0, "dw": 0.0}),
    ]
    lines = lines_of(Result("", case(dtype="float16"), rows), "accuracy")
    assert lines[1:] == [
        "| eager | 1.0e-07 | 1.0e-06 | 1.0e-06 | 1 | 50 % | 0.12 % |",
        "| **fusedce** | 1.0e-07 | 1.0e-06 | 2.0e-09 | 0.002 | 0 | 0 |",
    ]


def test_the_document_says_where_and_beside_whom():
    text = command.document([synthetic()], WHAT, QUICK)
    assert text.startswith(f"## Benchmarks: {heading(WHAT)}\n")
    assert WHAT["device_name"] in text
    assert f"torch {torch.__version__}" in text
    assert WHAT["date"][:10] in text
    assert "### llama: N=1024 D=512 V=1024, bfloat16, training" in text
    assert (
        "- fusedce: 0.50 x inductor's time, the fastest other, 0.75 x inductor's extra peak, "
        "1.00 x core's extra peak" in text
    )
    assert "Not good enough" not in text
    text = command.document([synthetic()], WHAT, QUICK._replace(memory=0.7))
    assert "\n- llama: N=1024 D=512 V=1024, bfloat16, training: 0.75 of inductor's memory" in text


def test_who_of_fusedce_may_fail():
    def found(name: str, failure: str) -> list[str]:
        return complaints([Result("", case(), [Row(name, failure)])], "loss", 1.0)

    assert found("fusedce", "out of memory")
    assert found("fusedce_tiled", "refused: dw is off")
    assert not found("fusedce_tiled", "out of memory")
    assert not found("core", "refused: dw is off")


def compared(eager: float, fusedce: float, least: float) -> Result:
    """One error for loss and gradients."""
    zeros = {"dx": 0.0, "dw": 0.0}
    named = ((ROUNDED, least), ("eager", eager), ("fusedce", fusedce))
    rows = [Row(who, errors=dict.fromkeys(EAGER, e), zeros=dict(zeros)) for who, e in named]
    return Result("", case(dtype="float16"), rows)


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
    result = compared(eager, fusedce, least)
    assert len(worse(result)) == count
    assert len(complaints([result], "accuracy", 1.0)) == count


def test_lost_gradients_and_what_was_not_compared_are_told():
    result = compared(1e-4, 1e-4, 1e-4)
    result.rows[2].zeros["dx"] = 0.5
    assert worse(result) == ["share of zeros in dx 0.5, eager 0, inf times"]
    result.rows[2].failure = "RuntimeError: no"
    assert worse(result) == ["not checked, fusedce: RuntimeError: no"]
    del result.rows[1]
    assert worse(result) == ["not checked, eager: not run; fusedce: RuntimeError: no"]
    assert torch.finfo(torch.float32).eps == kinds.LAST_DIGIT


def test_json_and_back():
    value = json.loads(json.dumps(synthetic().as_json()))
    assert Result.from_json(value) == synthetic()
    assert value["rows"][3]["seconds"] == [0.5, 1.0, 2.0]
    assert value["rows"][3]["share_of_bare"] == 1.5
    assert value["rows"][3]["scratch_bytes"] == 1 << 20
    assert value["rows"][3]["flops_per_second"] == 6 * 1024 * 512 * 1024


def test_scratch_is_what_the_gradients_do_not_need():
    training, evaluation = (
        Case("", 10, 4, 6, "bfloat16", "cpu", backward=b) for b in (True, False)
    )
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
    args = command.parser().parse_args([*argv, "--device", "cpu"])
    cases, _ = command.plan(args, command.suite_of(args))
    return [f"{head}: {case}" for head, case in cases]


def test_what_the_command_line_measures():
    assert planned("--n", "8", "--v", "16", "--dtype", "bfloat16", "--forward") == [
        ": N=8 D=512 V=16, bfloat16, evaluation"
    ]
    assert planned("--suite", "gpu", "--heads", "gemma-2-2b", "--n", "64", "--forward") == [
        "gemma-2-2b: N=64 D=2304 V=256000, soft-cap 30, bfloat16, evaluation"
    ]
    assert len(planned()) == 8
    _, effort = command.plan(command.parser().parse_args(["--rounds", "5"]), QUICK)
    assert effort == Effort(rounds=5, seconds=QUICK.seconds)
    assert planned("--suite", "parity", "--programs", CROSS_ENTROPY, "--v", "64") == [
        "cross-entropy: N=2048 D=256 V=64, float32, training"
    ]
    assert planned("--heads", "gemma-2-2b", "--programs", "jsd", "--n", "8", "--v", "16")[::3] == [
        ": N=8 D=2304 V=16, float32, training",
        ": N=8 D=2304 V=16, bfloat16, evaluation",
    ]  # no soft-cap, and not Gemma's head
    assert [text.split(", ")[1] for text in planned("--suite", "accuracy")] == [
        "float32",
        "bfloat16",
        "bfloat16 autocast of f32",
        "float16",
        "float16 + GradScaler",
        "float16 autocast of f32",
        "float16 autocast of f32 + GradScaler",
    ]
    args = command.parser().parse_args(["--suite", "regions", "--device", "cuda"])
    sizes = {
        str(dataclasses.replace(c, program="")) for _, c in command.suite_of(args).cases("cuda")
    }
    assert sizes == {"N=8192 D=2048 V=128256, bfloat16, training"}


def test_the_quick_suite_as_a_user_runs_it(tmp_path, capsys, monkeypatch):
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "markdown", "png")}
    argv = ["--suite", "quick", "--device", "cpu", "--n", "32", "--rounds", "2"]
    argv += ["--seconds", "600"]  # enough for two steps on a machine with other work
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
