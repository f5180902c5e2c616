"""Custom ``autograd.Function``s between linear and loss: part of a region, or left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuzz.scope import Capped as Softcap
from tests.programs.row import FORMULA, NOTHING, OUTSIDE, REGION, Row
from tests.programs.rows.refused import spread

KIND = "custom functions"
__all__ = ["Softcap", "spread"]


class Loss(torch.autograd.Function):
    """Cross-entropy of a smoothed gradient, and the largest class."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, labels: Tensor) -> Any:
        log_probs = z.log_softmax(-1)
        ctx.save_for_backward(log_probs, labels)
        return -log_probs.gather(-1, labels[..., None]).squeeze(-1), log_probs.argmax(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:  # pyright: ignore
        log_probs, labels = ctx.saved_tensors
        exact = log_probs.exp() - F.one_hot(labels, log_probs.shape[-1])
        return (0.9 * exact + 0.1 * log_probs) * g[..., None], None


class Weighted(torch.autograd.Function):
    """The identity; backward alone reads the factors."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, factors: Tensor) -> Tensor:
        ctx.save_for_backward(factors)
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (factors,) = ctx.saved_tensors
        return g * factors[..., None], None


class Expected(torch.autograd.Function):
    """The expectation of one head's logits under another's, which both get a gradient."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, other: Tensor) -> Tensor:
        p = z.softmax(-1)
        ctx.save_for_backward(p, other)
        return (p * other).sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        p, other = ctx.saved_tensors
        mean = (p * other).sum(-1, keepdim=True)
        return g[..., None] * p * (other - mean), g[..., None] * p


class Copied(torch.autograd.Function):
    """The identity, whose backward is that of a subclass."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.clone()


class Clipped(Copied):
    """A region would clip what is multiplied later, and each view's gradient apart."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return g.clamp(-0.01, 0.01)


class Auxiliary(Copied):
    """Adds a gradient to every row, also to one that nobody reads."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return g + 0.5


class Ignoring(Copied):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        (z,) = ctx.saved_tensors
        return z * 0.1


class Centred(Copied):
    """The gradient mixes rows."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return g - g.mean(0, keepdim=True)


class Noisy(Copied):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return g * (torch.rand(g.shape) * 0 + 1)


class Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        p = z.softmax(-1)
        ctx.save_for_backward(p)
        return p.square().sum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        (p,) = ctx.saved_tensors
        return p.mul_(g[..., None])


class Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.square().mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        (z,) = ctx.saved_tensors
        return 2 * g * z / z.numel()


# Tracers write down what forward does, of which autograd has other gradients; so does Dynamo where
# gradients are off.
# Where the number of classes varies, backward of Loss is no part of a region.
TRACED = ("exported", "decomposed", "made", "made before autograd")

# fmt: off
FUNCTIONS = (
    Row("a soft-cap", "spread(Softcap.apply(z, 3.0))", REGION),
    Row("a soft-cap, shifted and strided",
        "y = Softcap.apply(s, 3.0); spread(y[:, :-1]).mean() + y[:, ::2].square().mean()",
        REGION),
    Row("rows taken twice",
        "y = Softcap.apply(s, 3.0); spread(y.flatten(0, 1)[labels % 7]).mean()",
        REGION),
    Row("a loss and a metric",
        "losses, best = Loss.apply(s, tokens); ((losses * old_tokens).sum(), best)",
        FORMULA, never=("dynamic", "no_grad")),
    Row("a loss of flattened rows", "losses, _ = Loss.apply(z, labels); losses.square().mean()",
        FORMULA, never=("dynamic", "no_grad")),
    Row("factors that backward alone reads",
        "spread(Weighted.apply(z, advantages))", REGION),
    Row("two heads",
        "Expected.apply(z, F.linear(x.tanh(), weight)).square()", REGION),
    Row("one after another",
        "y = Softcap.apply(z * 0.5, 3.0); "
        "Loss.apply(y, labels)[0] + spread(Weighted.apply(y, advantages))",
        REGION, never=("dynamic", "no_grad")),
    Row("without gradients",
        "with torch.no_grad():\n"
        "    return spread(Softcap.apply(z, 3.0))", REGION),
    Row("overwriting gradients", "Overwriting.apply(s)", FORMULA),
    Row("mean gradients", "Mean.apply(s)", REGION),
    *(Row(f"{name.lower()} gradients", f"spread({name}.apply(s))", becomes,
          never=("checkpointed", "no_grad", *never))
      for name, becomes, *never in (
          ("Noisy", REGION, "dynamic"), ("Clipped", REGION), ("Auxiliary", REGION),
          ("Ignoring", REGION), ("Centred", NOTHING))),
)
# The history of logits that a function returns is no head's.
ROWS = tuple(
    replace(
        row,
        computes=() if row.name == "without gradients" else OUTSIDE,
        never=(*row.never, *TRACED),
    )
    for row in FUNCTIONS
)
