"""Lightning, bf16-mixed, nn.TransformerEncoder: what fails only in evaluation, compiled.

In evaluation PyTorch runs a whole encoder layer as one operation, which autocast does not cover: it
meets bfloat16 activations with float32 parameters and raises ``c10::BFloat16 != float``.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset

from fxpass.report import explain
from tests.libraries.with_lightning import IGNORED, Losses, Module, compiled, trainer
from tests.support.numerics import assert_close

pytestmark = IGNORED

V, WIDTH, LENGTH, BATCH, PAD = 61, 32, 9, 4, 0
INNER = "aot_eager"


class Network(nn.Module):
    """Ids [B, S] and labels [B, S] to the loss; padding is masked, and ignored in the labels."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(V, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        # nested tensors fail in eager evaluation under autocast already
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, V)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.encoder(self.project(self.embed(ids)), src_key_padding_mask=ids == PAD)
        logits = self.head(hidden).float()
        return F.cross_entropy(logits.view(-1, V), labels.view(-1), ignore_index=PAD)


def batches(seed: int) -> DataLoader:
    """Texts that count upward, of several lengths, filled up with padding."""
    random = torch.Generator().manual_seed(seed)
    start = torch.randint(V, (4 * BATCH, 1), generator=random)
    lengths = torch.randint(3, LENGTH + 1, (4 * BATCH, 1), generator=random)
    ids = (start + torch.arange(LENGTH + 1)) % (V - 1) + 1
    ids[torch.arange(LENGTH + 1) >= lengths + 1] = PAD
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=BATCH)


def run(
    folder, compile: bool, precision: str = "bf16-mixed", dtype=torch.float32
) -> dict[str, Tensor]:
    """The losses of training, validation and test."""
    torch.manual_seed(0)
    network, losses = Network().to(dtype), Losses()
    module = Module(compiled(network, INNER, dynamic=False) if compile else network, rate=0.1)
    loops = trainer(folder, losses, precision=precision, max_epochs=2)
    loops.fit(module, batches(1), batches(2))
    loops.test(module, batches(3), verbose=False)
    return {loop: torch.stack(values).detach() for loop, values in losses.seen.items()}


def test_every_loop_computes_what_eager_does(tmp_path):
    ours = run(tmp_path, compile=True)  # through Inductor: tests/unit/casts/test_operations.py
    assert counters["fusedce"]["matched"] == 3  # each loop has a graph of its own
    assert counters["fusedce"]["rejected"] == 0
    eager = run(tmp_path, compile=False)
    exact = run(tmp_path, False, "64-true", torch.float64)
    for loop in ("fit", "validate", "test"):
        assert_close([ours[loop]], [eager[loop]], [exact[loop]], torch.bfloat16)
    assert ours["fit"][-1] < ours["fit"][0]


def test_without_it_evaluation_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDCE", "0")
    module = Module(compiled(Network(), INNER, dynamic=False), rate=0.1)
    loops = trainer(tmp_path, precision="bf16-mixed")
    with pytest.raises(RuntimeError, match="BFloat16 != float"):
        loops.test(module, batches(3), verbose=False)


def test_padding_is_as_in_eager():
    network = Network().eval()
    ids, labels = next(iter(batches(2)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, eager = compiled(network, INNER)(ids, labels), network(ids, labels)
    with torch.no_grad():
        exact = network.double()(ids, labels)
    assert_close([ours], [eager], [exact], torch.bfloat16)


def test_the_report_names_the_layer():
    ids, labels = next(iter(batches(2)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        report = explain(Network().eval(), ids, labels)
    layer = [c for c in report.casts if "hidden = self.encoder(" in c.source]
    assert {(c.old, c.new) for c in layer} == {(torch.float32, torch.bfloat16)}
    assert len(layer) == 24  # two layers of twelve parameters
    assert len(report.matches) == 1
