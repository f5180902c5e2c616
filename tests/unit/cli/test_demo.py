from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from array import array
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fxpass.cli import demo, demo_report, demo_worker
from fxpass.cli.demo_data import Corpus, read_corpus
from fxpass.cli.demo_worker import Job, Result

MIB = 2**20


def job(tmp_path: Path, **changes: object) -> Job:
    file = tmp_path / "corpus.pt"
    torch.save((torch.arange(200) % 90).int(), file)
    made = Job(
        provider="eager",
        device="cpu",
        dtype="float32",
        steps=4,
        batch=2,
        seq=8,
        layers=1,
        width=32,
        classes=100,
        corpus=str(file),
    )
    return dataclasses.replace(made, **changes)


def result(**changes: object) -> Result:
    made = Result(
        losses=[10.0, 9.0, 8.0, 7.0],
        norms=[4.0, 3.0, 2.0, 1.0],
        step_seconds=0.5,
        compile_seconds=20.0,
        peak_bytes=300 * MIB,
        rest_bytes=100 * MIB,
        counters={"matched": 1, "rejected": 0, "casts": 0},
        notes=["fused: model.py:7 the user's line"],
    )
    return dataclasses.replace(made, **changes)


def options(tmp_path: Path, *providers: str) -> demo.Options:
    return demo.Options(
        providers=providers,
        device="cpu",
        dtype="float32",
        steps=4,
        batch=1,
        seq=32,
        layers=1,
        heads=1,
        picture=tmp_path / "picture.png",
    )


# ---------------------------------------------------------------- the data


def test_frequent_tokens_come_first_and_rare_ones_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = x + x")  # x x x, = + and an empty newline and end
    corpus = read_corpus(3, tmp_path)
    assert corpus.indices.tolist() == [1, 0, 1, 0, 1, 2, 2]


def test_few_tokens_leave_classes_as_padding_and_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    corpus = read_corpus(demo.CLASSES, tmp_path)
    assert corpus.classes == demo.CLASSES >= 50_000
    assert "50,298 classes are padding" in str(corpus)


def test_what_pip_installed_and_broken_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "b.py").write_text("y\n")
    (tmp_path / "c.py").write_text("(\n")
    (tmp_path / "d.py").write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match="no Python sources"):
        read_corpus(10, tmp_path)
    (tmp_path / "e.py").write_text("x\n")
    assert read_corpus(10, tmp_path).files == 1


# ---------------------------------------------------------------- training and measuring


