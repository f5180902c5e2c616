"""``fxpass.distributed.linear_cross_entropy`` of one rank: operands that it refuses, and what it makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.distributed import linear_cross_entropy
from tests.support.made import Made

N, D, V = 6, 8, 10


@pytest.mark.parametrize("classes", [V // 2, V + 3])
def test_class_weights_and_probabilities_have_all_classes(classes, alone):
    """A rank's part of the weights, say, as of the bias."""
    x, weight, labels = torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,))
    linear_cross_entropy(x, weight, labels, weight=torch.rand(V))
    with pytest.raises(ValueError, match=f"weight has {classes} of {V} classes"):
        linear_cross_entropy(x, weight, labels, weight=torch.rand(classes))
    with pytest.raises(ValueError, match=f"target has {classes} of {V} classes"):
        linear_cross_entropy(x, weight, torch.rand(N, classes))


@pytest.mark.parametrize("index", [2**63, 2**64 - 100, -(2**63) - 1])
def test_an_ignored_index_is_an_int64(index, alone):
    """As in eager, where no number wraps to another one."""
    x, weight, labels = torch.randn(N, D), torch.randn(V, D), torch.randint(V, (N,))
    for allowed in (-(2**63), 2**63 - 1):
        linear_cross_entropy(x, weight, labels, ignore_index=allowed)
    with pytest.raises(ValueError, match="ignore_index must fit into int64"):
        linear_cross_entropy(x, weight, labels, ignore_index=index)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"logits": "30*tanh(z/30)"}])
def test_logits_never_exist(options, alone):
    """In eager, of any number of rows; backward may run twice."""
    weight = torch.randn(512, D, requires_grad=True)
    for n in (64, 96, 131):
        x, labels = torch.randn(n, D, requires_grad=True), torch.randint(512, (n,))
        linear_cross_entropy(x, weight, labels, **options).backward()  # compiles it
        x.grad = weight.grad = None
        with Made() as made:
            loss = linear_cross_entropy(x, weight, labels, **options)
            loss.backward(retain_graph=True)
            loss.backward()
        assert made.names["fxpass::rows"] == 1
        assert not made.large(n * 512)
        exact = whole_loss(x, weight, labels, **options)
        gradients = torch.autograd.grad(exact, (x, weight))
        torch.testing.assert_close(loss, exact)
        for found, right in zip((x.grad, weight.grad), gradients, strict=True):
            torch.testing.assert_close(found, 2 * right)


def whole_loss(x, weight, labels, logits="z", **options):
    z = F.linear(x, weight)
    return F.cross_entropy(z if logits == "z" else 30 * torch.tanh(z / 30), labels, **options)
