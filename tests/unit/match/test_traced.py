"""Graphs in ATen's spelling: of torch.export and of make_fx, with the values and gradients of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.numerics import assert_as_accurate
from tests.support.programs import B, S, V, inputs, last

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
OPTIONS = {"fusedce.inner": "eager"}
PRIOR, WEIGHTS = torch.linspace(-1, 1, V), torch.linspace(0.5, 2, V)


class Program(nn.Module):
    """A function as a module, which torch.export takes."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def exported(function, *args):
    return torch.export.export(Program(function), args).module()


def decomposed(function, *args):
    return torch.export.export(Program(function), args).run_decompositions().module()


def traced(function, *args):
    return make_fx(function)(*args)


def traced_before_autograd(function, *args):
    return make_fx(function, pre_dispatch=True)(*args)


TRACERS = {t.__name__: t for t in (exported, decomposed, traced, traced_before_autograd)}


# x [B, S, D], weight [V, D], bias [V], labels [B, S] -> a loss
FUSED = {
    "cross_entropy": lambda x, w, b, t: F.cross_entropy(last(F.linear(x, w)), t.view(-1)),
    "with a bias": lambda x, w, b, t: F.cross_entropy(last(F.linear(x, w, b)), t.view(-1)),
    "sum": lambda x, w, b, t: F.cross_entropy(
        last(x @ w.T + b), t.view(-1), ignore_index=3, reduction="sum"),
    "class weights": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w)), t.view(-1), WEIGHTS.to(x), ignore_index=3),
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
    "padded classes": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w)[..., : V - 2]), t.view(-1) % 8),
    "rows by a tensor": lambda x, w, b, t: F.cross_entropy(
        last(F.linear(x, w))[torch.tensor([1, 0, 3])], t.view(-1)[:3]),
    "selected": lambda x, w, b, t: F.cross_entropy(F.linear(x, w)[:, -1], t[:, -1]),
    "permuted": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w).permute(1, 0, 2).flatten(0, 1), t.T.flatten()),
    "nll_loss": lambda x, w, b, t: F.nll_loss(last(F.linear(x, w)).log_softmax(-1), t.view(-1)),
    "gather": lambda x, w, b, t: -F.linear(x, w).log_softmax(-1).gather(
        -1, t.unsqueeze(-1)).squeeze(-1).mean(),
    "index": lambda x, w, b, t: -last(F.linear(x, w)).log_softmax(-1)[
        torch.arange(B * S), t.view(-1)].mean(),
}  # fmt: skip


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("case", FUSED)
def test_fused(case, tracer):
    x, weight, labels = inputs()
    tensors = x, weight, PRIOR.clone().requires_grad_()
    program = TRACERS[tracer](FUSED[case], *tensors, labels)
    counters.clear()
    fused = torch.compile(program, backend="fusedce", options=OPTIONS)

    def eager(*tensors):
        return FUSED[case](*tensors, labels)

    dtype = torch.bfloat16 if case == "in float32" else x.dtype
    assert_as_accurate(lambda *tensors: fused(*tensors, labels), eager, tensors, dtype)
    assert counters["fusedce"]["matched"]
