"""Programs of TRL's trainers that compute their losses from logits."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from datasets import Dataset

from benchmarks.trainers.hugging_face import ARGUMENTS, noting
from benchmarks.trainers.models import llama, text, tokenizer, tokens
from benchmarks.trainers.task import Task


def _train(task: Task, kind: type[Any], config: type[Any], rows: Any, **given: Any) -> None:
    model = llama(task.sizes)
    task.compile(model)
    arguments = ARGUMENTS | given.pop("arguments", {})
    with tempfile.TemporaryDirectory() as folder:
        noting(kind, task)(
            model,
            args=config(
                output_dir=folder,
                max_steps=task.sizes.steps,
                max_length=task.sizes.tokens,
                **arguments,
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(task.sizes),
            **given,
        ).train()


def _pairs(task: Task) -> list[dict[str, str]]:
    """A preference for each two sequences of a step; all have one length."""
    ids = tokens(task.sizes)
    prompt = task.sizes.tokens // 4
    chosen, rejected = ids[:, : task.sizes.tokens - 2].chunk(2)
    return [
        {"prompt": text(a[:prompt]), "chosen": " " + text(a[prompt:]), "rejected": " " + text(b)}
        for a, b in zip(chosen, rejected[:, prompt:], strict=True)
    ]


def orpo(task: Task) -> None:
    """TRL's ORPOTrainer."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    size = {"per_device_train_batch_size": task.sizes.sequences // 2}
    _train(task, ORPOTrainer, ORPOConfig, _pairs(task), arguments=size)


def cpo(task: Task) -> None:
    """TRL's CPOTrainer."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    size = {"per_device_train_batch_size": task.sizes.sequences // 2}
    _train(task, CPOTrainer, CPOConfig, _pairs(task), arguments=size)


def gkd(task: Task, beta: float = 0.5) -> None:
    """TRL's GKDTrainer, on given answers."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    teacher = llama(task.sizes, seed=1)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(20)
    task.compile(teacher)
    half = task.sizes.tokens // 2
    rows = [
        {
            "messages": [
                {"role": "user", "content": text(ids[:half])},
                {"role": "assistant", "content": text(ids[half:])},
            ]
        }
        for ids in tokens(task.sizes)
    ]
    size = {
        "per_device_train_batch_size": task.sizes.sequences,
        "lmbda": 0.0,
        "beta": beta,
        "learning_rate": 1.0,  # the gradients of a divergence are small
    }
    _train(task, GKDTrainer, GKDConfig, rows, teacher_model=teacher, arguments=size)


def gkd_forward(task: Task) -> None:
    """The same with the teacher's divergence from the student alone."""
    gkd(task, beta=0.0)
