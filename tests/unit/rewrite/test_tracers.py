"""Graphs in ATen's spelling: of torch.export and of make_fx, with the values and gradients of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.support.numerics import assert_as_accurate
from tests.support.programs import B, S, V, inputs, last
from tests.support.traced import decomposed, exported, traced, traced_before_autograd

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
OPTIONS = {"fusedce.inner": "eager"}
PRIOR, WEIGHTS = torch.linspace(-1, 1, V), torch.linspace(0.5, 2, V)


TRACERS = {t.__name__: t for t in (exported, decomposed, traced, traced_before_autograd)}


# x [B, S, D], weight [V, D], bias [V], labels [B, S] -> a loss
FUSED = {
    "cross_entropy": lambda x, w, b, t: F.cross_entropy(last(F.linear(x, w)), t.view(-1)),
    "one per row": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w)), t.view(-1), reduction="none").square().sum(),
    "in float32": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x.bfloat16(), w.bfloat16()).float()), t.view(-1)),
    "shifted": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w)[:, :-1].reshape(-1, V), t[:, 1:].reshape(-1)),
    "soft-cap": lambda x, w, b, t: F.cross_entropy(
        last(30 * torch.tanh(F.linear(x, w, b) / 30)), t.view(-1)),
    "a temperature": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w) * b.sum().exp()), t.view(-1)),
    "in place": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w).div_(2).add_(b)), t.view(-1)),
    "rows by a tensor": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w))[torch.tensor([1, 0, 3])], t.view(-1)[:3]),
    "permuted": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w).permute(1, 0, 2).flatten(0, 1), t.T.flatten()),
    "nll_loss": lambda x, w, b, t: F.nll_loss(last(F.linear(x, w)).log_softmax(-1), t.view(-1)),
    "gather": lambda x, w, b, t: -F.linear(x, w).log_softmax(-1).gather(
        -1, t.unsqueeze(-1)).squeeze(-1).mean(),
    "more dimensions": lambda x, w, b, t: F.cross_entropy(F.linear(x, w).transpose(1, 2), t),
    "a z-loss beside it": lambda x, w, b, t: (lambda z: F.cross_entropy(z, t.view(-1))
        + z.logsumexp(-1).square().mean())(last(F.linear(x, w))),
}  # fmt: skip


# What the tracers that decompose losses leave nothing of.
WHOLE = {
    "label smoothing": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w, b)), t.view(-1), label_smoothing=0.1, ignore_index=3),
    "probabilities": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w)), (F.one_hot(t, V) * 0.9).view(-1, V)),
    "logsumexp": lambda x, w, b, t: (lambda z: (
        z.logsumexp(-1) - z.gather(-1, t[..., None]).squeeze(-1)).mean())(F.linear(x, w)),
    "einsum": lambda x, w, b, t: F.cross_entropy(
        last(torch.einsum("bsd,vd->bsv", x, w)), t.view(-1)),
}  # fmt: skip
CASES = [
    *((case, tracer) for case in FUSED for tracer in (exported, traced)),
    *((case, tracer) for case in WHOLE for tracer in (exported, traced_before_autograd)),
    *((case, traced) for case in ("label smoothing", "einsum")),
    *((case, decomposed) for case in ("soft-cap", "shifted", "nll_loss", "one per row")),
]


@pytest.mark.parametrize(("case", "tracer"), CASES)
def test_fused(case, tracer):
    function = (FUSED | WHOLE)[case]
    x, weight, labels = inputs()
    tensors = x, weight, PRIOR.clone().requires_grad_()
    program = tracer(function, *tensors, labels)
    counters.clear()
    fused = torch.compile(program, backend="fusedce", options=OPTIONS)

    def eager(*tensors):
        return function(*tensors, labels)

    dtype = torch.bfloat16 if case == "in float32" else x.dtype
    assert_as_accurate(lambda *tensors: fused(*tensors, labels), eager, tensors, dtype)
    assert counters["fusedce"]["matched"]
    assert not counters["fusedce"]["rejected"]


def under_autocast(x, weight, bias, labels):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(last(F.linear(x, weight, bias)), labels.view(-1))


def head_under_autocast(x, weight, bias, labels):
    with torch.autocast("cpu", torch.bfloat16):
        logits = last(F.linear(x, weight, bias))
        with torch.autocast("cpu", enabled=False):
            return F.cross_entropy(logits.float(), labels.view(-1))


def under_no_grad(x, weight, bias, labels):
    with torch.no_grad():
        return F.cross_entropy(last(F.linear(x, weight, bias)), labels.view(-1))


@pytest.mark.parametrize("tracer", TRACERS)
def test_rows_that_were_written(tracer):
    """Through a view of them, as the tracers write it."""

    def function(x, weight, labels):
        rows = torch.arange(B * S)
        rows[0] = 1
        return -last(F.linear(x, weight)).log_softmax(-1)[rows, labels.view(-1)].mean()

    args = inputs()
    fused = torch.compile(TRACERS[tracer](function, *args), backend="fusedce", options=OPTIONS)
    torch.testing.assert_close(fused(*args), function(*args))


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("function", [under_autocast, head_under_autocast, under_no_grad])
def test_contexts(function, tracer):
    """torch.export has nested graphs for them, and the other tracers the casts that autocast makes."""
    before_autograd = tracer == "traced_before_autograd" and function is not under_no_grad
    if before_autograd and torch.__version__ < "2.12":
        pytest.skip("Dynamo fails on such graphs, with any backend")
    x, weight, labels = inputs()
    args = x, weight, PRIOR.clone().requires_grad_(), labels
    program = TRACERS[tracer](function, *args)
    counters.clear()
    results = []
    for run in (program, torch.compile(program, backend="fusedce", options=OPTIONS)):
        loss = run(*args)
        grads = torch.autograd.grad(loss, args[:3]) if loss.requires_grad else ()
        results.append([loss, *grads])
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
    assert counters["fusedce"]["matched"] == 1


def test_returned_logits_are_deferred():
    def function(x, weight, labels):
        logits = F.linear(x, weight) / 2
        return F.cross_entropy(last(logits), labels.view(-1)), logits

    args = inputs()
    for tracer in (exported, traced):
        program = tracer(function, *args)
        fused = torch.compile(program, backend="fusedce", options=OPTIONS)
        torch.testing.assert_close(list(fused(*args)), list(function(*args)))
