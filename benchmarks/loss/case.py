"""One case of the benchmark: a provider, a shape, a dtype, with or without backward.

A worker process gets a :class:`Case` as JSON and makes the same tensors for every provider::

    >>> x, weight, target = Case("eager", 8, 4, 16, "float32", "cpu", True).tensors()
    >>> x.shape, weight.shape, target.shape
    (torch.Size([8, 4]), torch.Size([16, 4]), torch.Size([8]))
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Added to the bound, in case eager happens to be exact: a few units in the last place of the dtype
# of the gradients.
FLOOR = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
# Distinct rows of the step that is compared with float64; few, so that the exact result is cheap.
# The step has all rows of the case, which repeat these rows.
CHECKED_ROWS = 128
SEED = 0


@dataclass(frozen=True)
class Case:
    """x ``[n, d]`` and weight ``[v, d]`` of one dtype on one device.

    Attributes:
        provider: a name in :data:`benchmarks.loss.providers.PROVIDERS`.
        backward: the gradients of x and weight are computed too; else ``torch.no_grad``.
        softcap: logits z become ``softcap * tanh(z / softcap)``; 0 leaves them alone.
    """

    provider: str
    n: int
    d: int
    v: int
    dtype: str
    device: str
    backward: bool
    softcap: float = 0.0

    @property
    def itemsize(self) -> int:
        """Bytes of an element of x and weight."""
        return getattr(torch, self.dtype).itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that every provider has to return: those of x and weight."""
        return (self.n + self.v) * self.d * self.itemsize if self.backward else 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the bare GEMMs: three with the gradients, one without."""
        return (6 if self.backward else 2) * self.n * self.d * self.v

    def tensors(self, distinct: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x ``[n, d]``, weight ``[v, d]``, target int64 ``[n]``; the same for every provider.

        Args:
            distinct: how many rows differ; the others repeat them in their order. All by default.
        """
        x, target = self.rows(distinct)
        weight = torch.empty(self.v, self.d, dtype=getattr(torch, self.dtype), device=self.device)
        generator = self._generator(SEED + 1)
        for part in weight.split(1 << 14):  # in parts, so that no f32 copy of the whole exists
            random = torch.randn(part.shape, generator=generator, device=self.device)
            part.copy_(random.mul_(self.d**-0.5))
        return x, weight.requires_grad_(self.backward), target

    def rows(self, distinct: int | None = None) -> tuple[Tensor, Tensor]:
        """x and target of :meth:`tensors`."""
        rows = self.n if distinct is None else min(distinct, self.n)
        how: dict[str, Any] = {"generator": self._generator(SEED), "device": self.device}
        x = torch.randn(rows, self.d, **how).to(getattr(torch, self.dtype))
        target = torch.randint(self.v, (rows,), **how)
        order = torch.arange(self.n, device=self.device) % rows
        return x[order].requires_grad_(self.backward), target[order]

    def _generator(self, seed: int) -> torch.Generator:
        """On the case's device: a CPU takes seconds for a large head."""
        return torch.Generator(self.device).manual_seed(seed)

    def __str__(self) -> str:
        cap = f", soft-cap {self.softcap:g}" if self.softcap else ""
        mode = "training" if self.backward else "evaluation"
        return f"N={self.n} D={self.d} V={self.v}{cap}, {self.dtype}, {mode}"

    def to(self, provider: str) -> Case:
        """The same for another provider."""
        return dataclasses.replace(self, provider=provider)
