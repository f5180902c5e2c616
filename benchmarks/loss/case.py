"""One measured program: which, its sizes and dtype, who runs it.

A worker process gets a :class:`Case` as JSON and makes the same operands for every provider::

    >>> case = Case("eager", 8, 4, 16, "float32", "cpu")
    >>> {name: tuple(t.shape) for name, t in case.operands(("x", "w", "labels")).items()}
    {'x': (8, 4), 'w': (16, 4), 'labels': (8,)}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Added to the bound, in case eager happens to be exact: a few units in the last place of the dtype
# of the gradients.
FLOOR = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
# Distinct rows of the step that is compared with float64; few, so that the exact result is cheap.
# The step has all rows of the case, which repeat these rows. Also the tokens of a layer's sequence.
CHECKED_ROWS = 128
SEED = 0
CROSS_ENTROPY = "cross-entropy"  # of a linear, the program that all providers have
RANK = 16  # of a low-rank adapter
OF_A_HEAD = 64  # channels of attention
# name → the sizes of an operand: hidden states, weights of heads, an adapter, the layers of an MLP;
# labels are class indices. Those of a row may repeat.
SHAPES = {
    "x": "nd", "w": "vd", "labels": "n", "teacher_x": "nd", "teacher_w": "vd", "frozen": "vd",
    "down": "rd", "up": "vr", "mlp": "mm",
}  # fmt: skip
OF_ROWS = tuple(name for name, sizes in SHAPES.items() if sizes[0] == "n")


@dataclass(frozen=True)
class Case:
    """A program of operands of one dtype on one device.

    Attributes:
        provider: a name in :data:`benchmarks.loss.providers.PROVIDERS`.
        n, d, v: rows, hidden size, classes.
        backward: the gradients of the trained operands are computed too; else ``torch.no_grad``.
        softcap: logits z become ``softcap * tanh(z / softcap)``; 0 leaves them alone.
        program: a name in :data:`benchmarks.loss.programs.PROGRAMS`.
        layers: the transformer layers that make the head's hidden states of x; 0: x is these.
        autocast, scaled: see :class:`benchmarks.accuracy.cases.Setting`.
        cache: the folder of Inductor's caches; empty: the usual one.
    """

    provider: str
    n: int
    d: int
    v: int
    dtype: str
    device: str
    backward: bool = True
    softcap: float = 0.0
    program: str = CROSS_ENTROPY
    layers: int = 0
    autocast: bool = False
    scaled: bool = False
    cache: str = ""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that every provider has to return: those of x and w."""
        size = getattr(torch, self.dtype).itemsize
        return (self.n + self.v) * self.d * size if self.backward else 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the bare GEMMs: three with the gradients, one without."""
        return (6 if self.backward else 2) * self.n * self.d * self.v

    @property
    def distinct(self) -> int:
        """How many rows differ where results are compared: whole sequences, all equally often."""
        return self.n if self.n % CHECKED_ROWS else CHECKED_ROWS

    def operands(self, names: Iterable[str], distinct: int | None = None) -> dict[str, Tensor]:
        """The operands by name, the same for every provider; none requires a gradient.

        Args:
            distinct: how many rows differ; the others repeat them in their order. All by default.
        """
        made = {name: self._operand(name, distinct or self.n) for name in names}
        order = torch.arange(self.n, device=self.device) % (distinct or self.n)
        return {k: t[order] if k in OF_ROWS and distinct else t for k, t in made.items()}

    def _operand(self, name: str, rows: int) -> Tensor:
        sizes = {"n": rows, "d": self.d, "v": self.v, "r": RANK, "m": 2 * self.d}
        shape = [sizes[letter] for letter in SHAPES[name]]
        # on the case's device: a CPU takes seconds for a large head
        generator = torch.Generator(self.device).manual_seed(SEED + list(SHAPES).index(name))
        how: dict[str, Any] = {"generator": generator, "device": self.device}
        if name == "labels":
            return torch.randint(self.v, shape, **how)
        made = torch.empty(shape, dtype=getattr(torch, self.dtype), device=self.device)
        for part in made.split(1 << 14):  # in parts, so that no f32 copy of the whole exists
            random = torch.randn(part.shape, **how)
            part.copy_(random if name in OF_ROWS else random.mul_(shape[-1] ** -0.5))
        return made

    def stack(self) -> nn.Sequential:
        """The trained layers, the same for every provider: pre-norm, on sequences of rows."""
        if not self.layers:
            return nn.Sequential()
        heads = self.d // OF_A_HEAD if self.d % OF_A_HEAD == 0 else 1
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            layers = nn.Sequential(
                nn.Unflatten(0, (-1, CHECKED_ROWS)),
                *(
                    nn.TransformerEncoderLayer(self.d, heads, 2 * self.d, **options)
                    for _ in range(self.layers)
                ),
                nn.Flatten(0, 1),
                nn.LayerNorm(self.d),
            )
        return layers.to(self.device, getattr(torch, self.dtype))

    def __str__(self) -> str:
        parts = [
            f"N={self.n} D={self.d} V={self.v}",
            f"soft-cap {self.softcap:g}" * bool(self.softcap),
            self.dtype + " autocast of f32" * self.autocast + " + GradScaler" * self.scaled,
            "training" if self.backward else "evaluation",
            f"behind {self.layers} transformer layers" * bool(self.layers),
        ]
        return ", ".join(part for part in parts if part)

    def to(self, provider: str, cache: str = "") -> Case:
        """The same for another provider, with another cache."""
        return dataclasses.replace(self, provider=provider, cache=cache)
