"""Heads of which no row can tell: what their calls are, what compiles anew, and what reading costs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import fxpass
from tests.programs.operands import Sizes
from tests.programs.row import FORMULA, NOTHING, Row
from tests.support.numerics import assert_as_accurate
from tests.support.oracle import outcome
from tests.support.programs import CLASS_REDUCTIONS, fused_as, head_of, report_of, spec_of

PACKAGE = str(Path(fxpass.__file__).parent)
N, D, V = 8, 6, 10
LABELS = torch.arange(N) % 7
VALUES = torch.linspace(-1, 2, N * V).view(N, V)


def operands(dtype=torch.float32):
    """x [N, D], weight [V, D] and bias [V]."""
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((N, D), (V, D), (V,))]


def loss(x, weight, bias):
    return F.cross_entropy(F.linear(x, weight, bias), LABELS)


def test_only_gradients_that_somebody_needs():
    x, weight, bias = operands()
    assert spec_of(loss, x, weight, bias).gradients == ("x", "weight", "bias")
    assert spec_of(loss, x, weight.detach(), bias.detach()).gradients == ("x",)
    assert spec_of(loss, x.detach(), weight, bias.detach()).gradients == ("weight",)
    with torch.no_grad():
        assert spec_of(loss, x, weight, bias).gradients == ()


def test_a_write_inside_vmap():
    """There a tensor shows no storage; on the joint graph there is no write."""

    def program(x, weight, bias):
        z = F.linear(x, weight, bias)
        doubled = torch.func.vmap(lambda row: row.clone().mul_(2))(torch.ones(N, V))
        return F.cross_entropy(z, LABELS) * doubled.sum()

    assert fused_as(program, *operands()) == CLASS_REDUCTIONS
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    assert_as_accurate(fused, program, operands(), torch.float32)


@pytest.mark.parametrize("sizes", [Sizes(b=2, t=1, d=0, v=5), Sizes(b=0, t=0, d=0, v=3)], ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_rows_without_hidden_values(reduction, sizes):
    text = f"F.cross_entropy(x @ weight.t(), labels, reduction='{reduction}')"
    found = outcome(Row("without hidden values", text, sizes=sizes))
    # a loop of no rows has no function of rows
    assert (found.becomes, found.wrong) == (FORMULA if sizes.b else NOTHING, "")


# ---------------------------------------------------------------- values that vary


def annealed(x, weight, bias, temperature):
    return F.cross_entropy(F.linear(x, weight, bias) / temperature, LABELS)


def smoothed(x, weight, bias, smoothing):
    return F.cross_entropy(F.linear(x, weight, bias), LABELS, label_smoothing=smoothing)


def picked(x, weight, bias, count):
    """Log-probabilities, each as many times as a tensor's size says."""
    log = F.linear(x, weight, bias).log_softmax(-1)
    some = log.gather(1, LABELS[:, None].repeat(1, count))
    return some.square().sum() + log.gather(1, LABELS[:, None]).sum()


@pytest.mark.parametrize(
    ("program", "values", "graphs", "inner", "dtype"),
    [
        (annealed, (1.1, 0.7, 1.3, 2.5), 2, "eager", torch.bfloat16),
        (annealed, (1.1, 0.7, 1.3, 2.5), 2, "aot_eager", torch.float32),
        (smoothed, (0.1, 0.2, 0.3), 3, "eager", torch.float32),
        (picked, (3, 5, 4), 2, "aot_eager", torch.float32),
    ],
)
def test_a_number_that_varies(program, values, graphs, inner, dtype):
    """It is data: the second value compiles the graph that takes all later ones. A loss's own number
    is a constant of each graph, as in torch's own."""
    options = {"fusedce.inner": inner, "fusedce.min_logits_mb": 0}
    fused = torch.compile(program, backend="fusedce", options=options)
    for value in values:
        ours, eager = (lambda *t, f=f, v=value: f(*t, v) for f in (fused, program))
        assert_as_accurate(ours, eager, [t.detach() for t in operands(dtype)], dtype)
    assert (counters["fusedce"]["matched"], counters["stats"]["unique_graphs"]) == (graphs, graphs)


# ---------------------------------------------------------------- settings and cost


@pytest.mark.parametrize(("megabytes", "fused"), [("64", 0), ("1", 0), ("1e-4", 0), ("0", 1)])
def test_logits_too_small_to_matter(megabytes, fused, monkeypatch):
    """Also where another product is larger."""

    def program(x, weight, bias):
        return loss(x, weight, bias) + (x[:, :, None] @ x[:, None]).square().sum()

    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", megabytes)
    assert len(report_of(program, *operands()).matches) == fused


def test_the_users_budget(monkeypatch):
    monkeypatch.setenv("FUSEDCE_MEMORY_MB", "3")
    assert spec_of(loss, *operands()).memory_mb == 3


def doubled(t, times, function=torch.sin):
    """Each of these tensors is read twice, so that 2**times paths lead to the first."""
    for _ in range(times):
        t = t + function(t)
    return t


# logits and a number of times -> logits
PATHS = {
    "a transform": lambda z, times: doubled(z, times, torch.tanh),
    "a softmax": lambda z, times: doubled(z.softmax(-1), times, torch.square),
    "given": lambda z, times: z - doubled(VALUES, times),
    "labels": lambda z, times: (
        z.log_softmax(-1) * z.gather(-1, doubled(LABELS, times, torch.neg)[:, None])
    ),
}


@pytest.mark.parametrize("case", PATHS)
def test_a_node_is_read_once_whatever_the_paths_to_it(case):
    """A model of 5,700 nodes took six minutes, and a transform of 12 steps an hour."""
    x, weight, _ = operands()
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)
        if calls > 400_000:
            pytest.fail("reading takes too long")

    old = sys.getprofile()
    sys.setprofile(count)
    try:
        head_of(lambda x: PATHS[case](F.linear(x, weight), 24).logsumexp(-1).sum(), x)
    finally:
        sys.setprofile(old)
    assert calls > 100
