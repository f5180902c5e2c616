"""Programs of transformers.Trainer: label smoothing, own losses, metrics of an evaluation."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainingArguments

from benchmarks.trainers.models import RATE, llama, tokens
from benchmarks.trainers.task import Task

# The arguments of every trainer: plain gradient descent, nothing written.
ARGUMENTS = {
    "use_cpu": True,
    "bf16": False,
    "optim": "sgd",
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": float("inf"),
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


def noting(kind: type[Any], task: Task) -> type[Any]:
    """A class of trainers that notes its losses."""

    class Noting(kind):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            task.step(loss.item())
            return loss

    return Noting


def train(task: Task, kind: type[Trainer] = Trainer, **given: Any) -> Trainer:
    """Trains a Llama. ``given`` are arguments of the trainer; ``arguments`` among them are those of
    its ``TrainingArguments``."""
    sizes = task.sizes
    model = llama(sizes)
    task.compile(model)
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(sizes)]
    arguments = ARGUMENTS | given.pop("arguments", {})
    with tempfile.TemporaryDirectory() as folder:
        trainer = noting(kind, task)(
            model,
            TrainingArguments(
                output_dir=folder,
                max_steps=sizes.steps,
                per_device_train_batch_size=sizes.sequences,
                per_device_eval_batch_size=sizes.sequences,
                **arguments,
            ),
            train_dataset=rows,
            eval_dataset=rows,
            **given,
        )
        trainer.train()
    return trainer


def smoothing(task: Task) -> None:
    """Trainer's own loss, of smoothed labels."""
    train(task, arguments={"label_smoothing_factor": 0.1})


def _next_token(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    total = F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / num_items_in_batch


def given_loss(task: Task) -> None:
    """A loss function that is an argument of the trainer."""
    train(task, compute_loss_func=_next_token)


class _OwnLoss(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = _next_token(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def own_loss(task: Task) -> None:
    """A subclass with a method ``compute_loss``."""
    train(task, _OwnLoss)


def _evaluated(task: Task, kind: type[Trainer]) -> None:
    """Evaluates after every other step; its loss and accuracy count as losses."""

    def accuracy(prediction: Any) -> dict[str, float]:
        guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
        return {"accuracy": float((guesses == labels).mean())}

    trainer = train(
        task,
        kind,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        arguments={"eval_strategy": "steps", "eval_steps": 2},
    )
    for entry in trainer.state.log_history:
        task.losses += [entry[k] for k in ("eval_loss", "eval_accuracy") if k in entry]


def metrics(task: Task) -> None:
    """Metrics of the largest logits, and a loss outside of the model."""
    _evaluated(task, _OwnLoss)


def metrics_of_model_loss(task: Task) -> None:
    """The same with the model's loss."""
    _evaluated(task, Trainer)


class _TokenAccuracy(Trainer):
    hits = 0.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"][:, 1:]
        outputs = model(input_ids=inputs["input_ids"])
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels.flatten())
        with torch.no_grad():
            hits = outputs.logits[..., :-1, :].argmax(-1) == labels
            self.hits = hits.float().mean().item()
        return (loss, outputs) if return_outputs else loss


def token_accuracy(task: Task) -> None:
    """An accuracy of each training step, without gradients."""
    train(task, _TokenAccuracy)
