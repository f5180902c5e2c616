"""The benchmark of a whole model: who computes something else gets no numbers."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.process import WorkerError
from benchmarks.training import turns
from benchmarks.training.__main__ import main
from fxpass.cli import training
from fxpass.cli.training import Job, Row, max_difference, refuse, table

LOSSES, NORMS = [10.0, 9.0, 8.0], [1.0, 2.0, 1.0]


def row(name: str, losses: list[float], norms: list[float]) -> Row:
    return Row(name, "", "", list(losses), list(norms), [0.5, 1.0], 8 << 20, 2 << 20)


@pytest.mark.parametrize(
    ("losses", "norms", "reason"),
    [
        ([10.0, 9.0, 8.0005], NORMS, ""),  # rounding
        ([10.0, 9.0, 8.1], NORMS, "refused: loss differs from eager's by 1.2e-02 at step 3"),
        (
            LOSSES,
            [1.0, 2.1, 1.0],
            "refused: gradient norm differs from eager's by 5.0e-02 at step 2",
        ),
        ([float("nan"), 9.0, 8.0], NORMS, "refused: loss differs from eager's by inf at step 1"),
        (LOSSES[:2], NORMS[:2], ""),  # interrupted: as far as both go
    ],
)
def test_curves_are_compared_with_eagers(losses, norms, reason):
    rows = [row("eager", LOSSES, NORMS), row("fusedce", losses, norms)]
    refuse(rows, "float32")
    assert rows[1].failure.startswith(reason)
    assert bool(rows[1].failure) == bool(reason) == (not rows[1].seconds)
    assert rows[0].seconds


def test_without_eager_there_are_no_numbers():
    rows = [Row("eager", failure="out of memory"), row("fusedce", LOSSES, NORMS)]
    refuse(rows, "float32")
    assert rows[1].failure.startswith("refused: eager has no numbers")


def test_two_overflows_do_not_differ():
    assert max_difference([math.inf, 2.0], [math.nan, 2.0]) == (0.0, 1)


def test_the_table_has_tokens_per_second():
    rows = [row("eager", LOSSES, NORMS), row("inductor", LOSSES, NORMS), Row("fusedce", "refused")]
    rows[1].seconds, rows[1].extra_bytes = [1.0, 4.0], 4 << 20
    refuse(rows, "float32")
    lines = table(rows, tokens=1000).splitlines()
    assert len(set(map(len, lines))) == 1
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    tail = ["8", "10.0000 to 8.0000", "0.0e+00, 0.0e+00"]
    assert cells == [
        ["eager", "1,500", "1,000-2,000", "2", "3.00", "2", "0.50", *tail],
        ["inductor", "625", "250-1,000", "2", "1.00", "4", "1.00", *tail],
        ["fusedce", *"-" * 8, "refused"],
    ]


class Scripted:
    """A worker whose second timed step fails, or that never starts; all note who is busy when."""

    log = "last words"
    steps = 0
    command = ""
    busy: list[str]

    def __init__(self, module: str, job: Job, timeout: float) -> None:
        self.name = job.provider

    def send(self, command: str) -> None:
        self.command, self.steps = command, self.steps + 1
        Scripted.busy.append(f"{self.name} begins {command}")

    def answer(self) -> dict[str, object]:
        if self.name == "missing":
            raise WorkerError("no such backend")
        if self.name == "dies" and self.steps == training.UNTIMED_STEPS + 2:
            raise WorkerError("killed")
        if not self.steps:
            return {}
        Scripted.busy.append(f"{self.name} is done")
        found = {"seconds": 1.0, "loss": 2.0, "norm": 3.0}
        return {**found, "peak_bytes": 5, "extra_bytes": 4} if self.command == "measure" else found

    def close(self) -> None:
        self.log = "not asked for"

    def kill(self) -> None:
        pass


def scripted(monkeypatch, names: list[str], device: str) -> list[Row]:
    monkeypatch.setattr(turns, "Worker", Scripted)
    Scripted.busy = []
    return turns.train("", Job("", device, "float32", 1, 64, 1000, 1, 32), names, 3, timeout=1.0)


def test_a_provider_that_fails_has_a_reason_and_no_numbers(monkeypatch, capsys):
    rows = scripted(monkeypatch, ["dies", "eager", "missing"], "cpu")
    assert [row.name for row in rows] == ["eager", "dies", "missing"]
    assert [row.failure for row in rows] == ["", "killed", "no such backend"]
    assert [row.log for row in rows] == ["", "last words", "last words"]
    assert [len(row.seconds) for row in rows] == [3, 0, 0]
    assert [row.extra_bytes for row in rows] == [4, 4, None]
    assert "dies: killed" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "together"), [("cpu", 2), ("cuda", 0)])
def test_who_is_measured_computes_alone(device, together, monkeypatch):
    scripted(monkeypatch, ["fusedce"], device)
    begins = [i for i, what in enumerate(Scripted.busy) if what.startswith("fusedce begins")]
    beside = [i for i in begins if Scripted.busy[i - 1].startswith("eager begins")]
    assert len(begins) == training.UNTIMED_STEPS + 3
    assert beside == begins[:together]  # steps that compile, where no kernel is chosen by its time


def test_a_tiny_model_as_a_user_trains_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FUSEDCE_INNER", "eager")  # Inductor would be tested for nothing
    size = ["--layers", "1", "--width", "64", "--classes", "1000", "--batch", "1", "--seq", "32"]
    argv = [*size, "--device", "cpu", "--dtype", "float32", "--rounds", "2"]
    argv += ["--providers", "fusedce", "--json", str(tmp_path / "out.json")]
    assert main([*argv, "--markdown", str(tmp_path / "out.md")]) == 0
    value = json.loads((tmp_path / "out.json").read_text())
    eager, fused = value["rows"]
    assert (eager["name"], fused["name"]) == ("eager", "fusedce")
    for found in (eager, fused):
        assert not found["failure"]
        assert len(found["seconds"]) == 2
        assert len(found["losses"]) == training.UNTIMED_STEPS + 2
        assert found["peak_bytes"] > found["extra_bytes"] > 0
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert len(set(eager["losses"])) == 5  # other tokens for every step, and it learns
    assert fused["counters"]["matched"] == 1
    assert "| fusedce  |" in capsys.readouterr().out
    assert "Llama of 1 layers x 64 x 1000 classes" in (tmp_path / "out.md").read_text()
