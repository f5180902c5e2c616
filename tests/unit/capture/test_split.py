"""Reductions that are split into classes and rows, and losses that are taken apart.

Values and gradients are those of the whole, for every argument of the schema, also where many
elements are the largest: :func:`fxpass.capture.rewritten.in_two`, ``ELEMENTWISE_LOSSES``,
``DECOMPOSED``.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch._dynamo.utils import counters

from fxpass.capture.dimensions import SEPARABLE
from fxpass.capture.rewritten import DECOMPOSED
from fxpass.capture.rows import ELEMENTWISE_LOSSES
from tests.support.numerics import assert_close

A = torch.ops.aten
B, T, D, V = 2, 6, 8, 67
torch.manual_seed(0)
# Small numbers, so that logits are the same at every dtype, and many of a row are equal.
X, W = torch.randint(-1, 2, (B, T, D)).float(), torch.randint(-1, 2, (V, D)).float()
GIVEN, LABELS = torch.randint(0, 9, (B, T, V)) / 8, torch.randint(V, (B, T))
WIDE = ("", ", dtype=torch.float64")
SOME = ("(1, 2)", "(0, 2), keepdim=True")
ORDERS = (0, 0.5, 1, 2, 3, -1, math.inf, -math.inf)
REDUCTIONS = {
    A.sum: [f"z.sum({d}{w})" for d in SOME for w in WIDE] + ["z.sum()"],
    A.mean: [f"z.mean({d}{w})" for d in SOME for w in WIDE] + ["z.mean()"],
    A.nansum: [f"z.where(z > 0, math.nan).nansum({d})" for d in ("", *SOME)],
    A.amax: [f"z.amax({d})" for d in ("", *SOME)],
    A.amin: [f"z.amin({d})" for d in ("", *SOME)],
    A.max: ["z.max()", "(z * math.inf).nan_to_num(0, math.inf).max()"],
    A.min: ["z.min()"],
    A.any: ["(z > 3).any() + z.mean()", "(z > 30).any() + z.mean()"],
    A.all: ["(z > -30).all() + z.mean()", "(z > 0).all() + z.mean()"],
    A.count_nonzero: [f"z.count_nonzero({d}) + z.mean()" for d in ("", "(0, 2)")],
    A.linalg_vector_norm: [
        f"torch.linalg.vector_norm((z + 1) * 300, float('{o}'){d}) / 1000 + z.mean()"
        for o in ORDERS
        for d in ("", *WIDE[1:], *(f", {some}" for some in SOME))
    ],
}
PROBABILITIES = "(z * 9).sigmoid()"  # of which many are 0 or 1
LOSSES = {
    A.binary_cross_entropy: [
        f"F.binary_cross_entropy({PROBABILITIES}, given, {w}reduction={{r}})"
        for w in ("", "weight=given + 1, ")
    ],
    A.binary_cross_entropy_with_logits: [
        f"F.binary_cross_entropy_with_logits(z * 9, given, {w}reduction={{r}})"
        for w in ("", "weight=given + 1, ", "pos_weight=given[0, 0], ")
    ],
    A.soft_margin_loss: ["F.soft_margin_loss(z, given.sub(0.5).sign(), reduction={r})"],
    A.mse_loss: ["F.mse_loss(z, given, reduction={r})"],
    A.huber_loss: [f"F.huber_loss(z, given, delta={d}, reduction={{r}})" for d in (0.3, 1.0)],
    A.smooth_l1_loss: [
        f"F.smooth_l1_loss(z, given, reduction={{r}}, beta={beta})" for beta in (0.0, 0.5, 1.0)
    ],
}
ROWS = [(text, op) for op, texts in REDUCTIONS.items() for text in texts]
ROWS += [
    (text.format(r=repr(r)) + ".sum(-1)" * (r == "none"), op)
    for op, texts in LOSSES.items()
    for text in texts
    for r in ("none", "mean", "sum")
]


def test_each_has_a_program():
    assert REDUCTIONS.keys() == SEPARABLE
    assert LOSSES.keys() == ELEMENTWISE_LOSSES
    assert {r.overloadpacket for r, *_ in _DECOMPOSED} == DECOMPOSED


@pytest.mark.parametrize(("text", "op"), ROWS, ids=[text for text, _ in ROWS])
def test_is_the_whole(text, op):
    program = eval(f"lambda z, given: {text}", {"torch": torch, "F": F, "math": math})

    def answer(dtype: torch.dtype, compiled: bool = False) -> list[Tensor]:
        def run(x: Tensor, w: Tensor) -> Tensor:
            return program(F.linear(x, w), GIVEN.to(x.dtype))

        if compiled:
            torch._dynamo.reset()
            run = torch.compile(run, backend="fusedce", options={"fusedce.inner": "aot_eager"})
        x, w = (t.to(dtype).requires_grad_() for t in (X.clone(), W.clone()))
        made = run(x, w)
        made.sum().backward()
        return [made.detach(), x.grad, w.grad]  # type: ignore[list-item]

    exact = answer(torch.float64)
    for dtype in (torch.float32, torch.float16):
        eager = answer(dtype)
        counters.clear()
        got = answer(dtype, compiled=True)
        assert counters["fusedce"]["matched"] >= 1
        assert got[0].dtype == eager[0].dtype
        assert_close(got, eager, exact, dtype)


Z, P = torch.randn(B * T, V) * 4, torch.randn(B * T, V).log_softmax(-1)
Y = LABELS.flatten()
IGNORED = Y.where(torch.arange(B * T) % 3 > 0, -100)
_DECOMPOSED = (
    *(
        (A.nll_loss_forward.default, P, labels, weight, reduction, -100)
        for labels in (Y, IGNORED, torch.full_like(Y, -100))
        for weight in (None, GIVEN[0, 0])
        for reduction in range(3)
    ),
    *(
        (A.nll_loss2d_forward.default, P.t().reshape(1, V, T, B).contiguous(), labels, weight, r, 1)
        for labels in (LABELS.view(1, T, B), LABELS.view(1, T, B) % 2)
        for weight in (None, GIVEN[0, 0])
        for r in range(3)
    ),
    *(
        (A.multi_margin_loss.default, Z, Y, p, margin, weight, reduction)
        for p in (1, 2)
        for margin in (0.3, 1.0)
        for weight in (None, GIVEN[0, 0])
        for reduction in range(3)
    ),
    (A.native_layer_norm.default, Z, [V], None, None, 1e-5),
    (A.native_layer_norm.default, Z, [V], GIVEN[0, 0], GIVEN[0, 1], 1e-5),
    (A._fused_rms_norm.default, Z, [V], None, None),
    (A._fused_rms_norm.default, Z, [V], GIVEN[0, 0], 1e-5),
    (A.repeat.default, Z, [2, 1]),
    (A.repeat.default, Z, [2, 1, 3]),
    *((A.renorm.default, Z, p, d, 1.0) for p in (1.0, 2.0, math.inf) for d in (0, 1)),
    *((op.default, Z, k) for op in (A.tril, A.triu) for k in (-2, 0, 3)),
)


@pytest.mark.parametrize("row", _DECOMPOSED, ids=[f"{i} {r[0]}" for i, r in enumerate(_DECOMPOSED)])
def test_a_decomposition_is_the_kernel(row):
    op, tensor, *rest = row
    found = []
    for function in (op, decomposition_table[op]):
        leaf = tensor.double().requires_grad_()
        more = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in rest]
        made = function(leaf, *more)
        first = made[0] if isinstance(made, tuple) else made
        (grad,) = torch.autograd.grad((first * first.detach().cos()).sum(), leaf)
        found.append((first.detach(), grad))
    torch.testing.assert_close(*found, equal_nan=True)
