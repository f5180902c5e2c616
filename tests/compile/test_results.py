"""Rows that are ignored, and code of the C++ wrapper."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor

from tests.programs.row import Row
from tests.support.oracle import Way, outcome

IGNORED = Row("ignored", "F.cross_entropy(F.linear(x, weight, bias), ignored)")


@pytest.mark.parametrize("many", [False, True])
def test_an_ignored_row_does_not_show_what_it_holds(many):
    """PyTorch's gradients would be nan: it multiplies the row by 0."""
    found, row = [], IGNORED
    for value in (0.5, float("nan")):
        torch._dynamo.reset()
        options = {"fusedce.inner": "aot_eager", "fusedce.min_logits_mb": 0}
        tensors = dict(zip(row.names, row.tensors(), strict=True))
        labels = tensors["ignored"]
        if many:
            labels[::2] = -100
        hidden = labels < 0
        with torch.no_grad():
            tensors["x"][hidden] = value
        loss = torch.compile(row.program(), backend="fusedce", options=options)(*tensors.values())
        loss.backward()
        grads = [tensors[name].grad for name in ("x", "bias", "weight")]
        assert not grads[0][hidden].any()
        found.append([loss, *grads])
    # where half of the rows are ignored, they are left out of the products
    torch.testing.assert_close(*(values if many else values[:2] for values in found))


WRAPPED = (
    Row("total", "F.cross_entropy(z, labels)"),
    Row("total, evaluation", "F.cross_entropy(z, labels)", trained=()),
    Row(
        "one trained",
        "F.cross_entropy(F.linear(x, weight.detach()), labels, reduction='none').exp().sum()",
    ),
)


@pytest.mark.full  # compiles C++
@pytest.mark.parametrize("row", WRAPPED, ids=lambda row: row.name)
def test_code_of_the_cpp_wrapper(row):
    """It crashes at an operator that returns a list of one tensor."""
    way = Way(inner="inductor", patched=lambda: inductor.patch(cpp_wrapper=True))
    assert not outcome(row, way).wrong
