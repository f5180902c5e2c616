"""One training step of a whole model: its loss and the gradient of every parameter that is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that need a gradient, by name; a tied one once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def loss_and_gradients(
    model: nn.Module,
    batch: dict[str, Tensor],
    autocast: torch.dtype | None = None,
    call: Callable[..., Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
) -> list[Tensor]:
    """What one step computes, on the device of the batch.

    Args:
        model: whose gradients; they are cleared first, and each has to be there afterwards.
        batch: the keyword arguments of a call.
        autocast: the dtype of an autocast around the forward.
        call: what is called if not the model, a compiled form of it; returns the loss or ``.loss``.
        scaler: scales the loss; the gradients that are returned are divided by its scale again.
    """
    model.zero_grad()
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, autocast, enabled=autocast is not None):
        out = (model if call is None else call)(**batch)
    loss = getattr(out, "loss", out)
    (loss if scaler is None else scaler.scale(loss)).backward()
    factor = 1.0 if scaler is None else 1 / scaler.get_scale()
    gradients = {name: p.grad for name, p in trained(model).items()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient for {missing}"
    return [loss.detach(), *(g * factor for g in gradients.values() if g is not None)]


def exact(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The same from a copy of the model in float64, without autocast.

    Hugging Face models compute norms and the loss in f32 whatever their weights are, so this is
    exact to some 1e-6: enough for what is computed in 16 bits.
    """
    return loss_and_gradients(copy.deepcopy(model).double(), batch)
