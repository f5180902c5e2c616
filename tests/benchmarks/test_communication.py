"""What ranks of a sharded head exchange: counted, modelled, and told in a table."""

from __future__ import annotations

import functools
import math
import subprocess
from pathlib import Path

import pytest
import sympy
import torch

from benchmarks import bandwidth
from benchmarks.bandwidth import HEADS, HIDDEN, Assumed, Sizes, W, e, per_rank, predicted, sent
from benchmarks.communication import __main__ as communication
from benchmarks.communication import collectives
from benchmarks.communication.__main__ import MODEL, complaint, document, main, ring, rows_of, table
from benchmarks.communication.collectives import METHODS, Call
from benchmarks.communication.worker import PROGRAMS, Job, RanksError, Step, run, wrong

FUSED, ANY_WAY = "fusedce", "fusedce, of the program that gathers"
CORE, GATHERED = "loss_parallel, eager", "gathered logits, eager"
JOB = Job(
    2, batch=1, seq=8, d=24, v=60, inner="eager", programs=(FUSED, ANY_WAY, CORE, GATHERED),
    seconds=240,
)  # fmt: skip
EAGER = {"loss": 1e-6, "dx": 1e-3, "dw": 1e-3}


@functools.cache
def measured():
    """Steps of both ranks, and eager's errors; the ranks are started once."""
    return run(JOB)


def step_of(program, hidden="replicated"):
    return next(s for s in measured()[0][0] if (s.program, s.hidden) == (program, hidden))


GRADIENT = Call("all_reduce", JOB.n * JOB.d, 2)  # of the hidden states


def made(program, *calls, backward=(GRADIENT,), **errors):
    """A step that nobody ran."""
    return Step(program, "replicated", list(calls), list(backward), EAGER | errors)


# ---------------------------------------------------------------- counted


def test_every_collective_is_as_modelled():
    rows = rows_of(JOB, *measured())
    assert [(row.program, row.hidden_states) for row in rows] == [
        (program, hidden) for program in JOB.programs for hidden in HIDDEN
    ]
    for row in rows:
        assert row.failure == ""
        assert row.as_modelled, row
        assert (row.loss, row.hidden) == (row.model_loss, row.model_hidden)


def test_fusedce_sends_no_more_than_loss_parallel():
    ours, theirs = (
        [c for c in step_of(program).forward if not communication.of_hidden_states(c, JOB)]
        for program in (FUSED, CORE)
    )
    assert 0 < sum(ring(c, 2) for c in ours) <= sum(ring(c, 2) for c in theirs)
    assert len(ours) < len(theirs)


@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_program_that_gathers_does_not_when_fused(hidden):
    whole = JOB.n * JOB.v * 2  # the logits, bf16
    assert [c.op for c in step_of(GATHERED, hidden).forward if c.nbytes >= whole] == ["all_gather"]
    fused, same = step_of(ANY_WAY, hidden), step_of(FUSED, hidden)
    assert max(c.nbytes for c in fused.forward + fused.backward) < whole
    assert (fused.forward, fused.backward) == (same.forward, same.backward)


class Inner:
    """A process group that does nothing, and says what it was asked."""

    def __getattr__(self, method):
        return lambda *args, **kwargs: (method, args, kwargs)


@pytest.mark.parametrize(
    "method", [m for m in METHODS if hasattr(torch.distributed.ProcessGroup, m)]
)
def test_a_collective_is_written_down_and_passed_on(method):
    group = collectives._Counted(0, 2)
    group.inner = Inner()
    part, whole = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(6, dtype=torch.bfloat16)
    op = METHODS[method]
    args = {
        "all_reduce": ([whole],),
        "all_gather": ([whole], [part]),
        "reduce_scatter": ([part], [whole]),
        "all_to_all": (whole, whole, [3, 3], [3, 3]),
    }[op]
    assert getattr(group, method)(*args, opts=None) == (method, args, {"opts": None})
    assert group.calls == [Call(op, 6, 2)]


