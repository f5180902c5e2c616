"""The one tolerance policy: an answer may be twice as wrong as eager's at the same dtype.

Errors are relative, in the Frobenius norm, against the same program in float64. Eager is sometimes
exact by luck, so a floor is added, a few units in the last place of the dtype (by mantissa bits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FLOOR = {
    torch.float64: 1e-13,  # 52 bits
    torch.float32: 1e-6,  # 23 bits: 2**-23 = 1.2e-7
    torch.float16: 2e-3,  # 10 bits: 2**-10 = 1e-3
    torch.bfloat16: 1.6e-2,  # 7 bits: 2**-7 = 7.8e-3
}


def error(got: Tensor, exact: Tensor) -> float:
    """Relative error; 0 where both are nan in the same places, inf where only one is."""
    got, exact = got.detach().double(), exact.detach().double()
    assert got.shape == exact.shape
    if not torch.equal(got.isnan(), exact.isnan()):
        return float("inf")
    got, exact = got.nan_to_num(), exact.nan_to_num()
    norm = exact.norm()
    return float((got - exact).norm() / norm) if norm > 0 else float(got.norm())


def assert_close(
    got: Sequence[Tensor], eager: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Each of ``got`` is within twice eager's error of ``exact``, plus the dtype's floor."""
    for i, (ours, theirs, true) in enumerate(zip(got, eager, exact, strict=True)):
        bound = 2 * error(theirs, true) + FLOOR[dtype]
        assert error(ours, true) <= bound, f"value {i}: {error(ours, true):.2e} > {bound:.2e}"


def loss_and_gradients(
    program: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype | None = None,
    upstream: Tensor | None = None,
) -> list[Tensor]:
    """The loss of ``program(*tensors)`` and the gradient of each tensor.

    ``dtype`` is what the tensors are converted to first (they are rounded already, so float64 gives
    the exact answer for the same numbers); ``upstream`` is the gradient of a loss per row.
    """
    leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]
    loss = program(*leaves)
    loss.backward(upstream if upstream is None else upstream.to(loss.dtype))
    return [loss.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
