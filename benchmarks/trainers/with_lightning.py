"""A LightningModule whose network is compiled, with an accuracy of torchmetrics."""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from benchmarks.trainers.models import RATE, llama, tokens
from benchmarks.trainers.task import Task


class Module(lightning.LightningModule):
    """What a user writes."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task, self.model = task, llama(task.sizes)
        task.compile(self.model)
        self.accuracy = MulticlassAccuracy(task.sizes.classes, average="micro")

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        ids = batch[0]
        logits = self.model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()
        loss = F.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.task.step(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=RATE)


def accuracy(task: Task) -> None:
    """Loss and accuracy of a training step."""
    module = Module(task)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=task.sizes.steps,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = DataLoader(TensorDataset(tokens(task.sizes)), batch_size=task.sizes.sequences)
        trainer.fit(module, data)
