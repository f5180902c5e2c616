"""What the tests of Lightning share: a Trainer that writes nothing, and a callback that keeps losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

# lightning's own, on this torch
IGNORED = pytest.mark.filterwarnings(
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"
)


class Losses(Callback):
    """Every loss of every loop."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Tensor]] = {"fit": [], "validate": [], "test": []}

    def on_train_batch_end(self, trainer, pl_module, outputs: Any, batch, batch_idx):
        self.seen["fit"].append(outputs["loss"])

    def on_validation_batch_end(
        self, trainer, pl_module, outputs: Any, batch, batch_idx, dataloader_idx=0
    ):
        self.seen["validate"].append(outputs)

    def on_test_batch_end(
        self, trainer, pl_module, outputs: Any, batch, batch_idx, dataloader_idx=0
    ):
        self.seen["test"].append(outputs)


class Module(lightning.LightningModule):
    """What a user writes: the network's output is the loss."""

    def __init__(self, network: nn.Module, rate: float) -> None:
        super().__init__()
        self.network, self.rate = network, rate

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.network(*batch)

    def validation_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.network(*batch)

    def test_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self.network(*batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def trainer(folder: Path, *callbacks: Callback, **more: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )


def compiled(module: Any, inner: str, **more: Any) -> Any:
    return torch.compile(module, backend="fusedce", options={"fusedce.inner": inner}, **more)
