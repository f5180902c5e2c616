"""The outputs of a row of logits, as records with a text form.

In: numbers and expressions. Out: records; what they mean is in :mod:`fxpass.spec.reductions`::

    >>> [str(output) for output in (Moment(1, 0, weight=0), Sum(Z**2), Top(5), "lse")]
    ['moment(1,0,0)', 'sum(z**2)', 'top(5)', 'lse']
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from sympy import Expr, Symbol
from torch import Tensor

from fxpass.spec import expression
from fxpass.spec.expression import L, Z, operands
from fxpass.spec.functions import FUNCTIONS, LEAST_LOG, call

HIGHEST_POWER = 2


@dataclass(frozen=True, order=True)
class Moment:
    """``sum_j w_j exp(a l_j) l_j**b`` of a row, a and b 0 to 2; ``weight``: the position of w among
    the operands that the call gives, None for ones."""

    a: int
    b: int
    weight: int | None = None

    def term(self, y: Tensor) -> Tensor:
        """``exp(a y) y**b`` at each element, 0 where the exponential is 0."""
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


@dataclass(frozen=True)
class Sum:
    """``sum_j f_j`` of a row, for an expression f of :mod:`fxpass.spec.expression`."""

    function: Expr = Z

    @property
    def reads_softmax(self) -> bool:
        """Whether f needs the lse."""
        return self.function.has(L) or any(kind == "pick" for kind, _ in operands(self.function))

    @property
    def of_softmax(self) -> bool:
        """Whether f reads exponentials, which may be 0 where the log-softmax is -inf."""
        exponentials = self.function.atoms(FUNCTIONS["exp"].symbolic)
        return any(one.has(Z, L) for one in exponentials)

    @property
    def late(self) -> bool:
        """Whether f reads what a first pass over the row finds."""
        return self.reads_softmax or any(kind == "at" for kind, _ in operands(self.function))

    @functools.cached_property
    def slopes(self) -> tuple[Expr, Expr]:
        """The derivatives at the class of f by the log-softmax and by the logit. Of a class whose
        softmax is 1, :attr:`of_row` cancels the first: they are added up before the second, of
        which digits would be lost."""
        by_log, by_logit = (expression.derivative(self.function, by) for by in (L, Z))
        return by_log, by_logit

    @functools.cached_property
    def of_row(self) -> dict[tuple[str, int], Sum]:
        """The sums of the derivatives by the log-softmax, named ("l", 0), and by picks, but for
        those that are 0."""
        names = [(kind, i) for kind, i in operands(self.function) if kind in OF_PICKS]
        by = {("l", 0): L} | {(kind, i): Symbol(f"{kind}{i}") for kind, i in names}
        found = {name: expression.derivative(self.function, one) for name, one in by.items()}
        return {name: Sum(slope) for name, slope in found.items() if slope != 0}

    def __str__(self) -> str:
        return f"sum({expression.text(self.function)})"


def sum_of(function: Expr) -> Moment | Sum:
    """The output that adds up a function: a moment, which one pass finds, if it is one.

    >>> str(sum_of(expression.parse("given1*exp(l)*l"))), str(sum_of(expression.parse("exp(l)*z")))
    ('moment(1,1,1)', 'sum(z*exp(l))')
    """
    for a, b in itertools.product(range(HIGHEST_POWER + 1), repeat=2):
        weight: Any = function / (call("exp", a * L) if a else 1) / L**b
        if weight == 1:
            return Moment(a, b)
        if isinstance(weight, Symbol) and [kind for kind, _ in operands(weight)] == ["given"]:
            return Moment(a, b, operands(weight)[0][1])
    return Sum(function)


@dataclass(frozen=True)
class Top:
    """The k largest logits of a row, in descending order, or their classes; k rows. Of equal logits
    torch leaves the order open. It has no gradient."""

    k: int
    index: bool = False

    def __str__(self) -> str:
        return f"{'argtop' if self.index else 'top'}({self.k})"


# The sum S of a row, without which no log-softmax is known.
TOTAL = Moment(1, 0)

# The other outputs: rows of floats, and rows of class indices.
ROWS, INDICES = ("lse", "pick", "at", "max", "amax", "peak"), ("argmax",)
OF_PICKS = ("pick", "at")  # K rows each
OF_LARGEST = ("max", "amax", "peak")  # with gradients at a row's largest logit
OF_SOFTMAX = ("lse", "pick", "peak")
# The outputs, beside sums, that can be part of a total; the operands whose gradients it has.
IN_TOTAL, PRODUCTS = ("lse", "pick", "at"), ("x", "weight", "bias")
NAMED = (*PRODUCTS, "scale")  # operands with gradients, before given0, given1, ...
Output = Moment | Sum | Top | str


def is_index(output: Output) -> bool:
    """Whether an output is class indices."""
    return output.index if isinstance(output, Top) else output in INDICES


def of_one_softmax(outputs: Iterable[Output]) -> bool:
    """Whether the gradient of these outputs is the softmax times a number of each row, but for what
    single classes add."""
    names = set(outputs)
    return names <= {*OF_SOFTMAX, "at", "max", *INDICES} and not names.isdisjoint(OF_SOFTMAX)


def lines_of(output: Output, picks: int) -> int:
    """The rows of an output, where there are ``picks`` picks."""
    return picks if output in OF_PICKS else output.k if isinstance(output, Top) else 1


# ---------------------------------------------------------------- text forms


def output_of(word: str) -> Output:
    """The output with this text form; any other word is returned as it is."""
    if match := re.fullmatch(r"(arg)?top\(([1-9]\d*)\)", word):
        return Top(int(match[2]), match[1] is not None)
    if match := re.fullmatch(r"sum\((.*)\)", word):
        return Sum(expression.parse(match[1]))
    if match := re.fullmatch(r"moment\((\d),(\d)(?:,(\d+))?\)", word):
        return Moment(*map(int, filter(None, match.groups())))
    return word


def position_of(name: str) -> int:
    """The position of an operand among those with gradients; ``ValueError`` for another name."""
    if name in NAMED:
        return NAMED.index(name)
    if re.fullmatch(r"given(0|[1-9][0-9]*)", name) is None:
        raise ValueError(f"{name!r} is no operand")
    return len(NAMED) + int(name.removeprefix("given"))
