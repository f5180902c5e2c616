"""Gradients of operands that the program cast from f32: they bypass the cast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.op.reductions import class_reductions
from fxpass.plan.plan import Plan
from fxpass.spec.reductions import REVISION, Reductions
from tests.support.numerics import error
from tests.support.pairs import in_pairs

N, D, V = 24, 16, 40
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOTH = "x,weight"


def text_of(total):
    return f"{REVISION} {'' if total else 'outputs=pick '}gradients={BOTH}{' total=pick' * total}"


def gradients(dtype, spec, coef=None, upstream=None, **wide):
    """The gradients of the wide tensors, or of the operands where there are none."""
    torch.manual_seed(1)
    x, weight = torch.randn(N, D), torch.randn(V, D)
    picks = torch.randint(V, (N,))
    given = {"x": x.to(dtype), "weight": weight.to(dtype)}
    leaves = {name: t.clone().requires_grad_() for name, t in (("x", x), ("weight", weight))}
    named = {f"wide_{name}": leaves[name] for name in spec.unrounded}
    operands = {
        name: t if name in spec.unrounded else t.requires_grad_() for name, t in given.items()
    }
    found = class_reductions(
        *(operands["x"], operands["weight"], None, None, picks, [], coef, None, spec.text()),
        **(named | wide),
    )
    out = found["total"] if spec.total else (found["rows"] * upstream).sum()
    out.backward()
    grads = [(leaves if name in spec.unrounded else operands)[name].grad for name in given]
    exact = [t.double().requires_grad_() for t in (x.to(dtype), weight.to(dtype))]
    log = F.linear(*exact).log_softmax(-1).gather(1, picks[:, None])[:, 0]
    weights = coef if spec.total else upstream
    ((weights[0].double() * log).sum()).backward()
    return grads, [t.grad for t in exact]


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
    spec = Reductions.parse(f"{text_of(total)} unrounded={unrounded}")
    weights = torch.rand(1, N)
    grads, exact = gradients(dtype, spec, weights if total else None, weights)
    for name, got, true in zip(("x", "weight"), grads, exact, strict=True):
        assert got.dtype == (F32 if name in spec.unrounded else dtype)
        assert error(got, true) < 2.5 * torch.finfo(dtype).eps


@pytest.mark.parametrize("rows", [24, 7])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_kernels_round_them_less_than_eager(strategy, rows, monkeypatch, device):
    """The error that is left is that of the logits' gradient, stored in bf16."""
    planned = Plan("triton", strategy, rows=rows, classes=16)
    monkeypatch.setattr("fxpass.op.run.plan", lambda *_: planned)
    text, weights = text_of(strategy == "chunked"), torch.rand(1, N)
    coef = weights if strategy == "chunked" else None
    wide, exact = gradients(BF16, Reductions.parse(f"{text} unrounded={BOTH}"), coef, weights)
    rounded, _ = gradients(BF16, Reductions.parse(text), coef, weights)
    for got, worse, true in zip(wide, rounded, exact, strict=True):
        assert got.dtype == F32
        assert error(got, true) < 0.95 * error(worse, true)


def test_what_is_refused():
    spec = Reductions.parse(f"{REVISION} gradients={BOTH} total=pick unrounded=weight")
    coef = torch.rand(1, N)
    for wide in (None, torch.zeros(V, D, dtype=BF16), torch.zeros(V, D + 1)):
        with pytest.raises(ValueError, match="needs wide_weight"):
            gradients(BF16, spec, coef, wide_weight=wide)
    with pytest.raises(ValueError, match="needs wide_x where its gradient is unrounded"):
        gradients(BF16, spec, coef, wide_x=torch.zeros(N, D))
    for text in (
        "unrounded=weight",
        "gradients=x unrounded=weight",
        "gradients=bias unrounded=bias",
    ):
        with pytest.raises(ValueError, match="not reductions"):
            Reductions.parse(f"{REVISION} outputs=pick {text}")
    with pytest.raises(ValueError, match="not reductions"):
        Reductions.parse(f"{REVISION} outputs=pick accumulate=bfloat16")
