"""``mean`` where nothing is left to divide by: rows that are all ignored, or weights that cancel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.op.operator import linear_cross_entropy
from fxpass.spec.spec import Spec

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
    spec = Spec(gradients=("x", "weight"), strategy=strategy).text()

    def fused(x, weight, target, class_weight):
        return linear_cross_entropy(x, weight, None, target, class_weight, None, spec)[0]

    (loss, ours), (theirs_loss, theirs) = (
        gradients(p, x, weight, target, class_weight) for p in (fused, eager)
    )
    assert loss.isfinite() == theirs_loss.isfinite()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        if case == "ignored":
            assert not a.any()
