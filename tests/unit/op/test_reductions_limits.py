"""Reductions of equal, infinite and undefined logits, against eager."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fxpass.spec.outputs import ROWS, Moment, Output
from tests.support.reduction_cases import (
    COMBINATIONS,
    INF,
    MOMENTS,
    NAN,
    WEIGHTS,
    Case,
    N,
    V,
    assert_almost_certain,
    case,
)


def with_bias(outputs: Sequence[Output], bias: Tensor) -> Case:
    found = case(outputs, bias=torch.float32)
    found.tensors["bias"] = bias
    return found


def assert_as_eager(found: Case, upstream: Tensor | None = None) -> None:
    """To rounding, with nan and infinities at the same places."""
    answers = []
    for program in (found.fused, found.eager):
        leaves = [t.detach().requires_grad_() for t in found.tensors.values()]
        rows = program(*leaves)
        rows.backward(torch.ones_like(rows) if upstream is None else upstream)
        answers.append([rows.detach(), *(leaf.grad for leaf in leaves)])
    for name, ours, theirs in zip(["rows", *found.tensors], *answers, strict=True):
        if name in found.frozen:
            continue
        assert torch.allclose(ours, theirs, 1e-4, 1e-5, equal_nan=True), (name, ours, theirs)


def test_equal_maxima():
    """The first of them has the gradient, as in torch."""
    found = case(["max"], size=0.0, bias=torch.float32)
    found.tensors["bias"] = torch.tensor([1.0, 4.0, 4.0, 2.0, 4.0, 0.0, 4.0, 4.0, 3.0, 1.0, 2.0])
    assert_as_eager(found, torch.randn(1, N))


def test_the_index_of_equal_maxima_is_torchs():
    found = case(["argmax"], size=0.0)
    indices = found.run([*found.tensors.values()])["indices"]
    assert torch.equal(indices[0], torch.zeros(N, V).max(1).indices)


# The other sums of log-softmaxes are infinite, with gradients that are nan in eager.
OF_SOFTMAX = [*ROWS, *(m for m in MOMENTS if m.a and not m.b)]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("output", OF_SOFTMAX, ids=str)
def test_some_infinite_logits(output):
    bias = torch.randn(V)
    bias[[2, 7]] = -INF
    found = with_bias([output], bias)
    if found.picks is not None:
        found.picks.fill_(3)[0] = 2
    assert_as_eager(found)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_class_without_probability_counts_nothing(weight, b, a):
    """An entropy, say: eager has nan. The answer is that without these classes."""
    bias, kept = torch.randn(V), [i for i in range(V) if i not in (2, 7)]
    bias[[2, 7]] = -INF
    found = with_bias([Moment(a, b, weight)], bias)
    fewer = {n: t[..., kept] for n, t in found.tensors.items() if n not in ("x", "weight")}
    fewer |= {"x": found.tensors["x"], "weight": found.tensors["weight"][kept]}
    other = found._replace(tensors={name: fewer[name] for name in found.tensors})
    answers = []
    for one in (found, other):
        leaves = [t.detach().requires_grad_() for t in one.tensors.values()]
        rows = one.fused(*leaves)
        rows.sum().backward()
        answers.append((rows, leaves[0].grad, leaves[1].grad))
    (rows, x, w), (rows_of_kept, x_of_kept, w_of_kept) = answers
    assert torch.allclose(rows, rows_of_kept, 1e-5, 1e-6)
    assert torch.allclose(x, x_of_kept, 1e-5, 1e-6)
    assert torch.allclose(w[kept], w_of_kept, 1e-5, 1e-6)
    assert not w[[2, 7]].any()


def test_sums_over_infinite_logits_are_eagers():
    bias = torch.randn(V)
    bias[2] = -INF
    outputs = [Moment(0, 1), Moment(0, 2), Moment(0, 1, 0), "at", "max", Moment(0, 1, 1)]
    found = with_bias(outputs, bias)
    found.tensors["given0"][2] = 0
    found.tensors["given1"][:3, 2] = 0
    tensors = [*found.tensors.values()]
    assert torch.allclose(found.fused(*tensors), found.eager(*tensors), 1e-5, 1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("output", "bad"),
    [
        # with a logit of inf, the lse is nan
        *itertools.product(["lse"], [-INF, NAN]),
        *itertools.product(["pick", "max", Moment(2, 0), Moment(1, 1)], [-INF, INF, NAN]),
    ],
)
def test_rows_without_a_distribution(output, bad):
    """Every logit is -inf, one is inf, or one is nan."""
    bias = torch.full((V,), bad) if bad == -INF else torch.zeros(V)
    bias[0] = bad
    assert_as_eager(with_bias([output], bias))


def test_nan_stays_in_its_row():
    found = case(COMBINATIONS["a loss with a z-loss and metrics"])
    found.tensors["x"][2] = NAN
    rows = found.fused(*found.tensors.values())
    others = [0, 1, 3, 4, 5, 6]
    assert rows[:, 2].isnan().all()
    assert rows[:, others].isfinite().all()


def test_the_gradient_of_an_entropy_of_almost_0():
    """A multiple of the softmax cancels before others are added to it."""
    assert_almost_certain(case([Moment(1, 1)], size=0.0, bias=torch.float32))
