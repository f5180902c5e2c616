"""The benchmark of a whole model: who computes something else gets no numbers."""

from __future__ import annotations

import json

import pytest

from benchmarks.process import WorkerError
from benchmarks.training import __main__ as command
from benchmarks.training import turns
from benchmarks.training.__main__ import main
from benchmarks.training.job import Job
from benchmarks.training.table import Row, judge, table
from fxpass.cli.demo_worker import UNTIMED_STEPS


def row(name: str, timed: list[float], extra_bytes: int) -> Row:
    seconds = [9.0] * UNTIMED_STEPS + timed
    return Row(name, "", [10.0, 8.0], [1.0, 1.0], seconds, extra_bytes)


def lines_of(*results: tuple[str, list[Row]]) -> list[list[str]]:
    lines = table(results, tokens=1000).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_table_has_tokens_per_second():
    rows = [row("eager", [0.5, 1.0], 2 << 20), row("inductor", [1.0, 4.0], 4 << 20)]
    losses = "10.0000 to 8.0000", "0.0e+00", "-"
    assert lines_of(("Llama", [*rows, Row("fusedce", "refused")])) == [
        ["Llama", "eager", "1,500", "1,000-2,000", "2", "3.00", "2", "0.50", *losses],
        ["Llama", "inductor", "625", "250-1,000", "2", "1.00", "4", "1.00", *losses],
        ["Llama", "fusedce", *"-" * 8, "refused"],
    ]


def program(fusedce: list[float], inductor: float = 1.0, why: str = "") -> list[Row]:
    """A program's rows, judged; eager's losses are 2 and 1."""
    rows = [Row("eager"), Row("inductor"), Row("fusedce")]
    rows[0].add({"losses": [2.0, 1.0], "extra_bytes": 300 << 20})
    rows[1].add({"losses": [2.0, inductor], "extra_bytes": 200 << 20})
    told = {"fused": not why, "why": why}
    rows[2].add({"losses": fusedce, "extra_bytes": 50 << 20, **told})
    judge(rows, "float32", "a loop")
    return rows


def test_the_table_says_what_was_computed_whole():
    rows = program([2.0, 1.15], inductor=1.125, why="3 times | values")
    begin = ["a loop", "fusedce", "-", "-", "-", "-", "50", "0.25", "2.0000 to 1.1500", "1.5e-01"]
    assert lines_of(("a loop", rows))[2] == [*begin, "no: 3 times \\| values"]


@pytest.mark.parametrize(
    ("fusedce", "inductor", "wrong"),
    [
        ([2.0, 1.0001], 1.0, False),
        ([2.0, 1.0003], 1.0, True),
        ([2.0, 1.15], 1.125, False),  # the program carries rounding on
        ([2.0, 1.2], 1.125, True),
        ([2.0, 1.5], float("nan"), True),
        ([2.0, float("nan")], 1.0, True),
        ([2.0], 1.0, True),
        ([], 1.0, True),
    ],
)
def test_a_program_is_refused_whose_losses_differ(fusedce, inductor, wrong):
    found = program(fusedce, inductor)[2]
    assert found.failure.startswith("refused: losses differ") == wrong
    assert bool(found.failure) == wrong


def test_a_model_is_refused_whose_losses_differ():
    rows = [row("eager", [1.0], 1), row("fusedce", [1.0], 1)]
    rows[1].losses[1] += 0.01
    judge(rows, "float32", "")
    assert rows[1].failure.startswith("refused: losses differ from eager's at step 2")
    assert not rows[1].timed


class Scripted:
    """A worker whose second timed step fails, or that never starts; all note who is busy when."""

    log = "last words"
    steps = 0
    busy: list[str]

    def __init__(self, module: str, job: Job, timeout: float, **environ: str) -> None:
        self.name, self.program = job.provider, job.program

    def send(self, command: str) -> None:
        self.steps += 1
        Scripted.busy.append(f"{self.name} begins {command}")

    def answer(self) -> dict[str, object]:
        if self.name == "missing":
            raise WorkerError("no such backend")
        if self.name == "dies" and self.steps == UNTIMED_STEPS + 2:
            raise WorkerError("killed")
        if not self.steps:
            return {}
        Scripted.busy.append(f"{self.name} is done")
        if self.program:
            return {"losses": [2.0, 1.0], "extra_bytes": 1 << 20}
        return {"seconds": 1.0, "loss": 2.0, "norm": 3.0}

    def close(self) -> None:
        self.log = "not asked for"

    def kill(self) -> None:
        pass


