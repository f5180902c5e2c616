"""Gradients of 16 bits: master weights' are not rounded, and those of fp16 do not underflow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.aten import gemm
from fxpass.formula.dtypes import compute_dtype
from fxpass.region.loop import Loop
from fxpass.rows.backend import RowsPass
from tests.fuzz.small import small
from tests.support.numerics import FLOOR, error

N, D, V = 600, 16, 97
F16, BF16 = torch.float16, torch.bfloat16


def rewritten(function, seen):
    torch._dynamo.reset()
    rows = RowsPass()
    rows.made = seen
    return torch.compile(function, backend=rows.backend())


def texts(seen):
    calls = [
        node.args[1]
        for one in seen
        for node in one.graph.graph.nodes
        if node.target is torch.ops.fxpass.rows.default
    ]
    return [Loop.parse(text) for text in calls]


def tensors(dtype, scale=1.0):
    torch.manual_seed(0)
    x, weight = torch.randn(N, D) * scale, torch.randn(V, D)
    return [t.to(dtype).requires_grad_() for t in (x, weight)]


def gradients(function, given, tangent=1.0):
    loss = function(*given)
    return torch.autograd.grad(loss, given, torch.full_like(loss, tangent))


def test_the_gradient_of_a_master_weight_is_not_rounded(monkeypatch):
    monkeypatch.setattr(gemm, "multiplied_in", lambda dtype, _: compute_dtype(dtype))
    labels = torch.arange(N) % V

    def loss(x, weight):
        return F.cross_entropy(F.linear(x, weight), labels)

    seen, given = [], tensors(torch.float32)
    with torch.autocast("cpu", BF16), small():
        _, theirs = gradients(loss, given)
        _, ours = gradients(rewritten(loss, seen), given)
    wide = [t.detach().bfloat16().double().requires_grad_() for t in given]
    exact = torch.autograd.grad(loss(*wide), wide)[1]
    assert ours.dtype == torch.float32
    assert error(ours, exact) < error(theirs, exact)
    [loop] = texts(seen)
    assert loop.unrounded == loop.sums


def test_a_sum_that_is_read_in_16_bits_leaves_in_16_bits():
    labels, seen = torch.arange(N) % V, []

    def loss(x, weight):
        return F.cross_entropy(F.linear(x, weight), labels)

    with small():
        gradients(rewritten(loss, seen), tensors(BF16))
    [loop] = texts(seen)
    assert loop.sums
    assert not loop.unrounded


def divergence(x, weight):
    """Of a distribution with tiny probabilities; a mean over rows."""
    log_p = F.linear(x, weight).float().log_softmax(-1)
    q = torch.arange(V).float().mul(0.1).softmax(-1)
    return (q * (q.log() - log_p)).sum(-1).mean()


def in_two_phases(x, weight):
    """The tangent of a row is none of a number and known rows."""
    log_p = F.linear(x, weight).float().log_softmax(-1)
    return (log_p.exp() * log_p).sum(-1).div(N)


@pytest.mark.parametrize("tangent", [2.0**-14, 1.0, 65536.0])
@pytest.mark.parametrize("function", [divergence, in_two_phases])
def test_fp16_does_not_depend_on_the_tangent(function, tangent):
    seen, given = [], tensors(F16, 0.5)
    wide = [t.detach().double().requires_grad_() for t in given]
    with small():
        ours = gradients(rewritten(function, seen), given, tangent)
    exact = gradients(function, wide, tangent)
    assert sum(one.calls for one in seen) == 1 + (function is in_two_phases)
    for got, true in zip(ours, exact, strict=True):
        assert got.dtype == F16
        rounded = true.to(F16)  # also where it is too small, or too large
        assert error(got, rounded) <= FLOOR[F16] + error(rounded, true) * rounded.isfinite().all()
