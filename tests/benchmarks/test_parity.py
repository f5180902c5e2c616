"""The table of memory parity: what is refused, what is over the limit, and that it can be run."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parity import __main__ as parity
from benchmarks.parity.__main__ import Row, wrong
from benchmarks.parity.cases import PROGRAMS, Sizes
from benchmarks.parity.worker import Job, Session


def row(ours: list[int], alone: list[int]) -> Row:
    steps = {True: [n << 20 for n in ours], False: [n << 20 for n in alone]}
    return Row("a", matched=1, rejected=2, bytes=steps, seconds={True: [2.0], False: [1.0]})


@pytest.mark.parametrize(
    ("ours", "alone", "kept", "cells"),
    [
        ([105, 90, 300], [100, 100, 1], True, ["a", "1 of 3", "105", "100", "1.05", "2.00"]),
        ([110], [100], False, ["a", "1 of 3", "110", "100", "1.10 (more than 1.05)", "2.00"]),
    ],
)
def test_medians_are_compared(ours, alone, kept, cells):
    made = row(ours, alone)
    assert made.kept == kept
    assert made.cells() == cells


def test_wrong_results_get_no_numbers():
    assert not wrong(True, 1e-6)
    refused = Row("a", failure=wrong(True, 1e-2))
    assert not refused.kept
    assert refused.cells()[-1].startswith("refused: with fxpass the results are 1.0e-02 from")
    assert wrong(False, float("nan"))


@pytest.mark.parametrize("program", ["plain", "no_grad block", "log-probabilities, 4 chunks"])
def test_a_session_compiles_and_measures(program, monkeypatch):
    monkeypatch.setenv("FUSEDCE", "1")
    session = Session(Job(program, 64, 8, 50, "aot_eager", True))
    answer = session.check()
    assert not wrong(True, answer["distance"])
    assert answer["matched"] or program == "plain"
    assert session.measure()["bytes"] is not None
    assert session.time()["seconds"] > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_has_gradients(program):
    made = PROGRAMS[program](Sizes(64, 8, 50))
    outputs = made.step(made.function)
    assert all(torch.isfinite(t).all() for t in outputs)
    assert made.gradients()


def test_the_command_line(tmp_path, capsys):
    file = tmp_path / "parity.md"
    small = ["--n", "32", "--d", "4", "--v", "9", "--rounds", "1", "--inner", "aot_eager"]
    status = parity.main([*small, "--programs", "cross-entropy", "--markdown", str(file)])
    text = capsys.readouterr().out
    assert file.read_text() == text
    assert "| cross-entropy | 1 of 1 |" in text
    assert status in (0, 1)  # so small a step adds pages here and there
