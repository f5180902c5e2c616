"""The dtypes of sums and of gradients."""

from __future__ import annotations

import torch

from fxpass.formula.dtypes import compute_dtype, gradient_dtype

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def test_half_precision_is_computed_in_f32_and_f64_in_f64():
    assert {compute_dtype(dtype) for dtype in (F16, BF16, F32)} == {F32}
    assert compute_dtype(F64) == F64


def test_gradients_have_their_operands_dtype_where_that_has_the_range():
    found = {dtype: gradient_dtype(dtype) for dtype in (F16, BF16, F32, F64)}
    assert found == {F16: F32, BF16: BF16, F32: F32, F64: F64}
