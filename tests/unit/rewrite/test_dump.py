"""FUSEDCE_DUMP: what is written for each graph."""

from __future__ import annotations

import logging
import os

import pytest
import torch
import torch.nn.functional as F
from torch._logging._internal import trace_log

from fxpass.kernels.call import ASSUMED, Launch
from fxpass.kernels.render import Kernel
from fxpass.report import explain
from fxpass.rewrite import dump

INPUTS = (torch.ones(4, 8), torch.ones(10, 8, requires_grad=True), torch.zeros(4).long())


def loss(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def summed(x, w, target):
    return F.cross_entropy(F.linear(x, w), target, reduction="sum")


def no_loss(x, w, target):
    return x.tanh().sum() + w.sum()


@pytest.fixture(autouse=True)
def _in_eager(monkeypatch):
    """What ``explain`` reads: loops are not compiled."""
    monkeypatch.setenv("FUSEDCE_INNER", "eager")


def compiled(fn, **options):
    options = {f"fusedce.{name}": value for name, value in options.items()}
    return torch.compile(fn, backend="fusedce", options={"fusedce.inner": "eager", **options})


@pytest.mark.parametrize("by_environment", [True, False])
def test_a_graph_before_and_after_and_its_kernels(by_environment, tmp_path, monkeypatch):
    folder = tmp_path / "made" / "here"  # neither exists
    if by_environment:
        monkeypatch.setenv("FUSEDCE_DUMP", str(folder))
    compiled(loss, **({} if by_environment else {"dump": folder}))(*INPUTS)
    monkeypatch.delenv("FUSEDCE_DUMP", raising=False)
    report = explain(loss, *INPUTS)
    (before,) = folder.glob(f"graph_{os.getpid()}_*_before.txt")
    after = before.with_name(before.name.replace("before", "after"))
    assert before.read_text() == report.before[0] + "\n"
    assert after.read_text() == report.after[0] + "\n"
    assert "fxpass.rows(" in after.read_text()
    (kernel,) = report.kernels
    assert (folder / f"{kernel.name}.py").read_text() == kernel.source
    assert len(list(folder.iterdir())) == 3


def test_the_trace_log_has_both_graphs_and_the_report():
    """``TORCH_TRACE``, of which tlparse makes pages."""
    records, artifacts = [], {}
    handler = logging.Handler()
    handler.emit = records.append
    trace_log.addHandler(handler)
    try:
        torch._dynamo.reset()
        compiled(loss)(*INPUTS)
    finally:
        trace_log.removeHandler(handler)
    for record in records:
        metadata = getattr(record, "metadata", {}).get("artifact", {})
        if metadata.get("name", "").startswith("fxpass_"):
            artifacts[metadata["name"]] = record.payload
    report = explain(loss, *INPUTS)
    assert artifacts == {
        "fxpass_before": report.before[0],
        "fxpass_after": report.after[0],
        "fxpass_report": str(report.matches[0]),
    }


def test_two_graphs_give_two_pairs(tmp_path):
    compiled(loss, dump=tmp_path)(*INPUTS)
    compiled(summed, dump=tmp_path)(*INPUTS)
    befores = sorted(tmp_path.glob("*_before.txt"))
    assert ["reduction='sum'" in path.read_text() for path in befores] == [False, True]
    afters = sorted(tmp_path.glob("*_after.txt"))
    assert ["aten.div(" in path.read_text() for path in afters] == [True, False]
    assert [a.name.replace("after", "before") for a in afters] == [b.name for b in befores]


def test_a_graph_without_a_match_is_written_as_it_stays(tmp_path):
    compiled(no_loss, dump=tmp_path)(*INPUTS)
    after, before = sorted(tmp_path.iterdir())
    assert before.name.endswith("_before.txt")
    assert after.read_text() == before.read_text() == explain(no_loss, *INPUTS).before[0] + "\n"


def test_nothing_is_written_without_the_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compiled(loss)(*INPUTS)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    expected = compiled(loss)(*INPUTS)
    torch.testing.assert_close(compiled(loss, dump=file / "folder")(*INPUTS), expected)
    (record,) = (r for r in caplog.records if r.name == dump.__name__)
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"FUSEDCE_DUMP={file / 'folder'}: ")


def test_write_numbers_the_graphs_of_a_process(tmp_path):
    kernels = (Kernel("k1", "1\n"), Kernel("k2", "2\n"))
    launched = [Launch(ASSUMED, kernel, ()) for kernel in kernels]
    for _ in range(2):
        dump.write_files(str(tmp_path), "before", "after", launched)
    assert (tmp_path / "k1.py").read_text() == "1\n"
    assert (tmp_path / "k2.py").read_text() == "2\n"
    graphs = sorted(path.stem.split("_")[1:] for path in tmp_path.glob("*.txt"))
    assert [pid for pid, *_ in graphs] == [str(os.getpid())] * 4
    first, second = sorted({int(number) for _, number, _ in graphs})
    assert second == first + 1
    assert {path.read_text() for path in tmp_path.glob("*_before.txt")} == {"before\n"}
    assert {path.read_text() for path in tmp_path.glob("*_after.txt")} == {"after\n"}
