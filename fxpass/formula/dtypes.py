"""The dtypes of an operator call: of class indices, of sums, and of gradients.

In: the dtype of the operands. Out: another dtype::

    >>> compute_dtype(torch.bfloat16), gradient_dtype(torch.float16)
    (torch.float32, torch.float32)
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

LOW_PRECISION = {torch.float16, torch.bfloat16}


def short(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, exponentials and losses: f64 for f64, f32 for everything smaller."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def held(number: float | None, dtype: torch.dtype) -> float | None:
    """A number as a tensor of a dtype has it: 2.7 is 2 in int64; None if the dtype has it not."""
    if not isinstance(number, bool | int | float):
        return None
    try:
        with _disable_current_modes():
            return torch.full((), number, dtype=dtype, device="cpu").item()
    except (RuntimeError, OverflowError):  # below 0 in uint8, nan in int64
        return None


def gradient_dtype(dtype: torch.dtype, unrounded: bool = False) -> torch.dtype:
    """The dtype in which forward returns the gradients of operands of ``dtype``.

    It is the operands' dtype, but that of the sums for ``unrounded`` gradients, and f32 for fp16,
    whose range is too small for the factor 1 / N and for loss scaling.
    """
    return compute_dtype(dtype) if unrounded or dtype == torch.float16 else dtype
