"""Gradients of operands that the program cast from f32: they bypass the cast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.formula.operands import Operands
from fxpass.op import run
from fxpass.plan.plan import Plan
from tests.support.numerics import error
from tests.support.pairs import in_pairs
from tests.support.specs import spec_of

N, D, V = 24, 16, 40
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOTH = "x,weight"


def text_of(total):
    return f"{'' if total else 'outputs=pick '}gradients={BOTH}{' total=pick' * total}"


def gradients(dtype, spec, weights):
    """Those of x and weight, where the rows have these weights, and what they are in float64. What
    may be rounded is rounded, as a loop does."""
    torch.manual_seed(1)
    x, weight = torch.randn(N, D).to(dtype), torch.randn(V, D).to(dtype)
    picks = torch.randint(V, (N,))
    operands = Operands(x, weight, None, None, picks, (), weights if spec.total else None)
    out, grads = run.reduce_head(operands, spec)
    if not spec.total:
        grads = run.head_gradients(operands, spec, out, weights)
    exact = [t.double().requires_grad_() for t in (x, weight)]
    log = F.linear(*exact).log_softmax(-1).gather(1, picks[:, None])[:, 0]
    (weights[0].double() * log).sum().backward()
    found = [grads[k] if k in spec.unrounded else grads[k].to(dtype) for k in ("x", "weight")]
    return found, [t.grad for t in exact]


# where the total or the rows are computed, and in which parts
RUNS = ((True, ""), (True, "few"), (False, ""), (False, "few"), (False, "tiled"))


@in_pairs(
    implementation=("aten", "triton"),
    run=RUNS,
    dtype=(BF16, F16),
    unrounded=("weight", BOTH, "x"),
)
def test_the_gradients_are_f32(implementation, run, dtype, unrounded, request):
    total, plan = run
    if plan and implementation == "aten":  # the kernels' plans are below
        request.getfixturevalue(plan)
    spec = spec_of(f"{text_of(total)} unrounded={unrounded}")
    grads, exact = gradients(dtype, spec, torch.rand(1, N))
    for name, got, true in zip(("x", "weight"), grads, exact, strict=True):
        assert got.dtype == (F32 if name in spec.unrounded else dtype)
        assert error(got, true) < 2.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("rows", [24, 7])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_kernels_round_them_less_than_eager(strategy, rows, monkeypatch, device):
    """The error that is left is that of the logits' gradient, stored in bf16."""
    planned = Plan("triton", strategy, rows=rows, classes=16)
    monkeypatch.setattr("fxpass.op.run.plan_head", lambda *_: planned)
    text, weights = text_of(strategy == "chunked"), torch.rand(1, N)
    wide, exact = gradients(BF16, spec_of(f"{text} unrounded={BOTH}"), weights)
    rounded, _ = gradients(BF16, spec_of(text), weights)
    for got, worse, true in zip(wide, rounded, exact, strict=True):
        assert got.dtype == F32
        assert error(got, true) < 0.95 * error(worse, true)


def test_what_is_refused():
    for text in (
        "unrounded=weight",
        "gradients=x unrounded=weight",
        "gradients=bias unrounded=bias",
    ):
        with pytest.raises(ValueError, match="may be unrounded"):
            spec_of(f"outputs=pick {text}")
    with pytest.raises(ValueError, match="accumulate must be"):
        spec_of("outputs=pick accumulate=bfloat16")
