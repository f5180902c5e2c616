"""Who computes the loss: name → a function ``(x, weight, target) -> loss`` ready to be called.

Each provider gets the same plain PyTorch program or, where it has no other way in, its own call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The program: x ``[N, D]``, weight ``[V, D]``, target int64 ``[N]``; mean loss in f32."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def _inductor() -> Loss:
    return torch.compile(plain)


def _auto_chunker() -> Loss:
    return torch.compile(plain, options={"auto_chunker.enable": True})


def _core() -> Loss:
    return lambda x, weight, target: F.linear_cross_entropy(
        x, weight, target, options=torch.nn.LinearCrossEntropyOptions()
    )


def _fusedce() -> Loss:
    return torch.compile(plain, backend="fusedce")


PROVIDERS: dict[str, Callable[[], Loss]] = {
    "eager": lambda: plain,
    "inductor": _inductor,
    "auto_chunker": _auto_chunker,
    "core": _core,
    "fusedce": _fusedce,
}
