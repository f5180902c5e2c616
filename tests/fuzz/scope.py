"""What the texts of random programs name besides torch and their operands.

In: nothing. Out: :data:`SCOPE`. On one rank, tensors that are spread over ranks are themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def halved(t: Tensor, times: int) -> Tensor:
    """The mean of a tensor and its tanh, again and again: 2**times paths through a graph."""
    for _ in range(times):
        t = (t + t.tanh()) / 2
    return t


class Capped(torch.autograd.Function):
    """A soft-cap with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, cap: float) -> Tensor:
        y = torch.tanh(z / cap) * cap
        ctx.save_for_backward(y)
        ctx.cap = cap
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return g * (1 - (y / ctx.cap).square()), None


class Clipped(torch.autograd.Function):
    """The identity, whose backward is not linear."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.05, 0.05)


class Picked(torch.autograd.Function):
    """Log-probabilities of labels, and the largest of a row."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, labels: Tensor, d: int) -> tuple[Tensor, Tensor]:
        p = z.log_softmax(d)
        ctx.save_for_backward(p, labels)
        ctx.d = d
        return p.gather(d, labels).squeeze(d), p.amax(d)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, None, None]:
        p, labels = ctx.saved_tensors
        chosen = torch.zeros_like(p).scatter(ctx.d, labels, 1.0)
        return (chosen - p.exp()) * (g + 0.5 * h).unsqueeze(ctx.d), None, None


def same(t: Tensor) -> Tensor:
    """The tensor."""
    return t


seen: list[Any] = []
SCOPE: dict[str, Any] = {
    **{"halved": halved, "Capped": Capped, "Clipped": Clipped, "Picked": Picked},
    **{"spread": same, "dealt": same, "gathered": same, "seen": seen.append},
}
