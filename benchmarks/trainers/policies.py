"""Policies that are trained by hand, on public functions of TRL."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from benchmarks.trainers.loops import descend
from benchmarks.trainers.models import llama, tokens
from benchmarks.trainers.task import Task


def dpo(task: Task) -> None:
    """Direct preference optimisation; the first half of the sequences is chosen."""
    policy, reference = llama(task.sizes), llama(task.sizes, seed=1)
    for model in (policy, reference):
        task.compile(model)
    ids = tokens(task.sizes)

    def of_sequences(model: nn.Module) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return selective_log_softmax(logits, ids[:, 1:]).sum(-1)

    def loss() -> Tensor:
        with torch.no_grad():
            before = of_sequences(reference)
        chosen, rejected = (of_sequences(policy) - before).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    descend(task, policy, loss, rate=0.02)


def grpo(task: Task) -> None:
    """Group-relative policy optimisation: clipped ratios, a divergence from the reference, and
    weights by entropies, which have no gradient."""
    from trl.trainer.utils import selective_log_softmax_and_entropy  # newer than the others

    policy, reference = llama(task.sizes), llama(task.sizes, seed=1)
    for model in (policy, reference):
        task.compile(model)
    ids = tokens(task.sizes)
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(task.sizes.sequences, 1, generator=generator)

    def loss() -> Tensor:
        logits = policy(input_ids=ids).logits[:, :-1]
        logps, entropies = selective_log_softmax_and_entropy(
            logits, ids[:, 1:], entropy_requires_grad=False, temperature=0.9
        )
        with torch.no_grad():
            of_reference = reference(input_ids=ids).logits[:, :-1] / 0.9
            before = selective_log_softmax(of_reference, ids[:, 1:])
        divergence = (before - logps).exp() - (before - logps) - 1
        ratio = (logps - logps.detach()).exp()
        clipped = ratio.clamp(0.8, 1.2)
        gain = torch.min(ratio * advantages, clipped * advantages)
        weights = 1 + 0.1 * entropies  # a mask of the largest would turn rounding into other tokens
        return ((0.04 * divergence - gain) * weights).mean()

    descend(task, policy, loss)


def entropy_bonus(task: Task) -> None:
    """A policy gradient with an entropy that has a gradient."""
    policy = llama(task.sizes)
    task.compile(policy)
    ids = tokens(task.sizes)

    def loss() -> Tensor:
        logits = policy(input_ids=ids).logits[:, :-1]
        logps = selective_log_softmax(logits, ids[:, 1:])
        return -(logps + 0.01 * entropy_from_logits(logits)).mean()

    descend(task, policy, loss)
