"""Loops that are written by hand: distillation, scoring."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.trainers.models import RATE, llama, tokens
from benchmarks.trainers.task import Task


def descend(
    task: Task, model: nn.Module, loss_of: Callable[[], Tensor], rate: float = RATE
) -> None:
    """Trains a model by a function that returns its loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(task.sizes.steps):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        task.step(loss.item())


def distillation(task: Task) -> None:
    """The divergence of a student from a teacher, compiled apart."""
    student, teacher = llama(task.sizes), llama(task.sizes, seed=1)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(20)
    for model in (student, teacher):
        task.compile(model)
    ids = tokens(task.sizes)

    def loss() -> Tensor:
        with torch.no_grad():
            targets = teacher(input_ids=ids).logits
        logits = student(input_ids=ids).logits
        divergence = F.kl_div(
            F.log_softmax(logits / 2, -1).flatten(0, 1),
            F.softmax(targets / 2, -1).flatten(0, 1),
            reduction="batchmean",
        )
        nll = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return 4 * divergence + 0.5 * nll

    descend(task, student, loss)


@torch.no_grad()
def scoring(task: Task) -> None:
    """Log-probabilities of continuations, and whether they are the greedy ones, as
    lm-evaluation-harness scores them."""
    model = llama(task.sizes)
    task.compile(model)
    half = task.sizes.tokens // 2
    for step in range(task.sizes.steps):
        ids = tokens(task.sizes, seed=step)
        of_batch = F.log_softmax(model(input_ids=ids).logits, dim=-1, dtype=torch.float32)
        total = 0.0
        for logps, sequence in zip(of_batch, ids, strict=True):
            continuation = sequence[half:].unsqueeze(0)
            logps = logps[half - 1 : -1].unsqueeze(0)
            greedy = (logps.argmax(dim=-1) == continuation).all()
            logps = torch.gather(logps, 2, continuation.unsqueeze(-1)).squeeze(-1)
            total += float(logps.sum()) + bool(greedy)
        task.step(total)
