"""What is watched of losses outside of the model: values that were computed whole, and memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.trainers.task import WARM, Sizes, Task


class Head(nn.Module):
    """Hidden states ``[N, 8]`` to logits ``[N, 500]``."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 500)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def watched(reads, x: torch.Tensor) -> Task:
    task, model = Task(Sizes(), "fusedce", {"fusedce.inner": "eager"}), Head()
    task.compile(model)
    with task.watch:
        reads(model(x))
    return task


@pytest.mark.parametrize(
    ("reads", "why"),
    [
        (lambda z: F.cross_entropy(z, torch.zeros(64, dtype=torch.long)).backward(), ""),
        (lambda z: z[:3].clone(), ""),
        (lambda z: z.detach().clone(), "1 times values"),
        (lambda z: z.backward(torch.ones(64, 500)), "1 times gradients"),
    ],
)
def test_the_watch_sees_what_is_computed_whole(reads, why):
    watch = watched(reads, torch.randn(64, 8)).watch
    assert watch.why == why
    assert watch.fused == (not why)


def test_plain_logits_are_not_fused(monkeypatch):
    monkeypatch.setenv("FUSEDCE_LOGITS", "keep")
    watch = watched(lambda z: z.sum(), torch.randn(64, 8)).watch
    assert watch.why == "1 of 1 calls returned plain logits"
    assert not watch.fused


def test_memory_is_that_of_the_steps_after_the_first_ones():
    task = Task(Sizes(), "eager")
    for loss in range(WARM):
        assert task.memory.rest is None
        task.step(float(loss))
    kept = torch.ones(4 << 20)
    task.step(1.0)
    added = task.memory.added()
    assert added is None or added >= kept.nbytes
    assert task.losses == [*map(float, range(WARM)), 1.0]
