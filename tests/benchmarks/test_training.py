"""The benchmark of a whole model: who computes something else gets no numbers."""

from __future__ import annotations

import json

import pytest

from benchmarks.process import WorkerError
from benchmarks.training import turns
from benchmarks.training.__main__ import main
from benchmarks.training.job import Job
from benchmarks.training.table import Row, table
from fxpass.cli.demo_worker import UNTIMED_STEPS


def row(name: str, timed: list[float], extra_bytes: int) -> Row:
    seconds = [9.0] * UNTIMED_STEPS + timed
    return Row(name, "", [10.0, 8.0], [1.0, 1.0], seconds, extra_bytes)


def test_the_table_has_tokens_per_second():
    rows = [row("eager", [0.5, 1.0], 2 << 20), row("inductor", [1.0, 4.0], 4 << 20)]
    lines = table([*rows, Row("fusedce", "refused")], tokens=1000).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells == [
        ["eager", "1,500", "1,000-2,000", "2", "3.00", "2", "0.50", "10.0000 to 8.0000"],
        ["inductor", "625", "250-1,000", "2", "1.00", "4", "1.00", "10.0000 to 8.0000"],
        ["fusedce", *"-" * 6, "refused"],
    ]


class Scripted:
    """A worker whose second timed step fails, or that never starts; all note who is busy when."""

    log = "last words"
    steps = 0
    busy: list[str]

    def __init__(self, module: str, job: Job, timeout: float) -> None:
        self.name = job.provider

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


@pytest.mark.parametrize("loss", ["model", "copied"])
def test_a_tiny_model_as_a_user_trains_it(loss, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FUSEDCE_INNER", "eager")  # Inductor would be tested for nothing
    size = ["--layers", "1", "--width", "64", "--classes", "1000", "--batch", "1", "--seq", "32"]
    argv = [*size, "--loss", loss, "--device", "cpu", "--dtype", "float32", "--rounds", "2"]
    argv += ["--providers", "fusedce", "--json", str(tmp_path / "out.json")]
    assert main([*argv, "--markdown", str(tmp_path / "out.md")]) == 0
    value = json.loads((tmp_path / "out.json").read_text())
    eager, fused = value["rows"]
    assert (eager["name"], fused["name"]) == ("eager", "fusedce")
    for found in (eager, fused):
        assert not found["failure"]
        assert len(found["seconds"]) == len(found["losses"]) == UNTIMED_STEPS + 2
        assert found["extra_bytes"] > 0
    assert fused["losses"] == pytest.approx(eager["losses"], rel=1e-4)
    assert len(set(eager["losses"])) == 5  # other tokens for every step, and it learns
    assert fused["counters"].get("matched", 0) == (loss != "copied")
    assert "| fusedce |" in capsys.readouterr().out
    assert "Llama of 1 layers x 64 x 1000 classes" in (tmp_path / "out.md").read_text()
