"""Custom ``autograd.Function``s between linear and loss: values, gradients, what is left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass import testing
from tests.support import row_tags

B, T, D, V = 2, 6, 8, 67
OPTIONS: dict[str, Any] = {"fusedce.min_logits_mb": 0, "fusedce.inner": "aot_eager"}


def operands() -> list[Tensor]:
    """Hidden states [B, T, D], weight, labels [B, T], factors [B, T]."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(s, generator=random, dtype=torch.float64) for s in ((B, T, D), (V, D)))
    factors = torch.rand((B, T), generator=random, dtype=torch.float64)
    labels = torch.randint(V, (B, T), generator=random)
    return [x.requires_grad_(), weight.requires_grad_(), labels, factors]


def spread(z: Tensor) -> Tensor:
    """Rows of logits by no known formula."""
    return z.sort(-1, descending=True).values[..., :40].logsumexp(-1)


class Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, cap: float) -> Tensor:
        y = torch.tanh(z / cap) * cap
        ctx.save_for_backward(y)
        ctx.cap = cap
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (y,) = ctx.saved_tensors
        return g * (1 - (y / ctx.cap).square()), None


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


def capped(x, weight, labels, factors):
    return spread(Softcap.apply(F.linear(x, weight), 3.0))


def capped_and_shifted(x, weight, labels, factors):
    z = Softcap.apply(F.linear(x, weight), 3.0)
    return spread(z[:, :-1]).mean() + z[:, ::2].square().mean()


def rows_taken_twice(x, weight, labels, factors):
    z = Softcap.apply(F.linear(x, weight), 3.0)
    return spread(z.flatten(0, 1)[labels.flatten() % 7]).mean()


def loss_and_metric(x, weight, labels, factors):
    losses, best = Loss.apply(F.linear(x, weight), labels)
    return (losses * factors).sum(), best


def flattened(x, weight, labels, factors):
    losses, _ = Loss.apply(F.linear(x, weight).flatten(0, 1), labels.flatten())
    return losses.square().mean()


def weighted(x, weight, labels, factors):
    return spread(Weighted.apply(F.linear(x, weight), factors))


def two_heads(x, weight, labels, factors):
    return Expected.apply(F.linear(x, weight), F.linear(x.tanh(), weight)).square()


def one_after_another(x, weight, labels, factors):
    z = Softcap.apply(F.linear(x, weight) * 0.5, 3.0)
    return Loss.apply(z, labels)[0] + spread(Weighted.apply(z, factors))


def without_gradients(x, weight, labels, factors):
    with torch.no_grad():
        return spread(Softcap.apply(F.linear(x, weight), 3.0))


FUSED = [
    *(capped, capped_and_shifted, rows_taken_twice, loss_and_metric, flattened, weighted),
    *(two_heads, one_after_another, without_gradients),
]


class Clipped(torch.autograd.Function):
    """A region would clip what is multiplied later, and each view's gradient apart."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return g.clamp(-0.01, 0.01)


class Auxiliary(torch.autograd.Function):
    """Adds a gradient to every row, also to one that nobody reads."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return g + 0.5


class Ignoring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        (z,) = ctx.saved_tensors
        return z * 0.1


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


class Centred(torch.autograd.Function):
    """The gradient mixes rows."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return g - g.mean(0, keepdim=True)


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # pyright: ignore
        return g * (torch.rand(g.shape) * 0 + 1)


REFUSED = [
    (Noisy, "draws random numbers"),
    (Clipped, "is not linear in its gradient (aten.clamp)"),
    (Auxiliary, "is not linear in its gradient (aten.add)"),
    (Ignoring, "does not read its gradient"),
    (Overwriting, "writes to its arguments, or to what it saved"),
    (Mean, "reads the gradient of a result that mixes rows"),
    (Centred, "aten.mean reduces rows"),
]


def check(program: Any) -> None:
    """Asserts that values and gradients are eager's."""
    compiled = torch.compile(program, backend="fusedce", options=OPTIONS)
    results = []
    for function in (program, compiled):
        given = operands()
        made = function(*given)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        if trained := [t for t in outputs if t.requires_grad]:
            torch.autograd.backward([t.sum() for t in trained])
        results.append([*(t.detach() for t in outputs), given[0].grad, given[1].grad])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("program", FUSED, ids=lambda f: f.__name__)
def test_a_region_with_a_custom_function(program):
    text = testing.rewritten(program, *operands())
    assert "fxpass.row_region" in text
    assert "autograd_function_apply" not in text
    assert "linear(" not in text
    check(program)


@pytest.mark.parametrize(("function", "reason"), REFUSED, ids=lambda f: getattr(f, "__name__", ""))
def test_what_stays(function, reason):
    def program(x, weight, labels, factors):
        made = function.apply(F.linear(x, weight))
        return spread(made) if made.dim() == 3 else made

    assert "fxpass.row_region" not in testing.rewritten(program, *operands())
    assert any(reason in no for no in row_tags.check(program, *operands()).refused)
    check(program)
