"""Totals of row regions: where forward can compute the gradients, and where it cannot.

Each program's values and gradients are eager's, in float64.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass import testing

N, D, V = 12, 8, 67
OPTIONS: dict[str, Any] = {"fusedce.min_logits_mb": 0, "fusedce.inner": "aot_eager"}


def operands() -> list[Tensor]:
    """Hidden states, weight, factors of rows (trained in some programs), a mask."""
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(*s, generator=random, dtype=torch.float64) for s in ((N, D), (V, D), (N,))]
    x, weight, factors = made
    return [x.requires_grad_(), weight.requires_grad_(), factors, torch.arange(N) % 3 != 0]


def spread(z: Tensor) -> Tensor:
    """Rows of logits by no known formula."""
    return z.sort(-1, descending=True).values[..., :40].logsumexp(-1)


# ---------------------------------------------------------------- coefficients that are known before


def mean(x, weight, r, m):
    return spread(F.linear(x, weight)).mean()


def of_a_weighted_sum(x, weight, r, m):
    return (spread(F.linear(x, weight)) * r).sum()


def over_a_masks_sum(x, weight, r, m):
    return (spread(F.linear(x, weight)) * m).sum() / m.sum().clamp_min(1)


def of_masked_rows(x, weight, r, m):
    return spread(F.linear(x, weight)).masked_fill(m, 0.0).sum() * 0.5


def halves(x, weight, r, m):
    rows = spread(F.linear(x, weight))
    return rows[:6].mean() + 2 * rows[6:].sum() - rows[::2].sum() / 3


def of_tokens(x, weight, r, m):
    return (spread(F.linear(x.view(2, 6, D), weight))[:, 1:] * r.view(2, 6)[:, :-1]).mean()


def two_outputs(x, weight, r, m):
    z = F.linear(x, weight)
    return (spread(z) * r).sum() + 0.1 * z.sort(-1).values[:, :40].std(-1).mean()


def with_a_constant(x, weight, r, m):
    return spread(F.linear(x, weight)).sum() + r.square().sum()


def scaled_after_the_total(x, weight, r, m):
    return spread(F.linear(x, weight)).sum().tanh()


def with_a_regulariser(x, weight, r, m):
    """The scalar before the sum is the total: the other term has a gradient of its own."""
    return spread(F.linear(x, weight)).mean() + 0.1 * x.square().sum()


def logged(x, weight, r, m):
    rows = spread(F.linear(x, weight))
    return (rows * r).sum(), rows.detach()


def logged_mean(x, weight, r, m):
    rows = spread(F.linear(x, weight))
    with torch.no_grad():
        said = rows.max()
    return (rows * r).sum(), said


def metrics_before_the_loss(x, weight, r, m):
    z = F.linear(x, weight)
    with torch.no_grad():
        found = z.topk(3).indices.eq(4).any(-1).float().mean()
    return (spread(z) * r).sum(), found


def in_another_dtype(x, weight, r, m):
    return (spread(F.linear(x, weight)).float() * r.float()).sum()


def beside_rows_without_a_gradient(x, weight, r, m):
    z = F.linear(x, weight)
    return (spread(z) + z.detach().cumsum(-1).amax(-1)).sum() * 2 + z.detach().sort(-1).values[
        :, 3
    ].square().mean()


def of_a_student_and_a_teacher(x, weight, r, m):
    p, q = F.linear(x, weight).softmax(-1), F.linear(x.detach() * 2, weight.detach()).softmax(-1)
    mixed, own, others = (torch.special.entr(p).sum(-1) for p in ((p + q) / 2, p, q))
    return (mixed - (own + others) / 2).mean()


KNOWN = (
    *(mean, of_a_weighted_sum, over_a_masks_sum, of_masked_rows, halves, of_tokens, two_outputs),
    *(with_a_constant, scaled_after_the_total, with_a_regulariser, logged, logged_mean),
    *(in_another_dtype, beside_rows_without_a_gradient, of_a_student_and_a_teacher),
)


# ---------------------------------------------------------------- coefficients that are not


def squared(x, weight, r, m):
    return spread(F.linear(x, weight)).square().mean()


def focal(x, weight, r, m):
    rows = spread(F.linear(x, weight))
    return ((1 - (-rows.abs()).exp()) * rows).mean()


def weighted_by_themselves(x, weight, r, m):
    rows = spread(F.linear(x, weight))
    return (rows * rows.detach()).sum()


def product_of_outputs(x, weight, r, m):
    z = F.linear(x, weight)
    return (spread(z) * z.sort(-1).values[:, :40].std(-1)).sum()


def rows_of_a_policy(x, weight, r, m):
    return torch.min(spread(F.linear(x, weight)).exp() * r, r).mean()


def no_scalar(x, weight, r, m):
    return spread(F.linear(x, weight)) * r


def two_scalars(x, weight, r, m):
    rows = spread(F.linear(x, weight))
    return rows.sum(), (rows * r).sum()


def dropped_rows(x, weight, r, m):
    """Another call would draw other numbers."""
    return F.dropout(spread(F.linear(x, weight)), 0.5).sum()


def trained_factors(x, weight, r, m):
    factors = x[:, 0] * 2  # have a gradient, which needs the rows
    return (spread(F.linear(x, weight)) * factors).sum()


def read_elsewhere_with_a_gradient(x, weight, r, m):
    rows = spread(F.linear(x, weight))
    return rows.sum(), rows * 2


UNKNOWN = (
    *(squared, focal, weighted_by_themselves, product_of_outputs, rows_of_a_policy, no_scalar),
    *(two_scalars, dropped_rows, trained_factors, read_elsewhere_with_a_gradient),
)


def totals(program: Any) -> list[str]:
    """``total`` of each operator call."""
    return re.findall(r"row_region heads=.*? total=(\d)", testing.rewritten(program, *operands()))


def _values(function: Any) -> list[Tensor]:
    torch.manual_seed(0)
    tensors = operands()
    made = function(*tensors)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    trained = [t for t in outputs if t.requires_grad]
    assert trained
    torch.autograd.backward([(0.5 * t).sum() for t in trained])
    return [t.detach() for t in outputs] + [tensors[0].grad, tensors[1].grad]  # type: ignore[list-item]


def _check(program: Any) -> None:
    compiled = torch.compile(program, backend="fusedce", options=OPTIONS)
    exact = program is not in_another_dtype
    for ours, theirs in zip(_values(compiled), _values(program), strict=True):
        assert ours.dtype == theirs.dtype
        rtol = 1e-10 if exact else 1e-5
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("program", KNOWN, ids=lambda f: f.__name__)
def test_forward_computes_the_gradients(program):
    assert totals(program) == ["1"]
    _check(program)


@pytest.mark.parametrize("program", UNKNOWN, ids=lambda f: f.__name__)
def test_backward_computes_the_gradients(program):
    assert totals(program) == ["0"]
    _check(program)


@pytest.mark.parametrize("program", [mean, squared], ids=lambda f: f.__name__)
def test_without_gradients_there_is_no_total(program):
    with torch.no_grad():
        text = testing.rewritten(program, *operands())
    assert "row_region heads=2 rows=0 shared=0 trained= outputs=1 tangents= total=0" in text


def test_a_frozen_weight_has_no_gradient():
    x, weight, r, m = operands()
    text = testing.rewritten(of_a_weighted_sum, x, weight.detach(), r, m)
    assert "trained=0 outputs=1 tangents=0 total=1" in text


def test_metrics_that_are_read_before_the_loss():
    """They are a call of their own, in the place where gradients are off."""
    assert totals(metrics_before_the_loss) in (["1"], ["0", "1"])
    _check(metrics_before_the_loss)
