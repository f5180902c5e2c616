"""Two GPUs in one process: body and head apart, and one after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from tests.support import numerics
from tests.support.pairs import in_pairs

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
BF16 = torch.bfloat16


def two_gpus(body, head):
    """A program whose linear and loss are on ``head``, and its tensors; the labels are on both."""
    x = torch.randn(300, 64, device=body, dtype=BF16)
    weight = torch.randn(1000, 64, device=head, dtype=BF16)
    labels = torch.randint(1000, (300,), device=body)
    labels[::7] = -100

    def program(x, weight):
        logits = F.linear(torch.tanh(x).to(weight.device), weight)
        return F.cross_entropy(logits, labels.to(weight.device))

    return program, (x, weight)


@pytest.mark.only_gpus
@in_pairs(current=(0, 1), inner=("eager", "inductor"), strategy=("chunked", "tiled"))
def test_two_gpus(current, inner, strategy):
    """Body and head apart, whichever is current: losses, gradients and where they are."""
    program, tensors = two_gpus(FIRST, SECOND)
    options = {"fusedce.inner": inner, "fusedce.strategy": strategy}
    with torch.cuda.device(current):
        fused = torch.compile(program, backend="fusedce", options=options)
        got = numerics.loss_and_gradients(fused, tensors)
        assert torch.cuda.current_device() == current
    assert [t.device for t in got] == [SECOND, FIRST, SECOND]
    assert counters["fusedce"]["matched"] == 1
    eager = numerics.loss_and_gradients(program, tensors)
    exact = numerics.loss_and_gradients(program, tensors, torch.float64)
    numerics.assert_close(got, eager, exact, BF16)


@pytest.mark.only_gpus
@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
def test_two_gpus_have_the_same_bits(strategy):
    """One after the other in one process: kernels and choices of the one are not the other's."""
    found = []
    for device in (FIRST, SECOND):
        torch.manual_seed(0)
        program, tensors = two_gpus(device, device)
        options = {"fusedce.inner": "eager", "fusedce.strategy": strategy}
        fused = torch.compile(program, backend="fusedce", options=options)
        found.append(numerics.loss_and_gradients(fused, tensors))
    if torch.cuda.get_device_name(FIRST) == torch.cuda.get_device_name(SECOND):
        for one, other in zip(*found, strict=True):
            assert one.device == FIRST
            assert torch.equal(one, other.to(FIRST))
