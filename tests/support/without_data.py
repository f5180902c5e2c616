"""The operands of a call without their data."""

from __future__ import annotations

import torch

from fxpass.formula.operands import Operands


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operands(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    bias: torch.dtype | None = None,
    scaled: bool = False,
    picks: int | None = None,
    given: tuple[bool, ...] = (),
) -> Operands:
    """``picks`` of a row, or None; of ``given`` values whether each is ``[N, V]``."""
    return Operands(
        tensor(n, d, dtype=dtype),
        tensor(v, d, dtype=dtype),
        None if bias is None else tensor(v, dtype=bias),
        tensor(n) if scaled else None,
        None if picks is None else tensor(n, picks, dtype=torch.int64),
        tuple(tensor(n, v) if of_rows else tensor(v) for of_rows in given),
    )
