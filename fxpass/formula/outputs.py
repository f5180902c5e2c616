"""The outputs of a row of logits, as records with a text form.

In: numbers. Out: records; their meaning is in :mod:`fxpass.formula.reductions`::

    >>> [str(output) for output in (Moment(1, 0, weight=0), "lse")]
    ['moment(1,0,0)', 'lse']
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Far below any log-softmax that counts, and its square is finite: 0 * -inf would be nan.
LEAST_LOG = -1e15
HIGHEST_POWER = 2


@dataclass(frozen=True, order=True)
class Moment:
    """``sum_j w_j exp(a l_j) l_j**b`` of a row, where a and b are 0 to 2; ``weight``: the position
    of w among the call's given values, None for ones."""

    a: int
    b: int
    weight: int | None = None

    def term(self, y: Tensor) -> Tensor:
        """``exp(a y) y**b`` of each element, 0 where the exponential is 0."""
        if not self.a:
            return y**self.b if self.b else torch.ones_like(y)
        e = y.exp() if self.a == 1 else (self.a * y).exp_()
        if self.b:
            finite = y.clamp(min=LEAST_LOG)
            for _ in range(self.b):
                e.mul_(finite)
        return e

    def __str__(self) -> str:
        weight = "" if self.weight is None else f",{self.weight}"
        return f"moment({self.a},{self.b}{weight})"


# The sum S of a row, without which no log-softmax is known.
TOTAL = Moment(1, 0)

# The other outputs: rows of floats, and rows of class indices.
ROWS = ("lse", "pick", "at", "max")
INDICES = ("argmax",)
OF_PICKS = ("pick", "at")  # K rows each
OF_SOFTMAX = ("lse", "pick")
# The outputs, beside moments, that have gradients; the operands that may have one.
TRAINED = ("lse", "pick", "at")
PRODUCTS = ("x", "weight", "bias")
Output = Moment | str


def is_index(output: Output) -> bool:
    """Tells if an output is class indices."""
    return output in INDICES


def of_one_softmax(outputs: Iterable[Output]) -> bool:
    """Tells if the gradient of these outputs is the softmax times a number of each row, plus
    values at single classes."""
    names = set(outputs)
    return names <= {*OF_SOFTMAX, "at", "max", *INDICES} and not names.isdisjoint(OF_SOFTMAX)


def line_count(output: Output, picks: int) -> int:
    """The number of an output's lines ``[N]``, if a row has ``picks`` picks."""
    return picks if output in OF_PICKS else 1
