"""Modes of autograd between linear and loss: no_grad, inference mode, torch.func."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass import explain
from tests.support.programs import V, check, head_of, inputs, last, reason_of, report_of


def linear_under_no_grad(x, weight, labels):
    with torch.no_grad():
        logits = F.linear(x, weight)
    return F.cross_entropy(last(logits), labels.view(-1)) + x.sum() + weight.sum()


def loss_under_no_grad(x, weight, labels):
    logits = F.linear(x, weight)
    with torch.no_grad():
        loss = F.cross_entropy(last(logits), labels.view(-1))
    return loss + x.sum() + weight.sum()


def teacher_in_between(x, weight, labels):
    logits = F.linear(x, weight)
    with torch.no_grad():
        teacher = F.linear(x.detach().flip(0), weight).cumsum(-1).mean()
    return F.cross_entropy(last(logits), labels.view(-1)) * teacher


def both_under_no_grad(x, weight, labels):
    with torch.no_grad():
        loss = F.cross_entropy(last(F.linear(x, weight)), labels.view(-1))
    return loss * x.sum() * weight.sum()


@pytest.mark.parametrize(
    "program",
    [linear_under_no_grad, loss_under_no_grad, teacher_in_between, both_under_no_grad],
)
def test_gradients_switched_off_and_on(program):
    """What counts is whether anything on the way loses its gradient, not who switches between."""
    x, weight, labels = inputs()
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


def test_gradients_switched_off_on_the_way():
    def program(x, weight, bias, labels):
        with torch.no_grad():
            logits = F.linear(x, weight)
        return F.cross_entropy(last(logits + bias), labels.view(-1))

    x, weight, labels = inputs()
    bias = torch.zeros(V, requires_grad=True)
    assert "gradients are switched on or off between" in reason_of(program, x, weight, bias, labels)


def test_a_view_that_is_taken_under_no_grad():
    """It says that it needs a gradient, and passes none on."""

    def program(x, weight, labels):
        logits = F.linear(x, weight)
        with torch.no_grad():
            logits = logits.flatten(0, -2)
        return F.cross_entropy(logits, labels.view(-1))

    x, weight, labels = inputs()
    assert "has a gradient that its logits do not have" in reason_of(program, x, weight, labels)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    fused(x, weight, labels).backward()
    assert x.grad is None


def test_a_row_that_is_written_to_and_not_read():
    """Its atoms have no gradient in eager, which is not one of zeros."""

    def program(x, weight, atoms, labels):
        z, labels = last(F.linear(x, weight)), labels.view(-1)
        row = (z.softmax(-1) * atoms).sum(-1)
        row[0] = 0
        return F.cross_entropy(z, labels)

    x, weight, labels = inputs()
    atoms = torch.ones(V, requires_grad=True)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    fused(x, weight, atoms, labels).backward()
    assert atoms.grad is None


def of_reference(x, weight, labels):
    with torch.inference_mode():
        z, labels = last(F.linear(x, weight)), labels.view(-1)
        picked = z.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)
    return F.cross_entropy(last(F.linear(x, weight)), labels), picked


def of_frozen_logits(x, weight, labels):
    with torch.inference_mode():
        z = F.linear(x, weight)
    return (F.cross_entropy(last(z), labels.view(-1)),)


def of_metric(x, weight, labels):
    z = F.linear(x, weight)
    with torch.inference_mode():
        return (last(z).logsumexp(-1) + x[:, :, 0].reshape(-1),)


def with_gradients_on(x, weight, labels):
    with torch.inference_mode():
        z = F.linear(x, weight)
        with torch.enable_grad():
            z = z + weight.sum()
        at = labels.view(-1)
    with torch.no_grad(), torch.inference_mode():
        z = last(z)
    return (F.cross_entropy(z, at),)


@pytest.mark.parametrize(
    ("program", "losses"),
    [(of_reference, 2), (of_frozen_logits, 1), (of_metric, 1), (with_gradients_on, 0)],
)
def test_a_block_of_inference_mode(program, losses):
    """AOTAutograd raises for views there, and then for every other graph of the process."""
    x, weight, labels = inputs()
    assert len(report_of(program, x, weight, labels).matches) == losses
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    found, expected = fused(x, weight, labels), program(x, weight, labels)
    torch.testing.assert_close(found, expected)
    assert [t.requires_grad for t in found] == [t.requires_grad for t in expected]
    for one, other in zip(found, expected, strict=True):
        if one.requires_grad:
            torch.testing.assert_close(*(torch.autograd.grad(t, (x, weight)) for t in (one, other)))
    torch.compile(torch.sin, backend="aot_eager")(x)


def test_inference_mode_that_is_switched_off():
    """Which switches gradients on, whatever they were."""

    def program(x, weight, labels):
        logits = F.linear(x, weight)
        with torch.inference_mode(False):
            return F.cross_entropy(last(logits), labels.view(-1))

    args = inputs()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
            loss, expected = fused(*args), program(*args)
        torch.testing.assert_close(loss, expected)
        assert loss.requires_grad == expected.requires_grad


@pytest.mark.parametrize("enabled", [False, True])
def test_returned_logits_of_a_block_without_inference_mode(enabled):
    """It switches gradients on, also under no_grad."""

    def program(x, weight, labels):
        with torch.inference_mode(False):
            logits = F.linear(x, weight)
            return F.cross_entropy(last(logits), labels.view(-1)), logits

    found, given = [], inputs()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    for run in (program, fused):
        args = *(t.detach().clone().requires_grad_() for t in given[:2]), given[2]
        with torch.set_grad_enabled(enabled):
            loss, logits = run(*args)
        (loss + logits.square().sum()).backward()
        found.append([logits.detach() * 1, *(t.grad for t in args[:2])])
    torch.testing.assert_close(*found)


def per_example(x, weight, labels):
    def loss(x, labels):
        return F.cross_entropy(F.linear(x, weight), labels)

    return torch.func.vmap(loss)(x, labels)


def functional_gradient(x, weight, labels):
    def loss(weight):
        return F.cross_entropy(last(F.linear(x, weight)), labels.view(-1))

    return torch.func.grad(loss)(weight)


@pytest.mark.parametrize("program", [per_example, functional_gradient])
def test_a_loss_inside_a_functional_transform(program):
    x, weight, labels = (t.detach() for t in inputs())
    assert "torch.func transform" in reason_of(program, x, weight, labels)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    torch.testing.assert_close(fused(x, weight, labels), program(x, weight, labels))


def test_masks_and_gradients_of_functional_transforms_before_the_head():
    """As transformers make attention masks: what wraps tensors writes to none."""

    def program(x, weight, labels):
        mask = torch.vmap(torch.vmap(lambda label: label < 5))(labels)
        h = torch.vmap(torch.func.grad(lambda row: row.square().sum()))(x)
        return F.cross_entropy(last(F.linear(h * mask.unsqueeze(-1), weight)), labels.view(-1))

    args = inputs()
    head_of(program, *args)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    torch.testing.assert_close(fused(*args), program(*args))


def test_the_labels_are_what_a_functional_transform_returns():
    """The call stands after the transform, in which no tensor may require gradients."""

    def program(x, weight, labels):
        z = last(F.linear(x, weight))
        classes = torch.vmap(lambda label: label // 2)(labels.view(-1))
        return z[torch.arange(len(z)), classes].mean()

    args = inputs()
    head_of(program, *args)
    for inner in ("eager", "aot_eager", "inductor"):
        fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": inner})
        torch.testing.assert_close(fused(*args), program(*args))


def test_a_reduction_inside_a_functional_transform():
    def program(x, weight, labels):
        z = last(F.linear(x, weight))
        return torch.vmap(lambda label: z.logsumexp(-1) * label)(labels.view(-1))

    args = inputs()
    assert not explain(program, *args).matches
    for inner in ("eager", "aot_eager"):
        fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": inner})
        torch.testing.assert_close(fused(*args), program(*args))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_with_a_constant_in_inference_mode(smoothing):
    """Where autograd finds nothing."""

    def program(x, weight, labels):
        z = last(F.linear(x, weight))
        loss = F.nll_loss(3 - z, labels.view(-1), ignore_index=3)
        return loss + F.cross_entropy(z, labels.view(-1), label_smoothing=smoothing)

    def alone(x, weight, labels):
        return F.nll_loss(last(F.linear(x, weight)).sigmoid() - 2, labels.view(-1))

    args = inputs()
    for each in (program, alone):
        fused = torch.compile(each, backend="fusedce", options={"fusedce.inner": "eager"})
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(fused(*args), each(*args))
