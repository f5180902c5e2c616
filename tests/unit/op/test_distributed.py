"""Operands that ``fxpass.distributed.linear_cross_entropy`` refuses before ranks exchange anything."""

from __future__ import annotations

import pytest
import torch

from fxpass.distributed import linear_cross_entropy

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