def scripted(monkeypatch, names: list[str], device: str) -> list[Row]:
    monkeypatch.setattr(turns, "Worker", Scripted)
    Scripted.busy = []
    return turns.train(Job("", device, "float32", 1, 64, 1000, 1, 32), names, 3, timeout=1.0)


def test_a_provider_that_fails_has_a_reason_and_no_numbers(monkeypatch, capsys):
    rows = scripted(monkeypatch, ["dies", "eager", "missing"], "cpu")
    assert [row.name for row in rows] == ["eager", "dies", "missing"]
    assert [row.failure for row in rows] == ["", "killed", "no such backend"]
    assert [row.log for row in rows] == ["", "last words", "last words"]
    assert [len(row.timed) for row in rows] == [3, 0, 0]
    assert "dies: killed" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "together"), [("cpu", 2), ("cuda", 0)])
def test_who_is_measured_computes_alone(device, together, monkeypatch):
    scripted(monkeypatch, ["fusedce"], device)
    begins = [i for i, what in enumerate(Scripted.busy) if what.startswith("fusedce begins")]
    beside = [i for i in begins if Scripted.busy[i - 1].startswith("eager begins")]
    assert len(begins) == UNTIMED_STEPS + 3
    assert beside == begins[:together]  # steps that compile, where no kernel is chosen by its time


def test_programs_are_trained_alone_and_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(turns, "Worker", Scripted)
    Scripted.busy = []
    missing = command.PROGRAMS | {"scoring, no library": command.PROGRAMS["TRL's CPOTrainer"]}
    monkeypatch.setattr(command, "PROGRAMS", missing)
    monkeypatch.setattr(type(missing["TRL's CPOTrainer"]), "missing", property(lambda p: p.needs))
    file = tmp_path / "out.json"
    assert main(["--only", "^scoring", "--json", str(file)], trainers=True) == 1
    names = ("eager", "inductor", "fusedce")
    assert Scripted.busy == [
        t for name in names for t in (f"{name} begins step", f"{name} is done")
    ]
    results = json.loads(file.read_text())["results"]
    assert [len(found["rows"]) for found in results] == [3, 1]
    said = capsys.readouterr().out
    assert "| scoring as lm-evaluation-harness | fusedce |" in said
    assert "needs accelerate, datasets, trl |" in said


def test_a_tiny_model_as_a_user_trains_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FUSEDCE_INNER", "eager")  # Inductor would be tested for nothing
    size = ["--layers", "1", "--width", "64", "--classes", "1000", "--batch", "1", "--seq", "32"]
    argv = [*size, "--device", "cpu", "--dtype", "float32", "--rounds", "1"]
    argv += ["--providers", "fusedce", "--json", str(tmp_path / "out.json")]
    assert main([*argv, "--markdown", str(tmp_path / "out.md")]) == 0
    value = json.loads((tmp_path / "out.json").read_text())
    eager, fused = value["results"][0]["rows"]
    assert (eager["name"], fused["name"]) == ("eager", "fusedce")
    for found in (eager, fused):
        assert not found["failure"]
        assert len(found["seconds"]) == len(found["losses"]) == UNTIMED_STEPS + 1
        assert found["extra_bytes"] > 0
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert (
        len(set(eager["losses"])) == UNTIMED_STEPS + 1
    )  # other tokens for every step, and it learns
    assert fused["counters"]["matched"] == 1
    assert "| Llama | fusedce |" in capsys.readouterr().out
    assert "Llama of 1 layers x 64 x 1000 classes" in (tmp_path / "out.md").read_text()
