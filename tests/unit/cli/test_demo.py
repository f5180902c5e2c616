from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fxpass.cli import demo
from fxpass.cli.demo_worker import TextJob, read_corpus, session
from fxpass.cli.memory import Memory
from fxpass.cli.training import Row

MIB = 2**20


CORPUS = torch.arange(200) % 90


def job(provider: str = "eager", dtype: str = "float32") -> TextJob:
    return TextJob(provider, "cpu", dtype, 1, 32, 100, 2, 8, steps=4)


# ---------------------------------------------------------------- the data


def test_frequent_words_come_first_and_rare_ones_are_0(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("y" * 9)  # differs between machines
    (tmp_path / "b.py").write_bytes(b"\xff x = x + x\nx")
    assert read_corpus(3, tmp_path).tolist() == [2, 1, 0, 1, 0, 1, 1]


def test_reading_ends_when_every_class_has_a_word(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(f"{name} {name}{name} ")
    corpus = read_corpus(4, tmp_path)
    assert len(corpus) == 4  # of two files
    assert corpus.tolist() == [1, 2, 3, 0]


# ---------------------------------------------------------------- training and measuring


def test_every_provider_gets_the_same_batches() -> None:
    batches = []
    for provider in ("eager", "fusedce"):
        made = session(job(provider), CORPUS)
        batches.append(made.batch(torch.Generator().manual_seed(3)))
    eager, fused = batches
    assert eager["tokens"].shape == eager["targets"].shape == (2, 8)
    assert all(torch.equal(eager[name], fused[name]) for name in eager)
    # a window is a piece of the text: the next word is the target
    assert torch.equal((eager["tokens"] + 1) % 90, eager["targets"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_is_deterministic_and_learns(dtype: str) -> None:
    first, second = (session(job(dtype=dtype), CORPUS) for _ in range(2))
    losses = [first.step()["loss"] for _ in range(12)]
    assert losses[-1] < losses[0] - 0.05
    assert [second.step()["loss"] for _ in range(12)] == losses


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_memory_is_the_peak_since_start() -> None:
    memory = Memory(torch.device("cpu"))
    torch.ones(256 * MIB // 4)  # before the start: must not count
    memory.start()
    torch.ones(64 * MIB // 4)
    added = memory.added()
    assert added is not None
    assert 60 * MIB < added < 128 * MIB


# ---------------------------------------------------------------- judging


def row(name: str, matched: int = 1, failure: str = "") -> Row:
    ones = [1.0] * 4
    return Row(name, failure, "", ones, ones, [0.1], counters={"matched": matched})


@pytest.mark.parametrize(
    ("fused", "found"),
    [
        (row("fusedce"), ""),
        (row("fusedce", matched=0), "fusedce fused nothing, so there is nothing to compare\n"),
        (row("fusedce", failure="died"), "fusedce: died\n"),
        (
            Row("fusedce", losses=[1.0, 2.0], norms=[1.0, 1.0], counters={"matched": 1}),
            "fusedce: refused: loss differs from eager's by 1.0e+00 at step 2 (bound 1e-04)\n",
        ),
    ],
)
def test_what_is_a_problem(
    fused: Row, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train", lambda *_: [row("eager", matched=0), fused])
    assert demo.run(job(), ["fusedce"]) == bool(found)
    assert capsys.readouterr().err == (f"fxpass demo: {found}" if found else "")


def test_a_provider_that_fails_shows_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    rows = demo.train(job(), ["eager", "nonsense"], {**os.environ})
    eager, nonsense = rows
    assert (eager.name, eager.failure, len(eager.losses), len(eager.seconds)) == ("eager", "", 4, 1)
    assert nonsense.failure == "ended with status 1: see its error"
    errors = capfd.readouterr().err
    assert "eager step 4: " in errors
    assert "Invalid backend" in errors
    assert "| nonsense |" in demo.report(rows, 16)


def test_curves_are_sampled_from_the_first_step_to_the_last() -> None:
    long = Row("eager", losses=[float(i) for i in range(30)])
    head, curve = demo.report([long], 16).splitlines()[:2]
    assert (head.split()[2:4], head.split()[-1]) == (["1", "4"], "30")
    assert (curve.split()[0], curve.split()[-1]) == ("eager", "29.000")


# ---------------------------------------------------------------- the whole


def test_the_demo_as_a_user_runs_it(tmp_path: Path) -> None:
    tiny = ["--device", "cpu", "--steps", "4", "--layers", "1", "--heads", "1", "--batch", "1"]
    ran = subprocess.run(
        [sys.executable, "-m", "fxpass", "demo", *tiny, "--seq", "64"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # Without a C++ compiler: two compilations by Inductor take minutes, and whoever runs the
        # demo itself sees them.
        env={**os.environ, "FUSEDCE_INNER": "aot_eager", "CXX": "no-such-compiler"},
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "fxpass demo:" not in ran.stderr
    assert "fusedce step 4: " in ran.stderr
    assert "fusedce: 1 fused, 0 not fused" in ran.stdout
    assert "demo_worker.py" in ran.stdout  # the line of the loss
    assert "[64, 50304]" in ran.stdout
    assert "Inductor cannot run here" in ran.stdout
    rows = re.findall(r"^\| (\w+) +\| [\d,]+ ", ran.stdout, re.MULTILINE)
    assert rows == ["eager", "fusedce"]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs Linux")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_worker_too(name: str, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group of processes, as from a terminal."""
    program = [sys.executable, "-m", "fxpass", "demo", "--device", "cpu", "--providers", "eager"]
    demo = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "CXX": "no-such-compiler"},
        start_new_session=True,
    )
    assert demo.stdout
    assert any(line.startswith("logits") for line in demo.stdout)
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
    while not (found := children.read_text().split()):
        time.sleep(0.01)
    time.sleep(1)  # the worker imports torch for longer
    send = os.killpg if name == "SIGINT" else os.kill
    send(demo.pid, getattr(signal, name))
    out, errors = demo.communicate(timeout=300)
    assert (out, errors) == ("", "")
    assert demo.returncode == (130 if name == "SIGINT" else 128 + signal.SIGTERM)
    for pid in (demo.pid, *map(int, found)):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
