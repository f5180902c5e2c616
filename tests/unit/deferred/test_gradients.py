"""Gradients of deferred logits and of what is made of them, and what changes before backward.

Each use of a model returns what eager returns, and the model's parameters have eager's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxpass import messages
from fxpass.deferred.inputs import StaleLogitsError
from tests.support.deferred_models import (
    LABELS,
    ROWS,
    TARGETS,
    B,
    Capped,
    Model,
    T,
    agree,
    deferring,
    is_deferring,
    no_logits,
    of_labels,
)


def picked(z: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, LABELS[..., None])


def returned(loss: Tensor, *others: Any) -> list[Any]:
    """A loss, after its backward, and others."""
    loss.backward()
    return [loss, *others]


# ---------------------------------------------------------------- gradients and hooks


def gradient_of_the_logits(model: Model) -> Any:
    logits = model()
    logits.retain_grad()
    loss = of_labels(logits) + logits.logsumexp(-1).square().mean()
    return torch.autograd.grad(loss, logits)


def hook_that_changes_the_gradient(model: Model) -> Any:
    logits, seen = model(), []
    logits.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    logits.retain_grad()
    return returned(of_labels(logits), seen, logits.grad)


def early_hook(model: Model) -> Any:
    view, seen = model()[:, :-1], []
    view.argmax(-1)
    view.register_hook(lambda grad: seen.append(grad.clone()))
    p = view.softmax(-1)
    loss = F.cross_entropy(view.flatten(0, 1), LABELS[:, 1:].flatten()) + (p * p.log()).sum()
    p.register_hook(lambda grad: seen.append(grad.clone()) or grad * 3)
    return returned(loss, seen)


def gradients_in_between(model: Model) -> Any:
    """Of what functions make of logits that the program has looked at."""
    z, weights = model(), torch.linspace(0.5, 2, B * T).view(B, T, 1).requires_grad_()
    z.retain_grad()
    p = F.softplus(z)
    scaled = p * weights
    loss = scaled.logsumexp(-1).sum() + (scaled[:, 1:].softmax(-1) * weights[:, 1:]).square().sum()
    found = torch.autograd.grad(loss, [scaled, z, p, weights], retain_graph=True)
    again = torch.autograd.grad(loss, inputs=weights, retain_graph=True)
    return returned(loss, found, again)


def hook_without_a_gradient(model: Model) -> Any:
    """It is not called."""
    logits, weights = model(), torch.ones(B, T, 1, requires_grad=True)
    logits.register_hook(lambda grad: pytest.fail(str(grad)))
    (logits.detach() * weights).logsumexp(-1).sum().backward()
    return weights.grad


def backward_twice(model: Model) -> Any:
    loss = of_labels(model())
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    return loss


def trained_operands(model: Model) -> Any:
    temperature, factors = torch.tensor(1.5, requires_grad=True), ROWS.clone().requires_grad_()
    logits = model() / temperature
    of_labels(logits).add((logits * factors).logsumexp(-1).mean()).backward()
    return temperature.grad, factors.grad


def views_without_gradients(model: Model) -> Any:
    """Of logits with gradients."""
    logits = model()
    loss = of_labels(logits)
    with torch.no_grad():
        view = logits[:, :-1]
        found = view.argmax(-1), view.flatten(0, 1).float().logsumexp(-1)
    return returned(loss, found)


# ---------------------------------------------------------------- two of them, or another function


def two_models(distance: Callable[..., Tensor], mode: Any, model: Model) -> Any:
    """A student's logits and a teacher's, compiled apart."""
    teacher = deferring(Capped()) if is_deferring(model) else Capped()
    with mode():
        target = teacher()
    return returned(distance(model().log_softmax(-1), target.log_softmax(-1)))


def two_calls(model: Model) -> Any:
    first, second = model(), model()
    goal = second.softmax(-1).detach() * 0.5
    return returned(F.kl_div(first.log_softmax(-1), goal, reduction="sum"))


class Reversed(torch.autograd.Function):
    """Returns what it is given; its gradient is the negative."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def hooks_of_saved_tensors_disabled(model: Model) -> Any:
    logits = model()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        loss = of_labels(logits)
    return returned(loss)


# ---------------------------------------------------------------- what changes in between


def small_operand_that_is_written_to(model: Model) -> Any:
    """It is copied."""
    scale = torch.full((), 2.0)
    scaled = model() * scale
    scale.add_(1)
    return scaled.logsumexp(-1)