def test_every_provider_gets_the_same_batches(tmp_path: Path) -> None:
    first = demo_worker.batches(job(tmp_path))
    assert first.shape == (4, 2, 9)
    assert first.dtype == torch.int64
    assert torch.equal(first, demo_worker.batches(job(tmp_path, provider="fusedce")))
    # a window is a piece of the text: the next token is the target
    assert torch.equal((first[..., 0] + 1) % 90, first[..., 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_training_is_deterministic_and_learns(dtype: str, tmp_path: Path) -> None:
    reports: list[dict[str, object]] = []
    small = job(tmp_path, dtype=dtype, steps=12)
    first = demo_worker.train(small, reports.append)
    assert [r["step"] for r in reports] == list(range(1, 13))
    assert first.losses[-1] < first.losses[0] - 0.05
    assert demo_worker.train(small, reports.append).losses == first.losses


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_memory_is_the_peak_since_start() -> None:
    memory = demo_worker.memory_of(torch.device("cpu"))
    torch.ones(256 * MIB // 4)  # before the start: must not count
    memory.start()
    torch.ones(64 * MIB // 4)
    peak = memory.peak()
    assert peak is not None
    assert memory.rest is not None
    assert 60 * MIB < peak - memory.rest < 128 * MIB


def test_a_worker_that_fails_tells_what_it_printed_last(tmp_path: Path) -> None:
    progress = demo.Progress("nonsense", 4)
    with pytest.raises(demo.WorkerError, match="nonsense"):
        demo._train(job(tmp_path, provider="nonsense"), tmp_path, dict(os.environ), progress)


# ---------------------------------------------------------------- judging


def test_curves_that_differ_by_rounding_agree() -> None:
    other = result(losses=[10.0, 9.0005, 8.0, 7.0])
    loss, norm = demo_report.compare({"eager": result(), "fusedce": other}, "float32")
    assert loss.agrees
    assert norm.agrees
    assert loss.step == 2
    assert math.isclose(loss.difference, 0.0005 / 9, rel_tol=1e-6)
    assert (norm.difference, norm.tolerance) == (0.0, 1e-3)


@pytest.mark.parametrize("dtype", demo_report.TOLERANCE)
@pytest.mark.parametrize(
    ("changes", "quantity", "step"),
    [
        ({"losses": [10.0, 9.0, 8.0, 7.1]}, "loss", 4),
        # AdamW forgives a gradient that is wrong by a factor; its norm tells
        ({"norms": [4.0, 3.0, 2.2, 1.0]}, "gradient norm", 3),
        ({"losses": [10.0, math.nan, 8.0, 7.0]}, "loss", 2),
        ({"norms": [4.0, 3.0, 2.0, math.inf]}, "gradient norm", 4),
    ],
)
def test_curves_that_differ_disagree(
    dtype: str, changes: dict[str, list[float]], quantity: str, step: int
) -> None:
    checks = demo_report.compare({"eager": result(), "fusedce": result(**changes)}, dtype)
    (check,) = [c for c in checks if not c.agrees]
    assert (check.quantity, check.step) == (quantity, step)
    assert f"{quantity} of fusedce DISAGREES with eager" in str(check)


def test_two_overflows_do_not_differ() -> None:
    left, right = [math.inf, 2.0], [math.nan, 2.0]
    assert demo_report.max_difference(left, right) == (0.0, 1)


def test_table_has_ratios_to_inductor() -> None:
    text = demo_report.measurements_text(
        {
            "eager": result(compile_seconds=0.0),
            "inductor": result(step_seconds=0.25, peak_bytes=200 * MIB),
            "fusedce": result(step_seconds=0.2, peak_bytes=None),
        }
    )
    rows = {line.split()[0]: re.split(r"\s{2,}", line)[1:] for line in text.splitlines()}
    tail = ["7.0000"]
    assert rows["eager"] == ["500 ms", "2.00x", "200 MiB", "2.00x", "300 MiB", "-", *tail]
    assert rows["inductor"] == ["250 ms", "1.00x", "100 MiB", "1.00x", "200 MiB", "20.0 s", *tail]
    assert rows["fusedce"] == ["200 ms", "0.80x", "unknown", "-", "unknown", "20.0 s", *tail]


def test_curves_are_sampled_from_the_first_step_to_the_last() -> None:
    losses = [float(i) for i in range(30)]
    text = demo_report.curves_text({"eager": result(losses=losses)})
    head, row = (line.split() for line in text.splitlines())
    assert head[-7:] == ["1", "6", "11", "15", "20", "25", "30"]
    assert row[-1] == "29.0000"


# ---------------------------------------------------------------- the whole


@pytest.mark.parametrize(
    ("changes", "status", "message"),
    [
        ({}, 0, ""),
        ({"losses": [10.0, 9.0, 8.0, 7.5]}, 1, "the curves disagree: loss of fusedce"),
        ({"counters": {"matched": 0, "rejected": 1}}, 1, "fusedce fused nothing"),
    ],
)
def test_exit_status(
    changes: dict[str, object],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = {"eager": result(), "fusedce": result(**changes)}
    corpus = Corpus(array("i", [1, 2, 3]), classes=4, distinct=3, files=1)
    monkeypatch.setattr(demo, "read_corpus", lambda classes: corpus)
    monkeypatch.setattr(demo, "_train", lambda job, *rest: made[job.provider])
    assert demo.run(options(tmp_path, "eager", "fusedce")) == status
    captured = capsys.readouterr()
    assert message in captured.err
    assert (captured.err == "") == (status == 0)
    assert "the user's line" in captured.out


def test_without_a_compiler_it_goes_on_without_inductor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.doctor, "inductor_problem", lambda device_type: "install g++")
    providers, environ = demo._runnable(options(tmp_path, "eager", "inductor", "fusedce"))
    assert providers == ("eager", "fusedce")
    assert environ["FUSEDCE_INNER"] == "aot_eager"
    assert "Inductor cannot run here: install g++" in capsys.readouterr().out


def test_the_demo_as_a_user_runs_it(tmp_path: Path) -> None:
    tiny = ["--device", "cpu", "--steps", "3", "--layers", "1", "--heads", "1", "--batch", "1"]
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
    assert ran.stderr == ""
    assert "fusedce: 1 matched, 0 rejected, 0 casts" in ran.stdout
    assert "demo_model.py" in ran.stdout  # the line of the loss
    assert "logits [64, 50304]" in ran.stdout
    distinct = re.search(r"([\d,]+) of them distinct", ran.stdout)
    assert distinct is not None
    # every class but the unknown token's has a word, unless Python is trimmed
    full = int(distinct[1].replace(",", "")) == demo.CLASSES - 1
    assert full == ("padding" not in ran.stdout)
    assert ran.stdout.count("agrees with eager") == 2
    assert "Inductor cannot run here" in ran.stdout
    rows = re.findall(r"^(\w+) +[\d,]+ ms", ran.stdout, re.MULTILINE)
    assert rows == ["eager", "fusedce"]
    assert (tmp_path / "fxpass-demo.png").exists() == (find_spec("matplotlib") is not None)
