"""The one tolerance policy: an answer may be twice as wrong as eager's at the same dtype.

Errors are relative, in the Frobenius norm, against the same program in float64. Eager is sometimes
exact by luck, so a floor is added, a few units in the last place of the dtype (by mantissa bits).
Where the answer is ill-conditioned (a saturated soft-cap), one rounding of one product decides, and
another machine's order of summation decides otherwise: eager's error is therefore the largest of
several runs, which sum over the hidden size (or over what the caller permutes) in other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

FLOOR = {
    torch.float64: 1e-13,  # 52 bits
    torch.float32: 1e-6,  # 23 bits: 2**-23 = 1.2e-7
    torch.float16: 2e-3,  # 10 bits: 2**-10 = 1e-3
    torch.bfloat16: 1.6e-2,  # 7 bits: 2**-7 = 7.8e-3
}
ORDERS = 64  # of summation; one rounding in a few dozen decides where it is ill-conditioned

Answer = Sequence[Tensor]


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
    got: Answer,
    eager: Answer,
    exact: Answer,
    dtype: torch.dtype,
    others: Callable[[], Iterable[Answer]] = tuple,
    floor: float = 0.0,
) -> None:
    """Each of ``got`` is within twice eager's error of ``exact``, plus the dtype's floor, or
    ``floor`` if it is higher. ``others`` gives eager's answers in other orders of summation; it is
    called if they make a difference."""
    bounds = [0.0] * len(exact)

    def wrong(answer: Answer) -> list[str]:
        found = []
        for i, (ours, theirs, true) in enumerate(zip(got, answer, exact, strict=True)):
            bounds[i] = max(bounds[i], 2 * error(theirs, true) + max(floor, FLOOR[dtype]))
            if not error(ours, true) <= bounds[i]:
                found.append(f"value {i}: {error(ours, true):.2e} > {bounds[i]:.2e}")
        return found

    found = wrong(eager)
    if found:
        for answer in others():
            found = wrong(answer)
            if not found:
                break
    assert not found, "; ".join(found)


def assert_as_accurate(
    fused: Callable[..., Tensor],
    program: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    upstream: Tensor | None = None,
    wide: torch.dtype | None = None,
    floor: float = 0.0,
    reordered: Iterable[Callable[..., Tensor]] = (),
) -> None:
    """The loss of ``fused`` and the gradients of all ``tensors`` are as accurate as ``program``'s,
    in eager. The first tensors are x ``[..., D]`` and weight ``[V, D]``.

    ``wide`` is the dtype in which eager computes, if it is not that of the tensors; ``floor`` is as
    of :func:`assert_close`. ``reordered`` are programs that sum in other orders than ``program``,
    beside those that sum over the hidden size.
    """

    def answer(x: Tensor, weight: Tensor, dtype: torch.dtype | None = wide) -> Answer:
        return loss_and_gradients(program, [x, weight, *tensors[2:]], dtype, upstream)

    def others() -> Iterable[Answer]:
        yield from over_the_hidden_size()
        for other in reordered:
            yield loss_and_gradients(other, tensors, wide, upstream)

    def over_the_hidden_size() -> Iterable[Answer]:
        x, weight = tensors[:2]
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            return []
        (again,) = in_other_orders(lambda *two: answer(*two, torch.float64), x, weight, 1)
        if any(error(a, b) >= 1e-6 for a, b in zip(again, exact, strict=True)):
            return []  # D is not only summed over
        return in_other_orders(answer, x, weight, ORDERS)

    exact = answer(*tensors[:2], torch.float64)
    got = loss_and_gradients(fused, tensors, None, upstream)
    assert_close(got, answer(*tensors[:2]), exact, dtype, others, floor)


def in_other_orders(
    run: Callable[[Tensor, Tensor], Answer], x: Tensor, weight: Tensor, orders: int = 16
) -> list[Answer]:
    """What ``run(x, weight)`` returns, with x ``[..., D]`` and weight ``[V, D]`` permuted alike
    along D. Their gradients, known by their shapes, are permuted back."""
    random = torch.Generator().manual_seed(0)
    found = []
    for _ in range(orders):
        order = torch.randperm(x.shape[-1], generator=random).to(x.device)
        back = order.argsort()
        answer = run(x[..., order], weight[:, order])
        shapes = x.shape, weight.shape
        found.append([t[..., back] if t.shape in shapes else t for t in answer])
    return found


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
