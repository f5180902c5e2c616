"""What one process says: of bad input to the functional entry point, and how backward is taken apart."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from fxpass.distributed import linear_cross_entropy
from tests.ranks.pipeline import functions_outlive_outputs
from tests.support.numerics import FLOOR, error


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": 14}, "rank 0 of 1 has 12 of 14 classes, and should have 14"),
        ({"target": torch.zeros(2, 5, dtype=torch.long)}, "of the same rows"),
        ({"reduction": "max"}, "reduction must be one of none, mean, sum"),
        ({"label_smoothing": 2.0}, "label_smoothing must be in"),
        ({"logits": "z.item()"}, "z.item()"),
    ],
)
def test_bad_input_is_named(changes, said):
    given = {"target": torch.zeros(2, 6, dtype=torch.long), **changes}
    with pytest.raises(ValueError, match=re.escape(said)):
        linear_cross_entropy(torch.randn(2, 6, 5), torch.randn(12, 5), **given)


@pytest.mark.usefixtures("alone")
def test_a_class_that_does_not_exist():
    target = torch.full((2, 6), 12)
    with pytest.raises(IndexError, match="class 12 is out of bounds"):
        linear_cross_entropy(torch.randn(2, 6, 5), torch.randn(12, 5), target)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="needs a process group"):
        linear_cross_entropy(torch.randn(3, 5), torch.randn(12, 5), torch.zeros(3).long())


@pytest.mark.parametrize("backend", ["aot_eager", "fusedce"])
def test_zero_bubble_is_for_what_torch_can_take_apart(backend):
    """The two halves of backward, without a schedule: a rank that fails would stop the others."""
    head, hidden = torch.nn.Linear(4, 9, bias=False), torch.randn(5, 4, requires_grad=True)
    options: Any = {"fusedce.inner": "eager"} if backend == "fusedce" else None
    weight: Any = head.weight

    @torch.compile(backend=backend, options=options)
    def loss_of(hidden):
        return F.cross_entropy(head(hidden), torch.arange(5))

    _, groups = stage_backward_input([loss_of(hidden)], None, [hidden], iter([weight]))
    if functions_outlive_outputs():
        stage_backward_weight(iter([weight]), groups)
        (exact,) = torch.autograd.grad(F.cross_entropy(head(hidden), torch.arange(5)), head.weight)
        assert head.weight.grad is not None
        assert error(head.weight.grad, exact) < 4 * FLOOR[torch.float32]
    else:
        with pytest.raises(RuntimeError, match="_input_metadata"):
            stage_backward_weight(iter([weight]), groups)
