"""The exponential of differences of logits, beside float64's."""

from __future__ import annotations

import pytest
import torch

from fxpass.aten.exponential import exponential


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
