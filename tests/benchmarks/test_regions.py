"""The benchmark of regions: exact answers, what is refused, and one run with tiny sizes."""

from __future__ import annotations

import doctest
import json

import pytest
import torch

from benchmarks.process import WorkerError
from benchmarks.regions import __main__ as command
from benchmarks.regions import programs
from benchmarks.regions.__main__ import Row, main, measure, table
from benchmarks.regions.programs import PROGRAMS, Case
from benchmarks.regions.worker import Session

SIZES = (10, 4, 16, "float32", "cpu")


def test_examples():
    found = doctest.testmod(programs)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_exact_answer_is_that_of_a_wide_program(name, layers, monkeypatch):
    monkeypatch.setattr(programs, "EXACT_ROWS", 5 if layers else 4)  # 4: the last part has two
    case = Case(name, "eager", *SIZES, layers=layers)
    tensors = [
        t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t
        for t in case.tensors().values()
    ]
    loss = case.program(case.stack().double())(*tensors)
    loss.backward()
    exact = case.answer()
    torch.testing.assert_close(exact["loss"], loss.detach())
    gradients = [t.grad for t in tensors if t.grad is not None]
    assert list(exact)[1:] == [f"d{name}" for name in case.what.trained]
    for found, true in zip(list(exact.values())[1:], gradients, strict=True):
        torch.testing.assert_close(found, true)


def test_a_session_checks_measures_and_times(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # which a session sets
    file = tmp_path / "exact.pt"
    session = Session(Case("kl", "eager", *SIZES, str(tmp_path), str(file)))
    assert session.first()["seconds"] >= 0
    errors = session.check()["errors"]
    assert errors.keys() == {"loss", "dx", "dweight"}
    assert max(errors.values()) < 1e-6
    assert file.is_file()
    assert session.check()["errors"] == errors  # by the file
    assert session.measure().keys() == {"bytes"}
    assert session.step()["seconds"] > 0


def test_layers_are_the_same_in_every_process_and_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setattr(programs, "EXACT_ROWS", 5)
    case = Case("top_p", "eager", *SIZES, str(tmp_path), str(tmp_path / "exact.pt"), layers=2)
    one, other = case.stack().state_dict(), case.stack().state_dict()
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    session = Session(case)
    assert max(session.check()["errors"].values()) < 1e-5
    assert all(leaf.grad is None for leaf in session.leaves)
    session._run()
    assert all(leaf.grad is not None for leaf in session.leaves)


class Scripted:
    """A worker that says what it is told to; ``second`` counts its processes."""

    log = ""
    errors: dict[str, float]
    processes: list[str]

    def __init__(self, module: str, case: Case, timeout: float) -> None:
        self.case = case
        self.processes.append(case.provider)

    def answer(self):
        return {}

    def ask(self, what: str):
        if what == "check":
            return {"errors": {"loss": self.errors.get(self.case.provider, 1e-7)}}
        if what == "measure":
            return {"bytes": {"inductor": 4 << 20, "fusedce": 1 << 20}.get(self.case.provider)}
        if what == "first":
            return {"seconds": 5.0 if self.processes.count(self.case.provider) == 1 else 1.5}
        if self.case.provider == "inductor" and "steps" in self.errors:
            raise WorkerError("out of memory")
        return {"seconds": 0.5}

    def close(self):
        pass

    kill = close


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(command, "Worker", Scripted)
    monkeypatch.setattr(Scripted, "errors", {}, raising=False)
    monkeypatch.setattr(Scripted, "processes", [], raising=False)
    return Scripted


def cells(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]


def test_numbers_are_in_units_of_inductors(scripted):
    found = measure(Case("jsd", "", *SIZES), ["inductor", "fusedce"], rounds=2, timeout=9)
    assert scripted.processes == ["eager", "inductor", "fusedce", "inductor", "fusedce"]
    lines = cells(table(found))
    assert lines[2] == [
        *("**fusedce**", "500.0", "500.0-500.0", "2", "1.00", "1", "0.25"),
        *("5.00", "1.00", "1.50", "1.00", "1.0e-07"),
    ]


def test_who_is_wrong_or_dies_gets_no_numbers(scripted):
    scripted.errors |= {"fusedce": 1e-2, "steps": 0.0}
    found = measure(Case("jsd", "", *SIZES), ["inductor", "fusedce"], rounds=2, timeout=9)
    assert found[1].failure == "out of memory"
    assert found[2].failure.startswith("refused: loss is off by 1.0e-02")
    assert not found[1].seconds
    assert not found[2].seconds
    assert scripted.processes == ["eager", "inductor", "fusedce"]
    assert cells(table(found))[2][:2] == ["**fusedce**", found[2].failure]


def test_the_exit_status_is_that_of_fusedce(scripted, tmp_path, capsys):
    file, text = tmp_path / "regions.json", tmp_path / "regions.md"
    arguments = ["--n", "10", "--d", "4", "--v", "16", "--rounds", "1", "--programs", "lora"]
    assert main([*arguments, "--json", str(file), "--markdown", str(text)]) == 0
    assert "### low-rank adapter: N=10 D=4 V=16, float32\n" in text.read_text()
    rows = json.loads(file.read_text())["results"]["lora"]
    assert [row["name"] for row in rows] == ["eager", "inductor", "fusedce"]
    assert Row(**rows[2]).second_seconds == 1.5
    scripted.errors["fusedce"] = 1.0
    assert main(arguments) == 1
    assert "refused" in capsys.readouterr().out


def test_the_title_says_the_layers(scripted, capsys):
    arguments = ["--v", "16", "--rounds", "1", "--programs", "lora", "--layers", "2"]
    assert main(["--n", "128", "--d", "4", *arguments]) == 0
    assert "V=16, float32, behind 2 transformer layers\n" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--n", "130", *arguments])  # not whole sequences
    assert "multiple of 128" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("layers", ["0", "1"])
def test_a_tiny_run(layers, capsys):
    sizes = ["--n", "128", "--d", "8", "--v", "200", "--rounds", "1"]
    assert main(["--programs", "kl", *sizes, "--layers", layers]) == 0
    lines = cells(capsys.readouterr().out.split("\n\n")[1])
    assert [line[0] for line in lines] == ["eager", "inductor", "**fusedce**"]
    assert all(len(line) == len(command.COLUMNS) for line in lines)
