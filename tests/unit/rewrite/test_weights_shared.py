"""Several losses over one weight, as heads chunked by hand have: none keeps a gradient of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass import testing
from tests.support.allocations import Allocations
from tests.support.programs import head_of

N, D, V = 64, 32, 500


def by_hand(chunks):
    def loss(x, weight, target):
        total = 0.0
        for some, labels in zip(x.chunk(chunks), target.chunk(chunks), strict=True):
            logits = F.linear(some, weight)
            total = total + F.cross_entropy(logits.float(), labels, reduction="sum")
        return total / len(target)

    return loss


def operands():
    x, weight = torch.randn(N, D), torch.randn(V, D)
    return x.requires_grad_(), weight.requires_grad_(), torch.randint(0, V, (N,))


@pytest.mark.parametrize(("chunks", "strategy"), [(1, "chunked"), (2, "chunked"), (16, "tiled")])
def test_the_choice_sees_all_losses_of_a_weight(chunks, strategy):
    report = testing.assert_fused(by_hand(chunks), *operands(), losses=chunks)
    assert _strategies(report) == {strategy}


def _strategies(report):
    """Of the calls that compute gradients."""
    calls = [call for match in report.matches for call in match.calls]
    return {call.choice.strategy for call in calls if call.spec.gradients}


def test_weights_are_compared_through_casts_and_transposes():
    def loss(x, weight, target):
        total = 0.0
        for some, labels in zip(x.chunk(16), target.chunk(16), strict=True):
            total = total + F.cross_entropy(some @ weight.to(torch.bfloat16).t(), labels)
        return total

    x, weight, target = operands()
    x = x.detach().bfloat16().requires_grad_()
    report = testing.assert_fused(loss, x, weight, target, losses=16)
    assert _strategies(report) == {"tiled"}


@pytest.mark.parametrize("chunks", [4, 16])
def test_memory_is_no_more_than_without(chunks):
    peaks = []
    for enabled in (False, True):
        torch._dynamo.reset()
        options = {"fusedce.inner": "aot_eager", "fusedce.enabled": enabled}
        compiled = torch.compile(by_hand(chunks), backend="fusedce", options=options)
        *leaves, target = operands()
        compiled(*leaves, target).backward()  # compiles it
        for leaf in leaves:
            leaf.grad = None
        with Allocations() as allocated:
            compiled(*leaves, target).backward()
        peaks.append(allocated.peak([]))
    assert peaks[1] <= 1.05 * peaks[0]


def test_logits_that_no_call_reduces_save_no_gradient():
    """The log-softmax of all rows, of which the program reads some."""

    def program(x, weight, labels):
        logs = F.linear(x, weight).log_softmax(-1)[:, :-1]
        return -logs.gather(-1, labels[:, 1:, None]).mean()

    x, weight = torch.randn(2, 4, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    (call,) = head_of(program, x, weight, torch.randint(V, (2, 4))).calls
    assert call.choice.strategy == "chunked", call.choice
