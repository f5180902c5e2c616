"""Numbers and sizes of arguments: compiled as often as by the inner backend."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters


def between(x, w, y, t):
    z = F.linear(x, w) / t
    return F.cross_entropy(z, y), z


def by_keyword(x, w, y, *, t):
    z = t * F.linear(x, w)
    return F.cross_entropy(z, y), z


def before(x, w, y, t):
    z = F.linear(x * t, w * t)
    return F.cross_entropy(z, y), z


def between_loss_and_logits(x, w, y, t):
    z = F.linear(x, w)
    return F.cross_entropy(z * t, y), z


def of_the_logits_alone(x, w, y, t):
    z = F.linear(x, w)
    return F.cross_entropy(z, y), z * t


def after(x, w, y, t):
    z = F.linear(x, w)
    return F.cross_entropy(z, y) * t, z


def computed(x, w, y, t):
    z = F.linear(x, w) * (2 / math.sqrt(max(t, 1e-3)) + 1)
    return F.cross_entropy(z, y, reduction="none").sum(), z


def of_two(x, w, y, t):
    z = F.linear(x * t, w) / (t + 1)
    return F.cross_entropy(z, y), z.float()[:2]


def in_place(x, w, y, t):
    z = F.linear(x, w).div_(t)
    return F.cross_entropy(z, y), z


PROGRAMS = (
    *(between, by_keyword, before, between_loss_and_logits, of_the_logits_alone, after),
    *(computed, of_two, in_place),
)
FLOATS, INTS = (0.5, 0.7, 1.1, 1.7), (1, 2, 3, 5)


def step(function, given, t, by_name):
    """What one call returns and its gradients."""
    x, w, y = (g.clone().requires_grad_(g.is_floating_point()) for g in given)
    loss, z = function(x, w, y, t=t) if by_name else function(x, w, y, t)
    (loss + z.square().mean()).backward()
    return loss.detach(), z.detach() * 1, x.grad, w.grad


def compilations(program, numbers, dynamic, **options) -> int:
    """How often a program is compiled for these numbers; its values are eager's."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(program, backend="fusedce", options=options, dynamic=dynamic)
    given = torch.randn(6, 8), torch.randn(10, 8), torch.randint(10, (6,))
    for t in numbers:
        by_name = program is by_keyword
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
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_number_is_compiled_as_often_as_by_the_inner_backend(program, dynamic, numbers):
    options = {"fusedce.inner": "aot_eager"}
    inner = compilations(program, numbers, dynamic, **options, **{"fusedce.enabled": False})
    assert compilations(program, numbers, dynamic, **options) == inner


@pytest.mark.full
@pytest.mark.parametrize("program", [between, of_the_logits_alone, computed])
def test_with_inductor(program):
    assert compilations(program, FLOATS, None) == 2


def of_a_view(x, w, y, bias):
    z = x @ w.t()
    return F.cross_entropy(z, y), z


def with_a_bias(x, w, y, bias):
    z = F.linear(x, w) + bias
    return F.cross_entropy(z, y), z


@pytest.mark.parametrize("program", [of_a_view, with_a_bias])
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
            torch.testing.assert_close(got.detach().clone(), want, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == counters["fusedce"]["matched"] == 2
