from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fxpass.cli import demo
from fxpass.cli.demo_worker import TextJob, session
from fxpass.cli.memory import Memory
from fxpass.cli.training import Row, train

MIB = 2**20


def job(tmp_path: Path, provider: str = "eager", dtype: str = "float32") -> TextJob:
    file = tmp_path / "corpus.pt"
    torch.save((torch.arange(200) % 90).int(), file)
    return TextJob(provider, "cpu", dtype, 1, 32, 100, 2, 8, str(file))


# ---------------------------------------------------------------- the data


def test_frequent_words_come_first_and_rare_ones_are_0(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("y" * 9)  # differs between machines
    (tmp_path / "b.py").write_bytes(b"\xff x = x + x\nx")
    assert demo.read_corpus(3, tmp_path).tolist() == [2, 1, 0, 1, 0, 1, 1]


def test_reading_ends_when_every_class_has_a_word(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.py").write_text(f"{name} {name}{name} ")
    corpus = demo.read_corpus(4, tmp_path)
    assert len(corpus) == 4  # of two files
    assert corpus.tolist() == [1, 2, 3, 0]


# ---------------------------------------------------------------- training and measuring


def test_every_provider_gets_the_same_batches(tmp_path: Path) -> None:
    batches = []
    for provider in ("eager", "fusedce"):
        made = session(job(tmp_path, provider))
        batches.append(made.batch(torch.Generator().manual_seed(3)))
    eager, fused = batches
    assert eager["tokens"].shape == eager["targets"].shape == (2, 8)
    assert all(torch.equal(eager[name], fused[name]) for name in eager)
    # a window is a piece of the text: the next word is the target
    assert torch.equal((eager["tokens"] + 1) % 90, eager["targets"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_is_deterministic_and_learns(dtype: str, tmp_path: Path) -> None:
    first, second = (session(job(tmp_path, dtype=dtype)) for _ in range(2))
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


def row(name: str, matched: int = 1, steps: int = 4, failure: str = "", log: str = "") -> Row:
    ones = [1.0] * steps
    return Row(name, failure, log, ones, ones, [0.1], counters={"matched": matched})


@pytest.mark.parametrize(
    ("fused", "found"),
    [
        (row("fusedce"), []),
        (row("fusedce", matched=0), ["fusedce fused nothing, so there is nothing to compare"]),
        (row("fusedce", steps=3), ["fusedce: interrupted after 3 of 4 steps"]),
        (row("fusedce", failure="died", log="a\nb"), ["fusedce: died\na\nb"]),
        (row("fusedce", failure="refused: loss differs"), ["fusedce: refused: loss differs"]),
    ],
)
def test_what_is_a_problem(fused: Row, found: list[str]) -> None:
    assert demo.problems([row("eager", matched=0), fused], 4) == found


def test_a_provider_that_fails_tells_what_it_printed_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = train(demo.WORKER, job(tmp_path), ["nonsense"], rounds=1)
    eager, nonsense = rows
    assert (eager.name, eager.failure, len(eager.seconds)) == ("eager", "", 1)
    (problem,) = demo.problems(rows, 4)
    assert problem.startswith("nonsense: ")
    assert "Traceback" in nonsense.log
    assert nonsense.log.splitlines()[-1] in problem
    assert "eager 4/4" in capsys.readouterr().err
    assert "| nonsense |" in demo.report(rows, 16)


def test_curves_are_sampled_from_the_first_step_to_the_last() -> None:
    long = Row("eager", losses=[float(i) for i in range(30)])
    head, curve = demo.report([long], 16).splitlines()[:2]
    assert (head.split()[2:4], head.split()[-1]) == (["1", "4"], "30")
    assert (curve.split()[0], curve.split()[-1]) == ("eager", "29.000")


def test_the_picture_cuts_nothing_off(tmp_path: Path) -> None:
    """Its margins are white: a title that is wider than its axes would end at the border."""
    image = pytest.importorskip("matplotlib.image")
    rows = [row(name) for name in ("eager", "inductor", "fusedce")]
    assert demo.draw(rows, job(tmp_path), tmp_path / "picture.png")
    pixels = torch.tensor(image.imread(tmp_path / "picture.png"))
    assert pixels.min() == 0
    for side in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert side.min() == 1


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
    assert "fusedce 4/4: " in ran.stderr  # no terminal, so no bar
    assert "fusedce: 1 fused, 0 not fused" in ran.stdout
    assert "demo_worker.py" in ran.stdout  # the line of the loss
    assert "[64, 50304]" in ran.stdout
    assert "Inductor cannot run here" in ran.stdout
    rows = re.findall(r"^\| (\w+) +\| [\d,]+ ", ran.stdout, re.MULTILINE)
    assert rows == ["eager", "fusedce"]
    assert (tmp_path / "fxpass-demo.png").exists() == (find_spec("matplotlib") is not None)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_before_the_first_step_leaves_nothing(name: str, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group of processes, as from a terminal."""
    program = [sys.executable, "-m", "fxpass", "demo", "--device", "cpu", "--providers", "eager"]
    demo = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "CXX": "no-such-compiler"},
        start_new_session=True,
    )
    assert demo.stdout
    assert any(line.startswith("logits") for line in demo.stdout)
    while not list(tmp_path.glob("fxpass-demo-*/corpus.pt")):
        time.sleep(0.01)
    time.sleep(1)  # the worker imports torch for longer
    send = os.killpg if name == "SIGINT" else os.kill
    send(demo.pid, getattr(signal, name))
    out, errors = demo.communicate(timeout=300)
    assert "Traceback" not in errors
    assert out == ""
    if name == "SIGINT":
        assert (demo.returncode, "interrupted after 0 of 10 steps" in errors) == (1, True)
    else:
        assert (demo.returncode, errors) == (128 + signal.SIGTERM, "")
    assert not list(tmp_path.glob("fxpass-demo-*"))
    with pytest.raises(ProcessLookupError):
        os.killpg(demo.pid, 0)
