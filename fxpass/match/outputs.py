"""What a call of the operator reduces, and its outputs, before it has positions of operands.

In: nothing. Out: records of symbols, which stand for tensors of the graph
(:class:`fxpass.match.classes.Flow`)::

    Summed(given_q * exp(l))    ->    moment(1,0,0), where given_q is the first
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.nodes import value
from fxpass.match.edits import Added, Edit, Step, Taken, symbols_of
from fxpass.spec import expression
from fxpass.spec.expression import L, Z
from fxpass.spec.functions import call
from fxpass.spec.outputs import HIGHEST_POWER, Moment, Output


@dataclass(frozen=True)
class Base:
    """Logits of which a softmax, or another reduction, is taken.

    Attributes:
        steps: the views from the linear's output to them, but for those that keep the rows' order.
        edits: changes of the linear's operands.
        transform: one logit, as an expression of ``z`` and of what is given at its class.
        scale: a factor of each row, as an expression of row symbols.
        log, lse: the symbols of the log-softmax and of the log-sum-exp.
    """

    steps: tuple[Step, ...]
    edits: tuple[Edit, ...]
    transform: Expr
    scale: Expr
    log: Symbol
    lse: Symbol

    @property
    def logit(self) -> Expr:
        """The logit as an expression of ``z`` and row symbols."""
        return self.transform * self.scale

    @property
    def given(self) -> list[Symbol]:
        """The symbols of the tensors that the transform reads."""
        return beside(self.transform)

    @property
    def indices(self) -> list[Node]:
        """The nodes that select classes."""
        taken = [edit.index for edit in self.edits if isinstance(edit, Taken)]
        parts = [part for i in taken for part in (i if isinstance(i, tuple) else (i,))]
        return [part for part in parts if isinstance(part, Node)]

    @property
    def biases(self) -> list[Symbol]:
        """The symbols of what is added to the linear's bias."""
        return [edit.bias for edit in self.edits if isinstance(edit, Added)]


@dataclass(frozen=True)
class Picked:
    """The outputs ``pick`` or ``at``, at the classes of an index tensor.

    Attributes:
        index: class indices: one or K for each row.
        dim: position of the dimension of K in ``index``; None if it has none.
        wraps: ``all``, ``negative`` or empty: which indices outside the classes are counted from
            the end.
        ignored: an index whose rows take class 0; None if there is none.
        logit: whether the logit is picked, and not the log-softmax.
    """

    index: Node
    dim: int | None
    wraps: str = ""
    ignored: int | None = None
    logit: bool = False

    @property
    def count(self) -> int | torch.SymInt:
        """K."""
        return 1 if self.dim is None else value(self.index).shape[self.dim]


@dataclass(frozen=True)
class Summed:
    """A sum of a function of a base's log-softmax ``l`` and of values given at its class."""

    function: Expr

    @property
    def given(self) -> list[Symbol]:
        """The symbols of given values."""
        return beside(self.function)

    @property
    def is_moment(self) -> bool:
        """Whether a moment has this function."""
        names = {symbol: expression.given(i) for i, symbol in enumerate(self.given)}
        return moment_of(self.function.xreplace(names)) is not None  # type: ignore[arg-type]


OfBase = Output | Picked | Summed


def moment_of(function: Expr) -> Moment | None:
    """The moment that adds up a function of ``l``, if there is one.

    >>> str(moment_of(expression.given(1) * call("exp", L) * L))
    'moment(1,1,1)'
    """
    for a, b in itertools.product(range(HIGHEST_POWER + 1), repeat=2):
        weight: Any = function / (call("exp", a * L) if a else 1) / L**b
        if weight == 1:
            return Moment(a, b)
        if isinstance(weight, Symbol) and weight.name.startswith("given"):
            return Moment(a, b, int(weight.name.removeprefix("given")))
    return None


def beside(function: Expr) -> list[Symbol]:
    """What a function of one logit reads beside the logit."""
    return sorted(symbols_of(function) - {Z, L}, key=str)


def given_of(output: object) -> list[Symbol]:
    """The symbols of the values that are given for an output."""
    return output.given if isinstance(output, Summed) else []