def with_a_frozen_head(model: Model) -> Tensor:
    """Eager's backward does not read the weight, but the logits, which the program may write to."""
    for frozen in model.parameters():
        frozen.requires_grad_(frozen is model.head.bias)
    logits = model()
    loss = (logits * ROWS).exp().sum()
    logits.data_ptr()
    with torch.no_grad():
        model.head.weight.add_(1)
    return loss, logits


def write_after_a_function(write: Callable[[Tensor], Any], model: Model) -> Any:
    logits = model() if is_deferring(model) else model() * 1
    scored = logits.log_softmax(-1)
    write(logits)
    return returned(scored.gather(-1, LABELS[..., None]).sum())


def write_to_the_logits(model: Model) -> Any:
    logits = model()
    older = logits.log_softmax(-1)
    before = logits.logsumexp(-1)
    with torch.no_grad():
        logits.zero_()
    return before, older.exp().sum(-1), logits.logsumexp(-1), older * 1


def step_in_between(scored_before: bool, model: Model) -> Any:
    """Logits have the values of before the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    logits = model()
    of_labels(logits).backward(retain_graph=True)
    scored = logits.log_softmax(-1) if scored_before else None
    optimizer.step()
    scored = logits.log_softmax(-1) if scored is None else scored
    with torch.no_grad():
        return scored.gather(-1, LABELS[..., None])


kl = partial(F.kl_div, reduction="batchmean", log_target=True)


def cosine(p: Tensor, q: Tensor) -> Tensor:
    return F.cosine_similarity(p, q.square(), -1).mean()


USES: dict[str, Callable[[Model], Any]] = {
    "gradient of the logits": gradient_of_the_logits,
    "hook that changes the gradient": hook_that_changes_the_gradient,
    "early hook": early_hook,
    "gradients in between": gradients_in_between,
    "hook without a gradient": hook_without_a_gradient,
    "backward twice": backward_twice,
    "trained operands": trained_operands,
    "views without gradients": views_without_gradients,
    "two models, kl, no_grad": partial(two_models, kl, torch.no_grad),
    "two models, kl, inference": partial(two_models, kl, torch.inference_mode),
    "two models, cosine, no_grad": partial(two_models, cosine, torch.no_grad),
    "two models, cosine, inference": partial(two_models, cosine, torch.inference_mode),
    "two calls": two_calls,
    "a custom function": lambda model: returned(of_labels(Reversed.apply(model()))),
    # making the program saves nothing for the backward of the checkpoint
    "checkpoint": lambda model: returned(checkpoint(of_labels, model(), use_reentrant=False)),
    "hooks of saved tensors disabled": hooks_of_saved_tensors_disabled,
    "small operand that is written to": small_operand_that_is_written_to,
    "multiplied after a function": partial(write_after_a_function, lambda z: z.mul_(2)),
    "detached after a function": partial(write_after_a_function, lambda z: z.detach_()),
    "write to the logits": write_to_the_logits,
    "scored before a step": partial(step_in_between, True),
    "scored after a step": partial(step_in_between, False),
}


@pytest.mark.parametrize("name", USES)
def test_as_in_eager(name):
    agree(USES[name])


LATE: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "gradient of the logits": lambda z, view, loss: torch.autograd.grad(loss, z),
    "gradient of a view": lambda z, view, loss: torch.autograd.grad([loss], [view]),
    "hook": lambda z, view, loss: z.register_hook(print),
    "hook of a view": lambda z, view, loss: view.register_hook(print),
    "retained": lambda z, view, loss: view.retain_grad(),
}


@pytest.mark.parametrize("name", LATE)
def test_gradients_that_do_not_pass_the_logits_raise(name):
    """A function was computed without the logits before the program looks at their gradient."""
    z = deferring(Model())()
    view = z[:, 1:].float()
    loss = F.cross_entropy(view.flatten(0, 1), LABELS[:, 1:].flatten())
    with pytest.raises(RuntimeError, match=r"retain_grad\(\) on the logits before"):
        LATE[name](z, view, loss)
    with no_logits():
        loss.backward()


def test_a_second_derivative_raises():
    model = deferring(Model())
    loss = of_labels(model())
    (gradient,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.square().sum().backward()


def test_an_operand_as_large_as_the_logits_that_is_written_to_raises():
    targets = TARGETS.clone()
    scaled = deferring(Model())() * targets
    targets.add_(1)
    with pytest.raises(StaleLogitsError, match=messages.CHANGED):
        scaled.logsumexp(-1)


def test_a_frozen_weight_that_changes_before_backward():
    agree(lambda model: returned(with_a_frozen_head(model)[0]), lambda: Model(bias=True))
