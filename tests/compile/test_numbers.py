"""Numbers and sizes of arguments: compiled as often as by the inner backend."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters


def of(logits, y, returned=None):
    """What a program returns: the loss of ``logits``, and logits."""
    return F.cross_entropy(logits, y), logits if returned is None else returned


def between_loss_and_logits(x, w, y, t):
    z = F.linear(x, w)
    return of(z * t, y, z)


def of_the_logits_alone(x, w, y, t):
    z = F.linear(x, w)
    return of(z, y, z * t)


def after(x, w, y, t):
    loss, z = of(F.linear(x, w), y)
    return loss * t, z


def computed(x, w, y, t):
    z = F.linear(x, w) * (2 / math.sqrt(max(t, 1e-3)) + 1)
    return F.cross_entropy(z, y, reduction="none").sum(), z


def of_two(x, w, y, t):
    z = F.linear(x * t, w) / (t + 1)
    return of(z, y, z.float()[:2])


PROGRAMS = {
    "between": lambda x, w, y, t: of(F.linear(x, w) / t, y),
    "by keyword": lambda x, w, y, *, t: of(t * F.linear(x, w), y),
    "before": lambda x, w, y, t: of(F.linear(x * t, w * t), y),
    "in place": lambda x, w, y, t: of(F.linear(x, w).div_(t), y),
    "between loss and logits": between_loss_and_logits,
    "of the logits alone": of_the_logits_alone,
    "after": after,
    "computed": computed,
    "of two": of_two,
}
FLOATS, INTS = (0.5, 0.7, 1.1, 1.7), (1, 2, 3, 5)


def step(function, given, t, by_name):
    """What one call returns and its gradients."""
    x, w, y = (g.clone().requires_grad_(g.is_floating_point()) for g in given)
    loss, z = function(x, w, y, t=t) if by_name else function(x, w, y, t)
    (loss + z.square().mean()).backward()
    return loss.detach(), z.detach() * 1, x.grad, w.grad


def compilations(case, numbers, dynamic, **options) -> int:
    """How often a program is compiled for these numbers; its values are eager's."""
    program = PROGRAMS[case]
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(program, backend="fusedce", options=options, dynamic=dynamic)
    given = torch.randn(6, 8), torch.randn(10, 8), torch.randint(10, (6,))
    for t in numbers:
        by_name = case == "by keyword"
        got, want = (step(function, given, t, by_name) for function in (compiled, program))
        torch.testing.assert_close(got, want)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("numbers", "dynamic"),
    [
        (FLOATS, None),
        pytest.param(FLOATS, True, marks=pytest.mark.full),
        pytest.param(INTS, None, marks=pytest.mark.full),
        pytest.param(INTS, True, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("case", PROGRAMS)
def test_a_number_is_compiled_as_often_as_by_the_inner_backend(case, dynamic, numbers):
    options = {"fusedce.inner": "aot_eager"}
    inner = compilations(case, numbers, dynamic, **options, **{"fusedce.enabled": False})
    assert compilations(case, numbers, dynamic, **options) == inner


@pytest.mark.full
@pytest.mark.parametrize("case", ["between", "of the logits alone", "computed"])
def test_with_inductor(case):
    assert compilations(case, FLOATS, None) == 2


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w, y, bias: of(x @ w.t(), y),
        lambda x, w, y, bias: of(F.linear(x, w) + bias, y),
    ],
    ids=["of a view", "with a bias"],
)
def test_the_number_of_classes_of_returned_logits_is_no_constant(program):
    """As in a contrastive loss, whose classes are the rows of a batch."""
    torch._dynamo.reset()
    counters.clear()
    options = {"fusedce.inner": "aot_eager", "fusedce.min_logits_mb": 0}
    compiled = torch.compile(program, backend="fusedce", options=options)
    for v in (20, 30, 40, 50):
        x, w, y = torch.randn(6, 8), torch.randn(v, 8), torch.randint(v, (6,))
        given = x, w.requires_grad_(), y, torch.randn(v)
        for got, want in zip(compiled(*given), program(*given), strict=True):
            torch.testing.assert_close(got.detach().clone(), want)
    assert counters["stats"]["unique_graphs"] == counters["fusedce"]["matched"] == 2
