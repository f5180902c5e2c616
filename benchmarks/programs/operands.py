"""The tensors that programs take, by the name of the function's parameter.

In: a name and a dtype. Out: a tensor, the same at every call::

    >>> make("x", torch.float32).shape, make("labels", torch.float32).dtype
    (torch.Size([48, 16]), torch.int64)
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.loss.case import SEED

IGNORED = -100


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
N, D, V = SIZES.n, SIZES.d, SIZES.v
TEACHER_D = 12
INPUTS = ("x", "weight")


def _x() -> Tensor:
    return torch.randn(N, D)


def _weight() -> Tensor:
    return 0.5 * torch.randn(V, D)


def _labels() -> Tensor:
    """Every other label is the class of the largest logit: accuracies are neither 0 nor 1."""
    likely = (make("x", torch.float32) @ make("weight", torch.float32).t()).argmax(-1)
    return torch.where(torch.arange(N) % 2 == 0, likely, torch.randint(V, (N,)))


def _ignored() -> Tensor:
    return make("labels", torch.float32).masked_fill(torch.arange(N) % 5 == 3, IGNORED)


def _codes() -> Tensor:
    return torch.randint(16, (V, D), dtype=torch.uint8)


def _packed() -> Tensor:
    """Two codes of 4 bits in a byte, the first one in its low bits."""
    codes = make("codes", torch.float32)
    return codes[:, ::2] | codes[:, 1::2] << 4


OPERANDS: dict[str, Callable[[], Tensor]] = {
    "x": _x,
    "weight": _weight,
    "bias": lambda: torch.randn(V),
    # class indices: [N], the same with ignored rows, [B, T], the same with ignored rows, [N, K]
    "labels": _labels,
    "ignored": _ignored,
    "tokens": lambda: make("labels", torch.float32).view(SIZES.b, SIZES.t),
    "ignored_tokens": lambda: make("ignored", torch.float32).view(SIZES.b, SIZES.t),
    "candidates": lambda: torch.stack([torch.randperm(V)[:5] for _ in range(N)]),
    # given values [N, V]: probabilities, another head's logits, binary labels
    "soft": lambda: torch.randn(N, V).softmax(-1),
    "teacher": lambda: torch.randn(N, V),
    "binary": lambda: (torch.rand(N, V) < 0.1).float(),
    # one number; one for each row
    "temperature": lambda: torch.tensor(0.75),
    "temperatures": lambda: torch.rand(N, 1) + 0.5,
    # [N] and [B, T] beside a policy's log-probabilities; a value for each row
    "old": lambda: -torch.rand(N) - 3,
    "old_tokens": lambda: -torch.rand(SIZES.b, SIZES.t) - 3,
    "advantages": lambda: torch.randn(N),
    "values": lambda: torch.randn(N),
    # rows [N], [B, T], and classes [V] that count
    "rows": lambda: torch.arange(N) % 3 != 0,
    "mask": lambda: torch.arange(N).view(SIZES.b, SIZES.t) % 4 != 1,
    "banned": lambda: torch.arange(V) % 7 == 3,
    # [V]: a factor, a weight, a logarithm of a frequency, a support of a value, a margin
    "factor": lambda: torch.rand(V) + 0.5,
    "class_weight": lambda: torch.rand(V) + 0.5,
    "prior": lambda: torch.randn(V).log_softmax(-1),
    "atoms": lambda: torch.linspace(-5, 5, V),
    "margins": lambda: 0.3 * torch.rand(V),
    # indices of classes [S], among them class 0
    "chosen": lambda: torch.cat([torch.zeros(1).long(), torch.randperm(V - 1)[:59] + 1]),
    # a low-rank update of the head
    "down": lambda: torch.randn(4, D) * D**-0.5,
    "up": lambda: torch.randn(V, 4),
    # a frozen teacher of another hidden size; another pass or another head of the student
    "teacher_x": lambda: torch.randn(N, TEACHER_D),
    "teacher_weight": lambda: 0.6 * torch.randn(V, TEACHER_D),
    "second_x": lambda: make("x", torch.float32) + 0.3 * torch.randn(N, D),
    "second_weight": lambda: 0.5 * torch.randn(V, D),
    # a head of another vocabulary, one of each position, and one of each of four codebooks
    "added_weight": lambda: 0.5 * torch.randn(40, D),
    "position_weight": lambda: 0.5 * torch.randn(SIZES.t, D, V),
    "codebooks": lambda: 0.5 * torch.randn(4, V, D),
    # two centres for each class
    "centres": lambda: 0.5 * torch.randn(2 * V, D),
    # a quantised head: 8 bits and a scale for each class; codes of 4 bits, as they are and packed,
    # a scale for each class and half of the hidden size, and what the codes stand for
    "quantised": lambda: torch.randint(-127, 128, (V, D), dtype=torch.int8),
    "scales": lambda: (torch.rand(V, 1) + 0.5) / 127,
    "codes": _codes,
    "packed": _packed,
    "group_scales": lambda: (torch.rand(V, 2) + 0.5) / 8,
    "levels": lambda: torch.linspace(-1, 1, 16).pow(3),
    # what dropout multiplies x by
    "kept": lambda: (torch.rand(N, D) > 0.1) / 0.9,
    # Gumbel noise [N, V]
    "noise": lambda: -torch.rand(N, V).clamp(1e-6, 1 - 1e-6).log().neg().log(),
    # a distribution for each class; the group of each class
    "class_matrix": lambda: (2 * torch.eye(V) + torch.randn(V, V)).softmax(-1),
    "groups": lambda: torch.randint(8, (V,)),
    # [B, T]: who wrote a token, 0 to 2; [N]: a value in the support of the atoms
    "roles": lambda: (torch.arange(N) // 4 % 3).view(SIZES.b, SIZES.t),
    "returns": lambda: 4 * torch.randn(N).tanh(),
}
TRAINED = frozenset(
    {
        *(*INPUTS, "bias", "soft", "temperature", "temperatures", "factor", "down", "up"),
        *("second_x", "second_weight", "added_weight", "position_weight", "codebooks", "centres"),
    }
)


def make(name: str, dtype: torch.dtype) -> Tensor:
    """The operand ``name``; ``dtype`` is that of floating-point operands."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED + zlib.crc32(name.encode()))
        made = OPERANDS[name]()
    return made.to(dtype) if made.is_floating_point() else made
