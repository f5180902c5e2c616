"""The product of a saved gradient and the loss's incoming gradient."""

from __future__ import annotations

import pytest
import torch

from fxpass.kernels import scale
from fxpass.op import saved  # noqa: F401, whose operators these are
from tests.support.pairs import in_pairs

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FACTORS = (1.0, 0.3, 0.0, float("inf"), float("nan"))

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter


def gradient_of(shape, dtype, device="cpu"):
    found = torch.randn(shape, device=device).to(dtype)
    found[1] = 0
    return found


@in_pairs(shape=((5, 7), (4097, 3), (3, 1)), factor=FACTORS, dtype=(F32, BF16, F16, torch.float64))
def test_both_operators_agree(shape, factor, dtype):
    """In place and in a new tensor: the product is rounded once, and what is 0 stays 0."""
    gradient = gradient_of(shape, dtype)
    by = torch.tensor(factor, dtype=torch.float64 if dtype == torch.float64 else F32)
    want = (gradient.to(by.dtype) * by).to(dtype).masked_fill(gradient == 0, 0)
    new = torch.ops.fxpass.scaled(gradient, by)
    assert new.data_ptr() != gradient.data_ptr()
    torch.ops.fxpass.scale_(gradient, by)
    for got in (new, gradient):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("value", "want"), [(3.0, 1.5), (0.0, 0.0)])
def test_a_gradient_without_dimensions(value, want):
    gradient = torch.tensor(value)
    torch.ops.fxpass.scale_(gradient, torch.tensor(0.5))
    assert gradient == want


@in_pairs(
    shape=((5, 7), (4097, 3), (0, 3), (2 * scale.BLOCK + 1,)),
    factor=FACTORS,
    dtype=(F32, BF16, F16),
)
def test_the_kernel(shape, factor, dtype, device, monkeypatch):
    """There are several programs and blocks, or none."""
    monkeypatch.setattr(scale, "BLOCKS", 2)
    gradient = torch.randn(shape, device=device).to(dtype)
    gradient[1:2] = 0
    by = torch.tensor(factor, device=device)
    want = (gradient.float() * by).to(dtype).masked_fill(gradient == 0, 0)
    scale.scale_(gradient, by)
    # the interpreter truncates to bf16
    rounded = torch.finfo(dtype).eps if dtype == BF16 and device.type == "cpu" else 0
    torch.testing.assert_close(gradient, want, rtol=rounded, atol=0, equal_nan=True)


@pytest.mark.parametrize("operator", ["scaled", "scale_"])
def test_opcheck(operator):
    given = torch.randn(3, 4), torch.tensor(0.5)
    torch.library.opcheck(getattr(torch.ops.fxpass, operator).default, given)
