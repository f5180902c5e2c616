from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch

from fxpass.cli import demo, demo_worker
from fxpass.cli.demo import Trial, first_difference
from fxpass.cli.demo_worker import Job, read_corpus, train_gpt
from fxpass.cli.memory import Memory

MIB = 2**20


CORPUS = torch.arange(200) % 90


def job(provider: str = "eager", dtype: str = "float32") -> Job:
    return Job(provider, "cpu", dtype, 1, 32, 100, 2, 8)


# ---------------------------------------------------------------- the data


def test_frequent_words_come_first_and_rare_ones_are_0(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("y" * 9)  # differs between machines
    (tmp_path / "b.py").write_bytes(b"\xff x = x + x\nx")
    assert read_corpus(3, tmp_path).tolist() == [2, 1, 0, 1, 0, 1, 1]


# ---------------------------------------------------------------- training and measuring


def test_a_batch_is_a_piece_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_worker, "train_steps", lambda job, make, batch_of: batch_of)
    batches = [train_gpt(job(name), CORPUS)(torch.Generator().manual_seed(3)) for name in ("", "a")]
    tokens, targets = batches[0].values()
    assert tokens.shape == targets.shape == (2, 8)
    assert torch.equal((tokens + 1) % 90, targets)  # the next word
    assert all(torch.equal(batches[0][name], batches[1][name]) for name in batches[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_is_deterministic_and_learns(dtype: str) -> None:
    first, second = (
        [a["loss"] for a in islice(train_gpt(job(dtype=dtype), CORPUS), 12)] for _ in "ab"
    )
    assert first[-1] < first[0] - 0.05
    assert first == second


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


def run(
    name: str, matched: int = 1, failure: str = "", losses: Sequence[float] = (1.0,) * 4
) -> Trial:
    ones = [1.0] * len(losses)
    return Trial(name, failure, list(losses), ones, ones, counters={"matched": matched})


@pytest.mark.parametrize(
    ("losses", "norms", "reason"),
    [
        ([10.0, 9.0, 8.0005], [1.0, 2.0, 1.0], ""),  # rounding
        ([10.0, 9.0, 8.1], [1.0, 2.0, 1.0], "refused: losses differ from eager's at step 3"),
        ([10.0, 9.0, 8.0], [1.0, 2.1, 1.0], "refused: norms differ from eager's at step 2"),
        ([math.nan, 9.0, 8.0], [1.0, 2.0, 1.0], "refused: losses differ from eager's at step 1"),
        ([10.0, 9.0], [1.0, 2.0], ""),  # interrupted: as far as both go
    ],
)
def test_curves_are_compared_with_eagers(
    losses: list[float], norms: list[float], reason: str
) -> None:
    seconds = [0.1] * 4
    eager = Trial("eager", losses=[10.0, 9.0, 8.0], norms=[1.0, 2.0, 1.0], seconds=seconds)
    other = Trial("fusedce", losses=losses, norms=norms, seconds=seconds)
    demo.refuse([eager, other], "float32")
    assert other.failure.startswith(reason)
    assert bool(other.failure) == bool(reason) == (not other.timed)
    assert eager.timed


def test_without_eager_there_are_no_numbers() -> None:
    runs = [Trial("eager", "out of memory"), run("fusedce")]
    demo.refuse(runs, "float32")
    assert runs[1].failure.startswith("refused: eager has no numbers")


def test_two_overflows_do_not_differ() -> None:
    assert first_difference([math.inf, 2.0], [math.nan, 2.0], 1e-4) is None


@pytest.mark.parametrize(
    ("fused", "found"),
    [
        (run("fusedce"), ""),
        (run("fusedce", matched=0), "fusedce fused nothing, so there is nothing to compare\n"),
        (run("fusedce", failure="died"), "fusedce: died\n"),
        (
            run("fusedce", losses=[1.0, 2.0]),
            "fusedce: refused: losses differ from eager's at step 2 (bound 1e-04)\n",
        ),
    ],
)
def test_what_is_a_problem(
    fused: Trial, found: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "train_in_turn", lambda *_: [run("eager", matched=0), fused])
    assert demo.compare_providers(job(), 4, ["fusedce"]) == bool(found)
    assert capsys.readouterr().err == (f"fxpass demo: {found}" if found else "")


def test_a_provider_that_fails_shows_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    runs = demo.train_in_turn(job(), 4, ["eager", "nonsense"], {**os.environ})
    eager, nonsense = runs
    assert (eager.name, eager.failure, len(eager.losses), len(eager.timed)) == ("eager", "", 4, 1)
    assert nonsense.failure == "ended with status 1: see its error"
    errors = capfd.readouterr().err
    assert "eager step 4: " in errors
    assert "Invalid backend" in errors
    assert demo.report(runs, 16).count("eager  ") == 2


def test_curves_are_sampled_from_the_first_step_to_the_last() -> None:
    long = run("eager", losses=[float(i) for i in range(30)])
    head, curve = demo.report([long], 16).splitlines()[:2]
    assert (head.split()[3:5], head.split()[-1]) == (["1", "4"], "30")
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
    rows = re.findall(r"^  (\w+) +[\d,]+ +- ", ran.stdout, re.MULTILINE)
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
