"""The exponential of differences of logits, beside float64's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.aten import row_sums, slopes
from fxpass.aten.exponential import exponential
from fxpass.formula.expression import parse
from fxpass.formula.operands import Operands
from fxpass.formula.reductions import Reductions
from fxpass.op import run
from tests.support.specs import outputs_of


@pytest.mark.parametrize("a", [1, 2])
def test_it_is_as_exact_as_the_difference(a):
    y = -torch.rand(100_000) * torch.linspace(0, 40, 100_000)
    found, exact = exponential(y, a).double(), (a * y.double()).exp()
    unit = torch.finfo(torch.float32).eps
    assert ((found - exact).abs() <= exact * unit * (2 + a * y.abs())).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends(dtype):
    y = torch.tensor([0.0, -1e9, -float("inf"), float("nan"), float("inf")], dtype=dtype)
    found = exponential(y, out=y)
    assert found is y
    assert found[:3].tolist() == [1, 0, 0]
    assert found[3].isnan()
    assert found[4].isinf()


@pytest.mark.parametrize(
    ("outputs", "transform", "expected"),
    [
        ("", "z", 1),
        ("moment(1,1);argmax", "z", 1),
        ("moment(1,1)", "where(given0>0,-inf,z)", 1),
        ("moment(1,1);moment(1,0,0)", "z", 1),
        ("moment(2,0)", "z", 3),
        ("moment(0,2)", "z", 2),
    ],
)
def test_the_exponentials_of_the_sums_become_the_gradient(
    outputs, transform, expected, monkeypatch
):
    """A loss with metrics takes as many as its outputs, and none again for its gradient."""
    torch.manual_seed(0)
    masked = "given0" in transform
    given = [(torch.arange(50) % 7 == 3).float() if masked else torch.rand(50)]
    x, w, c = torch.randn(6, 8), torch.randn(50, 8), torch.tensor([0, 1, 2, 4, 5, 49])
    of_rows = outputs_of(f"pick;{outputs}")
    spec = Reductions(of_rows, parse(transform), ("x", "weight"), ("pick",))
    calls = []

    def counted(*args, **more):
        calls.append(args)
        return exponential(*args, **more)

    for module in (row_sums, slopes):
        monkeypatch.setattr(module, "exponential", counted)
    coef = torch.full((1, 6), -1 / 6)
    out, grads = run.reduce_head(Operands(x, w, None, None, c, tuple(given), coef), spec)
    assert len(calls) == expected
    exact = [t.double().requires_grad_() for t in (x, w)]
    z = exact[0] @ exact[1].T
    z = z.masked_fill(given[0] > 0, -float("inf")) if masked else z
    log = z.log_softmax(1)
    loss = F.nll_loss(log, c)
    loss.backward()
    torch.testing.assert_close(-out.rows[0].mean().double(), loss.detach(), rtol=1e-6, atol=1e-6)
    for name, t in zip(("x", "weight"), exact, strict=True):
        torch.testing.assert_close(grads[name].double(), t.grad, rtol=1e-5, atol=1e-6)
    if outputs.startswith("moment(1,1)"):
        entropy = torch.special.entr(log.detach().exp()).sum(1)
        torch.testing.assert_close(-out.rows[1].double(), entropy, rtol=1e-6, atol=1e-6)