def test_what_is_not_known_is_not_passed_over():
    group = collectives._Counted(0, 2)
    with pytest.raises(RuntimeError):
        group.alltoall([torch.zeros(2)], [torch.zeros(2)])
    assert group.calls == []


@pytest.mark.parametrize(("op", "steps"), [("all_reduce", 2), ("all_gather", 1)])
def test_a_ring(op, steps):
    assert ring(Call(op, 100, 2), 4) == steps * 150
    assert ring(Call(op, 100, 2), 1) == 0


def test_parts_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match="v=61 is no multiple of 2"):
        Job(2, v=61)


def test_ranks_that_fail_say_why(monkeypatch):
    def fail(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, stdout="no such rank")

    def hang(command, timeout, **kwargs):
        raise subprocess.TimeoutExpired(command, timeout)

    for how, why in ((fail, "no such rank"), (hang, "2 ranks took more than 120 s")):
        monkeypatch.setattr(subprocess, "run", how)
        with pytest.raises(RanksError, match=why):
            run(Job(2, seconds=120))


# ---------------------------------------------------------------- told


REDUCED = (Call("all_reduce", JOB.n, 4), Call("all_reduce", 2 * JOB.n, 4))


def test_the_table():
    gathered = made(GATHERED, Call("all_gather", JOB.n * JOB.v, 2))
    steps = [made(FUSED, *REDUCED), made(ANY_WAY, *REDUCED, dw=1.0), gathered]
    rows = rows_of(JOB, [steps, steps], EAGER)
    assert table(rows).splitlines()[2:] == [
        "| fusedce | replicated | 2 | forward: 2 all_reduce | 12 + 0 | 12 + 0 | 0 + 48 | 0 + 48 |  |",
        "| fusedce, of the program that gathers | replicated | 2 | - | - | - | - | - "
        "| refused: the error of dw is 1.0e+00 (bound 1.0e-02) |",
        "| gathered logits, eager | replicated | 2 | forward: 1 all_gather | 60 + 0 | 60 + 0 "
        "| 0 + 48 | 0 + 48 |  |",
    ]
    assert [complaint(row) for row in rows] == [
        "",
        f"{ANY_WAY}, 2 ranks: refused: the error of dw is 1.0e+00 (bound 1.0e-02)",
        "",
    ]


def test_numbers_that_are_not_the_models_are_told():
    steps = [made(CORE, *REDUCED)]  # as many bytes, in fewer collectives
    (row,) = rows_of(JOB, [steps, steps], EAGER)
    assert row.loss == row.model_loss
    assert complaint(row) == f"{CORE}, 2 ranks: not as modelled"
    assert table([row]).endswith("| not as modelled |")


def test_ranks_that_differ_are_refused():
    one, other = made(FUSED, *REDUCED), made(FUSED, REDUCED[0])
    (row,) = rows_of(JOB, [[one], [other]], EAGER)
    assert row.failure == "refused: the ranks do not issue the same collectives"


def test_an_error_that_is_no_number_is_refused():
    assert wrong(made(FUSED), EAGER, "bfloat16") == ""
    assert "loss is nan" in wrong(made(FUSED, loss=math.nan), EAGER, "bfloat16")


def test_the_command(monkeypatch, tmp_path, capsys):
    error = 1e-3

    def fake(job):
        n = job.n
        calls = (Call("all_reduce", n, 4), Call("all_reduce", 2 * n, 4))
        backward = (Call("all_reduce", n * job.d, 2),)
        return [[made(FUSED, *calls, backward=backward, dx=error)]] * job.world, EAGER

    monkeypatch.setattr(communication, "run", fake)
    path = tmp_path / "table.md"
    arguments = ["--programs", FUSED, "--markdown", str(path), "--ranks", "2", "3"]
    assert main(arguments) == 0
    text = path.read_text()
    assert "`python -m benchmarks.communication --programs fusedce" in text
    assert capsys.readouterr().out.strip() in text
    assert "| 3 | forward: 2 all_reduce | 16 + 0 | 16 + 0 | 0 + 170.7 | 0 + 170.7 |  |" in text
    error = 1.0
    assert main(arguments) == 1
    for bad in (["--ranks", "1"], ["--ranks", "7"]):
        with pytest.raises(SystemExit):
            main(bad)


