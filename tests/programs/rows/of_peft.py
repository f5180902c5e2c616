"""PEFT's own adapters on a head. Out: ``KINDS``, the programs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functional_call

from tests.programs.operands import SIZES
from tests.programs.row import IN_BF16, REGION, Row

KIND = "PEFT's own layers"


FROZEN = ("x", "down", "up")


class _Model(nn.Module):
    """A model that is a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(SIZES.d, SIZES.v, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(x)


@functools.cache
def _adapted(**options: Any) -> nn.Module:
    """The model with an adapter on its head, without dropout."""
    options = {"r": 4, "lora_alpha": 8} | options
    with torch.random.fork_rng(devices=[]):
        config = LoraConfig(target_modules=["lm_head"], **options)
        return get_peft_model(_Model(), config).eval()  # type: ignore[arg-type]


PLAIN = _adapted()


MAGNITUDES = _adapted(use_dora=True)


def _call(
    model: nn.Module,
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    magnitudes: Tensor | None = None,
) -> Tensor:
    prefix = "base_model.model.lm_head."
    given = {
        "base_layer.weight": weight,
        "lora_A.default.weight": down,
        "lora_B.default.weight": up,
    }
    if magnitudes is not None:
        given["lora_magnitude_vector.default.weight"] = magnitudes
    return functional_call(model, {prefix + name: t for name, t in given.items()}, (x,))


# fmt: off
ROWS = (
    Row("LoRA's Linear on the head", "F.cross_entropy(_call(PLAIN, x, weight, down, up), labels)",
        REGION, of="PEFT, its own", ways=IN_BF16),
    Row("LoRA's Linear on a frozen head",
        "F.cross_entropy(_call(PLAIN, x, weight, down, up), labels)", REGION,
        of="PEFT, its own", trained=FROZEN),
    Row("LoRA's Linear on a frozen head, entropy",
        "log_probs = _call(PLAIN, x, weight, down, up).log_softmax(-1); "
        "-(log_probs.exp() * log_probs).sum(-1)", REGION,
        of="PEFT, its own", trained=FROZEN),
    Row("LoRA's Linear on the head, evaluation",
        "F.cross_entropy(_call(PLAIN, x, weight, down, up), labels)", REGION,
        of="PEFT, its own", trained=()),
    Row("DoRA's Linear on a frozen head",
        "F.cross_entropy(_call(MAGNITUDES, x, weight, down, up, factor), labels)", REGION,
        of="PEFT, its own", trained=(*FROZEN, "factor")),
)
