"""Backward of a batch of incoming gradients: a Jacobian of the losses of the rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._vmap_internals import _vmap

from tests.support.programs import head_of, inputs, last


def losses(x, weight, labels):
    return F.cross_entropy(last(F.linear(x, weight)), labels.view(-1), reduction="none")


def batched(rows, of, seeds):
    return torch.autograd.grad(rows, of, seeds, is_grads_batched=True)


def nested(rows, of, seeds):
    """Two batches, as of a Jacobian of a Jacobian's rows."""
    seeds = torch.stack([seeds, 2 * seeds.flip(0)], 1)
    return _vmap(_vmap(lambda seed: torch.autograd.grad(rows, of, seed)))(seeds)


@pytest.mark.parametrize(
    "gradients",
    [batched, nested],  # torch itself refuses vmap of a compiled backward
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_batch_of_gradients(gradients, frozen):
    x, weight, labels = inputs()
    weight.requires_grad_(not frozen)
    of = (x,) if frozen else (x, weight)
    head_of(losses, x, weight, labels)
    fused = torch.compile(losses, backend="fusedce", options={"fusedce.inner": "aot_eager"})
    seeds = torch.eye(labels.numel())
    found = gradients(fused(x, weight, labels), of, seeds)
    torch.testing.assert_close(found, gradients(losses(x, weight, labels), of, seeds))