def test_the_committed_table():
    text = Path(communication.__file__).with_name("results.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    lines = [line for line in lines if line and line[0] in PROGRAMS]
    assert {line[0] for line in lines} == set(PROGRAMS) == set(MODEL)
    for _, hidden, ranks, _, loss, model_loss, states, model_states, note in lines:
        assert hidden in HIDDEN
        assert int(ranks) in (2, 3, 4)
        assert (loss, states, note) == (model_loss, model_states, "")
    assert text.startswith(document([], Job(2), "", "").split("Written by")[0])


# ---------------------------------------------------------------- modelled

LLAMA = Sizes(8192, 4096, 128256)


@pytest.mark.parametrize("name", HEADS)
def test_one_rank_sends_nothing(name):
    assert per_rank(HEADS[name].loss, LLAMA, 1) == 0
    assert per_rank(HIDDEN["replicated"], LLAMA, 1) == 0
    # and computes 6 N D V, and reads or writes logits three times
    n, d, v = LLAMA[:3]
    alone = 6 * n * d * v / Assumed().flops + 3 * 2 * n * v / Assumed().memory
    assert predicted(name, LLAMA, 1, Assumed()) == pytest.approx(alone)


def test_formulas_of_the_bytes():
    n, d, v, a = bandwidth.N, bandwidth.D, bandwidth.V, bandwidth.a
    ring_of = (W - 1) / W
    for exchanges, expected in (
        (HEADS["fusedce"].loss, 6 * a * n * ring_of),
        (HEADS["loss_parallel"].loss, 6 * a * n * ring_of),
        (HEADS["gathered logits"].loss, e * n * v * ring_of),
        (HIDDEN["replicated"], 2 * e * n * d * ring_of),
        (HIDDEN["sequence-sharded"], 2 * e * n * d * ring_of),
    ):
        assert sympy.expand(sent(exchanges) - expected) == 0


def test_a_step_on_64_ranks():
    n, d, v = LLAMA[:3]
    assumed = Assumed(flops=1e15, memory=1e12, within=1e11, across=1e10, latency=1e-5, node=8)
    nbytes = 63 / 64 * (2 * 12 * n + 2 * 2 * n * d)
    others = 6 * n * v / 64 / 1e12 + nbytes / 1e10 + 3 * 6 * 1e-5
    logits = 2 * n * v / 64
    for budget, products in ((2 * logits, 3), (2 * logits - 1, 4)):
        expected = products * 2 * n * d * v / 64 / 1e15 + others
        got = predicted("fusedce", LLAMA, 64, assumed._replace(budget=budget))
        assert got == pytest.approx(expected)


def test_links_within_a_node_are_used_as_long_as_it_has_the_ranks():
    slower = Assumed()._replace(within=1e9)
    for ranks, same in ((8, False), (16, True)):
        times = [predicted("gathered logits", LLAMA, ranks, some) for some in (Assumed(), slower)]
        assert (times[0] == times[1]) == same


def test_the_prediction(capsys):
    bandwidth.main(["--head", "tiny", "--n", "1024", "--ranks", "1", "2"])
    told, rates, _, *lines = capsys.readouterr().out.splitlines()
    assert told.startswith("Predicted, not measured: tiny (D=64, V=4000), N=1024")
    assert "692 TFLOP/s" in rates
    assert [line.count("|") for line in lines] == [2 + 1 + 3 * len(HEADS)] * 4
    assert lines[2].startswith("| 1 | 0.0 | 0.00 | 0.01 | 1.0 | 0.00 |")
    assert lines[3].startswith("| 2 | 0.1 | 0.01 | ")
