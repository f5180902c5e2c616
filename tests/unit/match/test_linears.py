"""Every spelling of a linear, with eager's numbers; and what only looks like one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.programs import D, V, check, head_of, inputs, last, reason_of

BIAS = torch.linspace(-1, 1, V)

ACCEPTED = {
    "F.linear": lambda x, w: F.linear(x, w),
    "with a bias": lambda x, w: F.linear(x, w, BIAS.to(x)),
    "by keyword": lambda x, w: F.linear(input=x, weight=w, bias=None),
    "@ T": lambda x, w: x @ w.T,
    "@ t()": lambda x, w: x @ w.t(),
    "@ mT": lambda x, w: x @ w.mT,
    "matmul transpose": lambda x, w: torch.matmul(x, w.transpose(0, 1)),
    "matmul transpose by the end": lambda x, w: x.matmul(w.transpose(-1, -2)),
    "matmul permute": lambda x, w: x.matmul(w.permute(1, 0)),
    "a weight [D, V]": lambda x, w: x @ w.T.contiguous(),
    "mm": lambda x, w: torch.mm(x.view(-1, D), w.t()),
    "mm by method": lambda x, w: x.view(-1, D).mm(w.t()),
    "addmm": lambda x, w: torch.addmm(BIAS.to(x), x.view(-1, D), w.t()),
    "addmm of a weight [D, V]": lambda x, w: torch.addmm(BIAS.to(x), x.view(-1, D), w.T.clone()),
    "einsum": lambda x, w: torch.einsum("bsd,vd->bsv", x, w),
    "einsum, weight [D, V]": lambda x, w: torch.einsum("bsd, dv -> bsv", x, w.T.clone()),
    "einsum, weight first": lambda x, w: torch.einsum("vd,bsd->bsv", w, x),
    "einsum with dots": lambda x, w: torch.einsum("...d,vd->...v", x, w),
    "weight of several": lambda x, w: x.matmul(torch.cat([w[:4], w[4:]]).t()),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    def program(x, weight, labels):
        return F.cross_entropy(last(ACCEPTED[case](x, weight)), labels.view(-1))

    x, weight, labels = inputs()
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


@pytest.mark.parametrize("case", ["@ T", "addmm", "einsum"])
def test_under_autocast(case):
    """The casts are those that autocast would have made inside of the call."""

    def program(x, weight, labels):
        return F.cross_entropy(last(ACCEPTED[case](x, weight)), labels.view(-1))

    x, weight, labels = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        eager = program(x, weight, labels)
        match = head_of(program, x, weight, labels)
        fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
        assert fused(x, weight, labels).dtype == eager.dtype
    assert match.logits_bytes == 8 * V * 2


REJECTED = {
    "addmm with beta": (
        lambda x, w: torch.addmm(BIAS, x.view(-1, D), w.t(), beta=2), "beta= or alpha="),
    "addmm of a matrix": (
        lambda x, w: torch.addmm(x.new_ones(8, V), x.view(-1, D), w.t()), "not [V]"),
    "a weight per batch": (
        lambda x, w: torch.matmul(x, w.t().expand(2, D, V)), "not [V, D]"),
    "einsum of three": (
        lambda x, w: torch.einsum("bsd,vd,v->bsv", x, w, BIAS), "is not x, weight"),
    "einsum that sums rows": (
        lambda x, w: torch.einsum("bsd,vd->bv", x, w).repeat(4, 1), "is not known"),
    "einsum in another order": (
        lambda x, w: torch.einsum("bsd,vd->vbs", x, w).permute(1, 2, 0), "is not [..., D]"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case):
    between, reason = REJECTED[case]
    program = lambda x, w, t: F.cross_entropy(between(x, w).flatten(0, -2), t.view(-1))  # noqa: E731
    assert reason in reason_of(program, *inputs())


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 0, 3)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_rows_without_hidden_values(reduction, shape):
    n, d, v = shape
    program = lambda x, w, t: F.cross_entropy(x @ w.t(), t, reduction=reduction)  # noqa: E731
    operands = torch.zeros(n, d, requires_grad=True), torch.zeros(v, d, requires_grad=True)
    labels = torch.zeros(n, dtype=torch.long)
    assert "no hidden values" in reason_of(program, *operands, labels)
