"""Rows that are all ignored, and weights and targets that cancel: sums of 0 that mean other things."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.losses import Spec, linear_cross_entropy
from tests.support.numerics import assert_as_accurate, loss_and_gradients
from tests.support.targets import centred

N, D, V = 6, 8, 11


def gradients(program, x, weight, target, class_weight):
    leaves = [x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()]
    loss = program(*leaves, target, class_weight)
    return loss.detach(), torch.autograd.grad(loss, leaves)


def eager(x, weight, target, class_weight):
    return F.cross_entropy(F.linear(x, weight), target, class_weight)


# Triton's interpreter is numpy, which warns of what is to be seen here
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
@pytest.mark.parametrize("case", ["zeros", "cancel", "ignored", "usual"])
def test_what_is_finite_is_what_is_in_eager(implementation, device, strategy, case, dtype):
    where = device if implementation == "triton" else "cpu"
    x, weight = torch.randn(N, D, dtype=dtype).to(where), torch.randn(V, D, dtype=dtype).to(where)
    target = torch.arange(N, device=where) % 2
    class_weight = torch.ones(V, device=where, dtype=dtype)
    if case == "zeros":
        class_weight[:2] = 0
    if case == "cancel":
        class_weight[1] = -1
    if case == "ignored":
        target[:] = -100
    spec = Spec(gradients=("x", "weight"), strategy=strategy)

    def fused(x, weight, target, class_weight):
        return linear_cross_entropy(x, weight, None, target, class_weight, spec=spec)

    (loss, ours), (theirs_loss, theirs) = (
        gradients(p, x, weight, target, class_weight) for p in (fused, eager)
    )
    assert loss.isfinite() == theirs_loss.isfinite()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        if case == "ignored":
            assert not a.any()


CANCELLING = torch.eye(V)[1] - torch.eye(V)[2]  # class weights
TARGETS = {
    "probabilities": (centred(N, V), None, 0.0),
    "weighted probabilities": (torch.full((N, V), 1 / V), CANCELLING, 0.0),
    "smoothed indices": (torch.zeros(N, dtype=torch.int64), CANCELLING, 0.1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("case", TARGETS)
def test_a_target_distribution_that_cancels(
    implementation, device, case, reduction, strategy, dtype
):
    """A row is not ignored because the factor of its softmax is 0."""
    where = device if implementation == "triton" else "cpu"
    target, class_weight, smoothing = TARGETS[case]
    target = target.to(where)
    class_weight = None if class_weight is None else class_weight.to(where)
    spec = Spec(
        *(reduction, "probabilities" if target.is_floating_point() else "indices"),
        label_smoothing=smoothing,
        gradients=("x", "weight"),
        strategy=strategy,
    )

    def fused(x, weight):
        return linear_cross_entropy(x, weight, None, target, class_weight, spec=spec).sum()

    def eager(x, weight):
        z = F.linear(x, weight).to(torch.promote_types(x.dtype, torch.float32))
        given, weights = (
            t.to(z.dtype) if t is not None and t.is_floating_point() else t
            for t in (target, class_weight)
        )
        return F.cross_entropy(z, given, weights, label_smoothing=smoothing, reduction="sum")

    tensors = [torch.randn(N, D, dtype=dtype).to(where), torch.randn(V, D, dtype=dtype).to(where)]
    assert loss_and_gradients(fused, tensors)[1].any()
    assert_as_accurate(fused, eager, tensors, dtype)
