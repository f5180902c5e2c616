"""Pipeline parallelism: ``torch.distributed.pipelining``, the loss of the last stage fused.

Two ranks of gloo; the cases are ``pipeline_cases.py``. Micro-batches' losses and the gradients of
both stages are those of one process. Zero-bubble schedules go backward twice, for the gradient of
the hidden states and later for the weights'.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from tests.ranks.pipeline_cases import CASES, Case, alone, functions_outlive_outputs
from tests.support import ranks
from tests.support.numerics import FLOOR, assert_close, error

# How many losses are fused, how many are not, and how many graphs the last stage's rank has.
EXPECTED = {"hidden": (1, 0, 2), "loss": (1, 0, 1), "logits": (0, 1, 2)}


def test_two_ranks():
    first, last = ranks.run("tests.ranks.pipeline_cases", world=2)
    for case in CASES:
        check_values(case, first[case.name], last[case.name])
        # torch 2.11 finds out a stage's shapes by a run without gradients, which is one more graph
        matched, rejected, graphs = counts(first[case.name])
        assert (matched, rejected) == (0, 0), case.name
        tried = graphs - 1
        assert tried in (0, 1), case.name
        matched, rejected, graphs = EXPECTED[case.ends]
        expected = (matched + tried * (case.ends == "loss"), rejected, graphs + tried)
        assert counts(last[case.name]) == expected, case.name


def check_values(case: Case, first: dict[str, Any], last: dict[str, Any]) -> None:
    """What both stages computed is what one process does."""
    found = {f"first.{name}": gradient for name, gradient in first["gradients"].items()}
    found |= {f"last.{name}": gradient for name, gradient in last["gradients"].items()}
    losses, gradients = alone(case, double=False)
    exact_losses, exact = alone(case, double=True)
    assert set(found) == set(exact), case.name
    assert len(exact) == 6
    got = [*last["losses"], *(found[name] for name in exact)]
    eager = [*losses, *(gradients[name] for name in exact)]
    try:
        assert_close(got, eager, [*exact_losses, *exact.values()], torch.float32)
    except AssertionError as wrong:
        raise AssertionError(f"{case.name}: {wrong}") from wrong


def counts(rank: dict[str, Any]) -> tuple[int, int, int]:
    return rank["matched"], rank["rejected"], rank["graphs"]


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
