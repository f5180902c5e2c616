"""The dtypes of an operator call: of its sums and of its gradients.

In: the dtype of the operands. Out: another dtype::

    >>> compute_dtype(torch.bfloat16), gradient_dtype(torch.float16)
    (torch.float32, torch.float32)
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

LOW_PRECISION = {torch.float16, torch.bfloat16}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, exponentials and losses: f64 for f64, f32 for all smaller dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def cast_number(number: float | None, dtype: torch.dtype) -> float | None:
    """A number, cast to a dtype: 2.7 is 2 in int64. None if the dtype cannot hold the number."""
    if not isinstance(number, bool | int | float):
        return None
    try:
        with _disable_current_modes():
            return torch.full((), number, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError):  # below 0 in uint8, nan in int64
        return None


def gradient_dtype(dtype: torch.dtype, unrounded: bool = False) -> torch.dtype:
    """The dtype in which forward returns the gradients of operands of ``dtype``.

    The operands' dtype; for ``unrounded`` gradients the dtype of the sums; and f32 for fp16, whose
    range is too small for the factor 1 / N and for loss scaling.
    """
    return compute_dtype(dtype) if unrounded or dtype == torch.float16 else dtype
