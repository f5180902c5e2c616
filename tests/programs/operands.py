"""The tensors that programs take, by name.

In: a name, a dtype and sizes. Out: a tensor, the same at every call::

    >>> make("x", torch.float32).shape, make("labels", torch.float32).dtype
    (torch.Size([48, 16]), torch.int64)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
SEED = 0


@dataclass(frozen=True)
class Sizes:
    """``b`` sequences of ``t`` tokens, hidden size ``d``, ``v`` classes.

    The logits of one sequence have more elements than the weight: what has more is of the logits'
    size, and nothing else is.
    """

    b: int = 2
    t: int = 24
    d: int = 16
    v: int = 97

    @property
    def n(self) -> int:
        """Rows."""
        return self.b * self.t


SIZES = Sizes()
# as many rows as classes and hidden values: a rule that goes by sizes mixes them up
SQUARE = Sizes(b=2, t=3, d=6, v=6)
TEACHER_D = 12


def _labels(s: Sizes) -> Tensor:
    """Every other label is the class of the largest logit: accuracies are neither 0 nor 1."""
    x, weight = make("x", torch.float32, s), make("weight", torch.float32, s)
    likely = (x @ weight.t()).argmax(-1)
    return torch.where(torch.arange(s.n) % 2 == 0, likely, torch.randint(s.v, (s.n,)))


def _ignored(s: Sizes) -> Tensor:
    return make("labels", torch.float32, s).masked_fill(torch.arange(s.n) % 5 == 3, IGNORED)


def _codes(s: Sizes) -> Tensor:
    return torch.randint(16, (s.v, s.d), dtype=torch.uint8)


def _packed(s: Sizes) -> Tensor:
    """Two codes of 4 bits in a byte, the first one in its low bits."""
    codes = make("codes", torch.float32, s)
    return codes[:, ::2] | codes[:, 1::2] << 4


OPERANDS: dict[str, Callable[[Sizes], Tensor]] = {
    "x": lambda s: torch.randn(s.n, s.d),
    "weight": lambda s: 0.5 * torch.randn(s.v, s.d),
    "bias": lambda s: torch.randn(s.v),
    # class indices: [N], the same with ignored rows, [B, T], the same with ignored rows, [N, K]
    "labels": _labels,
    "ignored": _ignored,
    "tokens": lambda s: make("labels", torch.float32, s).view(s.b, s.t),
    "ignored_tokens": lambda s: make("ignored", torch.float32, s).view(s.b, s.t),
    "candidates": lambda s: torch.stack([torch.randperm(s.v)[:5] for _ in range(s.n)]),
    # given values [N, V]: probabilities, another head's logits, binary labels
    "soft": lambda s: torch.randn(s.n, s.v).softmax(-1),
    "teacher": lambda s: torch.randn(s.n, s.v),
    "binary": lambda s: (torch.rand(s.n, s.v) < 0.1).float(),
    # one number; one for each row
    "temperature": lambda s: torch.tensor(0.75),
    "temperatures": lambda s: torch.rand(s.n, 1) + 0.5,
    # [N] and [B, T] beside a policy's log-probabilities; a value for each row
    "old": lambda s: -torch.rand(s.n) - 3,
    "old_tokens": lambda s: -torch.rand(s.b, s.t) - 3,
    "advantages": lambda s: torch.randn(s.n),
    "values": lambda s: torch.randn(s.n),
    # rows [N], [B, T], and classes [V] that count
    "rows": lambda s: torch.arange(s.n) % 3 != 0,
    "mask": lambda s: torch.arange(s.n).view(s.b, s.t) % 4 != 1,
    "banned": lambda s: torch.arange(s.v) % 7 == 3,
    # [V]: a factor, a weight, a logarithm of a frequency, a support of a value, a margin
    "factor": lambda s: torch.rand(s.v) + 0.5,
    "class_weight": lambda s: torch.rand(s.v) + 0.5,
    "prior": lambda s: torch.randn(s.v).log_softmax(-1),
    "atoms": lambda s: torch.linspace(-5, 5, s.v),
    "margins": lambda s: 0.3 * torch.rand(s.v),
    # indices of classes [S], among them class 0
    "chosen": lambda s: torch.cat([torch.zeros(1).long(), torch.randperm(s.v - 1)[:59] + 1]),
    # a low-rank update of the head
    "down": lambda s: torch.randn(4, s.d) * s.d**-0.5,
    "up": lambda s: torch.randn(s.v, 4),
    # a frozen teacher of another hidden size; another pass or another head of the student
    "teacher_x": lambda s: torch.randn(s.n, TEACHER_D),
    "teacher_weight": lambda s: 0.6 * torch.randn(s.v, TEACHER_D),
    "second_x": lambda s: make("x", torch.float32, s) + 0.3 * torch.randn(s.n, s.d),
    "second_weight": lambda s: 0.5 * torch.randn(s.v, s.d),
    # a head of another vocabulary, one of each position, and one of each of four codebooks
    "added_weight": lambda s: 0.5 * torch.randn(40, s.d),
    "position_weight": lambda s: 0.5 * torch.randn(s.t, s.d, s.v),
    "codebooks": lambda s: 0.5 * torch.randn(4, s.v, s.d),
    # two centres for each class
    "centres": lambda s: 0.5 * torch.randn(2 * s.v, s.d),
    # a quantised head: 8 bits and a scale for each class; codes of 4 bits, as they are and packed,
    # a scale for each class and half of the hidden size, and what the codes stand for
    "quantised": lambda s: torch.randint(-127, 128, (s.v, s.d), dtype=torch.int8),
    "scales": lambda s: (torch.rand(s.v, 1) + 0.5) / 127,
    "codes": _codes,
    "packed": _packed,
    "group_scales": lambda s: (torch.rand(s.v, 2) + 0.5) / 8,
    "levels": lambda s: torch.linspace(-1, 1, 16).pow(3),
    # what dropout multiplies x by
    "kept": lambda s: (torch.rand(s.n, s.d) > 0.1) / 0.9,
    # Gumbel noise [N, V]
    "noise": lambda s: -torch.rand(s.n, s.v).clamp(1e-6, 1 - 1e-6).log().neg().log(),
    # a distribution for each class; the group of each class
    "class_matrix": lambda s: (2 * torch.eye(s.v) + torch.randn(s.v, s.v)).softmax(-1),
    "groups": lambda s: torch.randint(8, (s.v,)),
    # [B, T]: who wrote a token, 0 to 2; [N]: a value in the support of the atoms
    "roles": lambda s: (torch.arange(s.n) // 4 % 3).view(s.b, s.t),
    "returns": lambda s: 4 * torch.randn(s.n).tanh(),
}
TRAINED = frozenset(
    {
        *("x", "weight", "bias", "soft", "temperature", "temperatures", "factor", "down", "up"),
        *("second_x", "second_weight", "added_weight", "position_weight", "codebooks", "centres"),
    }
)


def make(name: str, dtype: torch.dtype, sizes: Sizes = SIZES) -> Tensor:
    """The operand ``name``; ``dtype`` is that of floating-point operands."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + zlib.crc32(name.encode()))
        made = OPERANDS[name](sizes)
    return made.to(dtype) if made.is_floating_point() else made
