"""Losses of rows from their log-probabilities, against ``F.cross_entropy``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.op.losses import cross_entropy_of

N, V = 12, 9


def log_probabilities(
    z: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """What a call of the operator returns: of class 0 where a row is ignored."""
    index = target.flatten().long()
    if ignore_index is not None:
        index = index.masked_fill(index == ignore_index, 0)
    log = z.log_softmax(1)
    picked = log[torch.arange(len(z)), index]
    return picked, (log if weight is None else log * weight).sum(1)


def both(
    z: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    smoothing: float,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Loss and gradient of the logits, ours and torch's."""

    def ours(z: Tensor) -> Tensor:
        picked, mean_log = log_probabilities(z, target, weight, ignore_index)
        mean = mean_log if smoothing else None
        options = reduction, ignore_index, smoothing, V
        loss = cross_entropy_of(picked, mean, target, weight, *options)
        return loss.view_as(target) if reduction == "none" else loss

    def torchs(z: Tensor) -> Tensor:
        every = -100 if ignore_index is None else ignore_index
        index, options = target.flatten(), (weight, None, every, None, reduction, smoothing)
        loss = F.cross_entropy(z, index, *options)
        return loss.view_as(target) if reduction == "none" else loss

    answers = []
    for program in (ours, torchs):
        leaf = z.detach().requires_grad_()
        loss = program(leaf)
        loss.backward(torch.arange(1.0, loss.numel() + 1, dtype=z.dtype).view_as(loss))
        assert leaf.grad is not None
        answers.append((loss.detach(), leaf.grad))
    return answers[0], answers[1]


def assert_equal(ours: tuple[Tensor, ...], torchs: tuple[Tensor, ...]) -> None:
    for got, wanted in zip(ours, torchs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14, equal_nan=True)


def problem(ignore_index: int | None, shape=(N,)) -> tuple[Tensor, Tensor]:
    target = torch.randint(V, shape)
    if ignore_index is not None:
        target.flatten()[::3] = ignore_index
    return torch.randn(target.numel(), V, dtype=torch.float64), target


@pytest.mark.parametrize("ignore_index", [None, -100, 3])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_every_combination(smoothing, weighted, reduction, ignore_index):
    z, target = problem(ignore_index)
    weight = torch.rand(V, dtype=torch.float64) if weighted else None
    assert_equal(*both(z, target, weight, reduction, ignore_index, smoothing))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_every_row_ignored(smoothing, weighted, reduction):
    z, target = problem(-100)
    weight = torch.rand(V, dtype=torch.float64) if weighted else None
    ours, torchs = both(z, target.fill_(-100), weight, reduction, -100, smoothing)
    assert_equal(ours, torchs)
    assert ours[0].isnan().all() == (reduction == "mean")
    assert not ours[1].any()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_ignored_row_may_hold_anything(bad, smoothing, reduction):
    z, target = problem(-100)
    picked, mean_log = log_probabilities(z, target, None, -100)
    mean = mean_log if smoothing else None
    losses = []
    for number in (0.0, bad):
        one, other = (
            None if t is None else t.masked_fill(target == -100, number) for t in (picked, mean)
        )
        assert one is not None
        options = reduction, -100, smoothing, V
        losses.append(cross_entropy_of(one, other, target, None, *options))
    assert torch.equal(*losses)


def test_classes_without_weight():
    """A mean over rows whose classes have the weight 0 is nan, as torch's."""
    z, target = problem(None)
    weight = torch.ones(V, dtype=torch.float64)
    weight[target[::2]] = 0
    for reduction in ("none", "mean", "sum"):
        assert_equal(*both(z, target, weight, reduction, -100, 0.1))
    ours, torchs = both(z, target, torch.zeros_like(weight), "mean", -100, 0.0)
    assert ours[0].isnan()
    assert torchs[0].isnan()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_rows(reduction):
    z, target = problem(None, (0,))
    assert_equal(*both(z, target, None, reduction, -100, 0.0))


def test_the_shape_is_that_of_the_log_probabilities():
    z, target = problem(-100, (2, 3, 2))
    assert_equal(*both(z, target, None, "none", -100, 0.1))
    picked = torch.randn(2, 3, 2)
    assert cross_entropy_of(picked, None, target, None, "none", -100, 0.0, V).shape == (2, 3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_is_that_of_the_rows(dtype):
    """uint8 targets and weights of another dtype change nothing."""
    z, target = problem(None)
    weight = torch.rand(V, dtype=torch.bfloat16)
    picked, mean_log = (t.to(dtype) for t in log_probabilities(z, target, weight, None))
    for index in (target, target.to(torch.uint8)):
        loss = cross_entropy_of(picked, mean_log, index, weight, "mean", 255, 0.1, V)
        exact = F.cross_entropy(z, target, weight.double(), label_smoothing=0.1)
        assert loss.dtype == dtype
        torch.testing.assert_close(loss.double(), exact, rtol=1e-2, atol=0)
