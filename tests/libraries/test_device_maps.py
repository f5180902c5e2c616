"""accelerate's device maps: hooks around the modules, which move what a module reads.

Without GPUs the real hooks run with the CPU and the disk as devices.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import dispatch_model
from torch import Tensor, nn
from torch._dynamo.utils import counters

from fxpass import messages
from tests.support import numerics

V, D = 50, 16


class Tail(nn.Module):
    """The last linear and the loss in one module: hidden states [B, S, D] to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(V, D))

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, self.weight).view(-1, V), labels.view(-1))


class Network(nn.Module):
    """``whole``: whether the last linear and the loss are in one module."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.tail = Tail() if whole else nn.Linear(D, V)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(ids)
        if isinstance(self.tail, Tail):
            return self.tail(hidden, labels)
        return F.cross_entropy(self.tail(hidden).view(-1, V), labels.view(-1))


def dispatched(model, device_map, folder, **options):
    """With hooks on the modules, as ``from_pretrained(device_map=...)`` makes them."""
    return dispatch_model(
        copy.deepcopy(model), device_map, offload_dir=str(folder), force_hooks=True, **options
    )


def check_device_map(model, case: str, folder, **counted) -> None:
    """Losses and gradients are eager's, of the parameters that have any in eager with such hooks.

    What is on the disk is read for each use, and has none.
    """
    device_map, trained = MAPS[case]
    ids, labels = torch.randint(V, (2, 4, 6))
    hooked = dispatched(model, device_map, folder, main_device="cpu")
    fused = torch.compile(hooked, backend="fusedce", options={"fusedce.inner": "eager"})
    programs = [(fused, hooked), (model, model)]
    programs.append((copy.deepcopy(model).double(),) * 2)
    values = []
    for program, module in programs:
        loss = program(ids, labels)
        loss.backward()
        parameters = dict(module.named_parameters())
        values.append([loss, *(parameters[name].grad for name in trained)])
    got, eager, exact = values
    numerics.assert_close(got, eager, exact, torch.float32)
    assert [n for n, p in hooked.named_parameters() if p.grad is not None] == trained
    assert {name: counters["fusedce"][name] for name in counted} == counted


MAPS = {
    "cpu": ({"": "cpu"}, ["embed.weight", "tail.weight"]),
    "body on disk": ({"embed": "disk", "tail": "cpu"}, ["tail.weight"]),
    "head on disk": ({"embed": "cpu", "tail": "disk"}, ["embed.weight"]),
}
# Dynamo looks at it in tensors that enter a graph, and hides the warning, but not where it is raised
_GRAD = "ignore:The .grad attribute of a Tensor that is not a leaf"


@pytest.mark.filterwarnings(_GRAD)
@pytest.mark.parametrize("case", MAPS)
def test_head_and_loss_in_one_module_of_a_device_map(case, tmp_path):
    """The hooks, at which Dynamo ends graphs, are around that module."""
    check_device_map(Network(whole=True), case, tmp_path, matched=1, rejected=0)


@pytest.mark.filterwarnings(_GRAD)
def test_a_head_that_is_a_module_of_a_device_map(tmp_path, caplog):
    """Its hooks stand between it and the loss: not fused, and the reason says what that is."""
    caplog.set_level("INFO", logger="fxpass")
    check_device_map(Network(whole=False), "head on disk", tmp_path, matched=0, rejected=1)
    assert messages.fixed(messages.ENTERS) in caplog.text


@pytest.mark.only_gpus
def test_a_device_map_of_two_gpus(tmp_path):
    model = Network(whole=True)
    ids, labels = torch.randint(V, (2, 4, 6), device="cuda:0")
    exact = copy.deepcopy(model).double()(ids.cpu(), labels.cpu())
    hooked: Any = dispatched(model, {"embed": 0, "tail": 1}, tmp_path)
    loss = torch.compile(hooked, backend="fusedce")(ids, labels)
    loss.backward()
    assert counters["fusedce"]["matched"] == 1
    assert hooked.tail.weight.grad.device == torch.device("cuda:1")
    eager = model(ids.cpu(), labels.cpu())
    numerics.assert_close([loss.cpu()], [eager], [exact], torch.float32)
