"""What is trained with DeepSpeed: models, and a table of engines for ``deepspeed_worker.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import tiny

BATCH, WIDTH = 4, 32
DTYPES = {"": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class HeadAndLoss(nn.Module):
    """The last linear and the loss in one module: hidden states [B, S, D] to loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tiny.V, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(tiny.V) / WIDTH)

    def forward(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return shifted_loss(F.linear(hidden, self.weight, self.bias), labels)


class Network(nn.Module):
    """Ids [B, S] to the loss of the next id and the logits."""

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.direct = direct
        self.embed = nn.Embedding(tiny.V, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = HeadAndLoss()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(self.embed(input_ids)).tanh()
        if self.direct:  # reads the parameters of a module that it does not call
            return shifted_loss(F.linear(hidden, self.head.weight) + self.head.bias, labels)
        return self.head(hidden, labels)


def shifted_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits[:, :-1].float().reshape(-1, tiny.V)
    return F.cross_entropy(rows, labels[:, 1:].reshape(-1)), logits


def network(direct: bool = False) -> Network:
    torch.manual_seed(0)
    return Network(direct)


def half_with_bfloat16_head(model: nn.Module) -> None:
    model.half()
    head_of(model).bfloat16()


def freeze_head(model: nn.Module) -> None:
    head_of(model).requires_grad_(False)


def half_with_frozen_bfloat16_head(model: nn.Module) -> None:
    half_with_bfloat16_head(model)
    freeze_head(model)


def head_of(model: Any) -> Any:
    return model.head if isinstance(model, Network) else model.lm_head


def head_loaded_in_bfloat16(engine: Any) -> None:
    """What loading a checkpoint into ``.data`` does, after DeepSpeed has made the model float16."""
    for parameter in head_of(engine.module).parameters():
        parameter.data = parameter.data.bfloat16()


def register_head(engine: Any) -> None:
    """Tells ZeRO-3 who else reads the head's parameters."""
    for parameter in engine.module.head.parameters():
        deepspeed.zero.register_external_parameter(engine.module, parameter)


@dataclass(frozen=True)
class Case:
    """An engine to train.

    Attributes:
        precision: a section of DeepSpeed's configuration; without one DeepSpeed leaves dtypes alone.
        zero: further options of ZeRO.
        only_head: compile not the engine but the module of head and loss.
        prepare, initialized: what is done to the model before and to the engine after
            ``deepspeed.initialize``.
        inner: the inner backend.
        runs: names of ``RUNS``.
    """

    name: str
    stage: int
    precision: str = ""
    model: Callable[[], nn.Module] = tiny.llama
    zero: dict[str, Any] = field(default_factory=dict)
    only_head: bool = False
    prepare: Callable[[nn.Module], None] = lambda model: None
    initialized: Callable[[Any], None] = lambda engine: None
    inner: str = "eager"
    runs: tuple[str, ...] = ("eager", "fused")

    def config(self) -> dict[str, Any]:
        section: dict[str, Any] = {"enabled": True}
        if self.precision == "fp16":
            section["loss_scale"] = 128
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, **self.zero},
            **({self.precision: section} if self.precision else {}),
        }


_MIXED = ("eager", "by hand", "fused")
# every parameter is partitioned, however small
_PARTITIONED = {"stage3_param_persistence_threshold": 0}
_PLAIN_LINEAR = {**_PARTITIONED, "memory_efficient_linear": False}

# (Without ZeRO, stage 0, DeepSpeed scales a float16 loss back to next to nothing: nothing would be
# learned, compiled or not.)
STAGES = [
    Case("0", 0, "", network),
    Case("1 fp16", 1, "fp16", network),
    Case("2 bf16", 2, "bf16"),
    Case("3 bf16", 3, "bf16", network, zero=_PLAIN_LINEAR, only_head=True, inner="aot_eager"),
]
MIXED = [
    Case("0", 0, "", network, prepare=half_with_bfloat16_head, runs=_MIXED),
    Case("1", 1, "fp16", prepare=freeze_head, initialized=head_loaded_in_bfloat16, runs=_MIXED),
    Case(
        "2",
        2,
        "",
        network,
        prepare=half_with_bfloat16_head,
        inner="aot_eager",
        runs=(*_MIXED, "off", "error"),
    ),
    Case(
        "3",
        3,
        "",
        network,
        zero=_PARTITIONED,
        prepare=half_with_frozen_bfloat16_head,
        only_head=True,
        inner="aot_eager",
        runs=_MIXED,
    ),
]
PARTITIONED = [
    Case("llama", 3, "bf16", zero=_PARTITIONED),
    Case("direct", 3, "", lambda: network(direct=True), zero=_PLAIN_LINEAR),
    Case(
        "registered",
        3,
        "",
        lambda: network(direct=True),
        zero=_PLAIN_LINEAR,
        initialized=register_head,
    ),
]
# what each of the two ranks trains without the other
ALONE = [("mixed", MIXED), ("partitioned", PARTITIONED)]
