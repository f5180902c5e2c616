"""Losses that are not fused, and the line that says why."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fxpass import messages
from tests.programs.operands import SQUARE
from tests.programs.row import FORMULA, NOTHING, REGION, Row

KIND = "declined"
TRACED = ("exported", "made")


class Head(torch.autograd.Function):
    """A linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


def ragged(x: torch.Tensor) -> torch.Tensor:
    """Two rows, and four."""
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6]))


# fmt: off
ROWS = (
    Row("a head in a custom function", "F.cross_entropy(Head.apply(x, weight), labels)", FORMULA),
    Row("a head in a custom function, without a loss with a name",
        "Head.apply(x, weight).log_softmax(-1).gather(1, labels[:, None]).mean()", FORMULA),
    Row("jagged rows", "F.cross_entropy(F.linear(ragged(x), weight).values(), labels)", FORMULA,
        sizes=SQUARE, never=TRACED),
    Row("a call that cannot be traced",
        "z = x.bfloat16() @ weight.bfloat16().t(); torch.renorm(z, 2, 0, 1.0).logsumexp(-1).mean()",
        REGION),
)
