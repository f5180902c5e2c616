"""Lightning's Trainer: a LightningModule that is compiled whole, and one whose network is."""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

from tests.libraries.with_lightning import IGNORED, Losses, Module, compiled, trainer
from tests.support import tiny

pytestmark = IGNORED

STEPS, BATCH, LENGTH, WIDTH = 20, 8, 11, 32
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}


class Network(nn.Module):
    """Ids [B, S] to the loss of the next id; the logits stay inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.V, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, tiny.V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.body(self.embed(ids)).tanh()
        logits = self.head(hidden)[:, :-1].float()
        return F.cross_entropy(logits.reshape(-1, tiny.V), ids[:, 1:].reshape(-1))


def batches(count: int, seed: int, drop_last: bool) -> DataLoader:
    """Texts that count upward; the last of ``count`` batches is half a one, if it is not dropped."""
    random = torch.Generator().manual_seed(seed)
    start = torch.randint(tiny.V, (count * BATCH - BATCH // 2, 1), generator=random)
    texts = TensorDataset((start + torch.arange(LENGTH)) % tiny.V)
    return DataLoader(texts, batch_size=BATCH, drop_last=drop_last)


def network(module: Module, inner: str) -> Module:
    module.network = compiled(module.network, inner)
    return module


def fit(compile, inner: str, precision: str, folder) -> dict[str, list[float]]:
    torch.manual_seed(0)
    module, losses = Module(Network(), rate=2.0), Losses()
    static = inner == "inductor"  # half as many graphs for the C++ compiler
    data = batches(STEPS // 2, 1, static), batches(3, 2, static)
    loops = trainer(folder, losses, precision=precision, max_steps=STEPS)
    loops.fit(compile(module, inner) if compile else module, *data)
    return {loop: [loss.item() for loss in seen] for loop, seen in losses.seen.items()}


@pytest.mark.parametrize(
    ("compile", "inner", "precision"),
    [
        (compiled, "aot_eager", "32-true"),
        (compiled, "aot_eager", "bf16-mixed"),
        (network, "aot_eager", "32-true"),
        (network, "aot_eager", "bf16-mixed"),
        (compiled, "inductor", "bf16-mixed"),
    ],
)
def test_losses_of_twenty_steps(compile, inner, precision, tmp_path):
    fused = fit(compile, inner, precision, tmp_path)
    assert counters["fusedce"]["matched"] == counters["stats"]["unique_graphs"] >= 2
    assert counters["fusedce"]["rejected"] == 0
    eager = fit(None, inner, precision, tmp_path)
    dtype = PRECISIONS[precision]
    assert len(eager["fit"]) == STEPS
    assert len(eager["validate"]) >= 2 * 2  # epochs and batches
    tiny.assert_same_course(fused["fit"], eager["fit"], dtype)
    assert fused["validate"] == pytest.approx(eager["validate"], rel=tiny.RTOL[dtype])


class WithLogits(lightning.LightningModule):
    """Returns its logits, which a callback reads after the step; Lightning runs the training step
    in the closure of the optimizer's step."""

    def __init__(self, inner: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tiny.V, WIDTH), nn.Linear(WIDTH, tiny.V)
        self.model: Any = compiled(self.loss, inner) if inner else self.loss

    def loss(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.embed(ids[:, :-1]))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), logits

    def training_step(self, batch: list[Tensor], index: int) -> dict[str, Tensor]:
        loss, logits = self.model(batch[0])
        return {"loss": loss, "logits": logits}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Seen(Callback):
    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.logits.append(outputs["logits"].detach().clone())


def test_logits_are_read_after_the_step_of_automatic_optimisation(tmp_path):
    seen = []
    for inner in ("", "aot_eager"):
        torch.manual_seed(0)
        seen.append(Seen())
        trainer(tmp_path, seen[-1], max_steps=4).fit(WithLogits(inner), batches(4, 1, True))
    eager, fused = seen
    assert len(eager.logits) >= 3
    torch.testing.assert_close(fused.logits, eager.logits, rtol=1e-4, atol=1e-4)
