"""Records of the nodes of a row function: tensors with classes, rows, and their outputs.

In: nodes of a canonical ATen graph, whose tensors have their rows first. Out: records of sympy
expressions. The symbols stand for nodes and for outputs of the operator; what an operand has for
each row and class is the class of its symbol::

    %mul = mul(%softmax, %log_softmax)    ->    Classes(exp(log_0)*log_0)
    %sum = sum(%mul, [1])                 ->    RowValues(moment(1,1)_0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.formula.expression import Z
from fxpass.formula.outputs import Moment, Output


class Operand(Symbol):
    """The symbol of an operand; ``label`` tells readers of a message which one."""

    label = ""


class RowOperand(Operand):
    """An operand ``[n, 1]``, or what an operand has at a pick."""

    label = "row"


class ClassOperand(Operand):
    """An operand ``[V]``."""

    label = "class"


class GivenOperand(Operand):
    """An operand ``[n, V]``."""

    label = "given"


class HotOperand(Operand):
    """1 at the class of an index ``[n, 1]``, 0 at all others."""

    label = "hot"


class SpreadOperand(Operand):
    """A number at each class of an index ``[n, K]``, 0 at all others."""

    label = "spread"


class LogSoftmax(Symbol):
    """The symbol of the log-softmax of a base."""


OF_CLASS = ClassOperand, GivenOperand
OF_INDEX = HotOperand, SpreadOperand


class Unknown(Exception):  # noqa: N818
    """Why a row function is not lowered."""


@dataclass(frozen=True)
class Classes:
    """A tensor with classes.

    Attributes:
        expr: one element; ``z`` is the logit.
    """

    expr: Expr


@dataclass(frozen=True)
class RowValues:
    """One number for each row, or one for each of K picks, as an expression of outputs and of
    symbols of operands; ``index``: it is a class."""

    expr: Expr
    index: bool = False


@dataclass(frozen=True)
class Base:
    """Logits of which a softmax, or another reduction, is taken.

    Attributes:
        transform: one logit, as an expression of ``z`` and of what is given at its class.
        scale: a factor of each row, as an expression of row symbols.
        log, lse: the symbols of the log-softmax and of the log-sum-exp.
        loose: that of the lse in expectations of logits, which has to cancel: the digits of small
            logits are lost in a sum with it.
    """

    transform: Expr
    scale: Expr
    log: LogSoftmax
    lse: Symbol
    loose: Symbol

    @property
    def logit(self) -> Expr:
        """The logit as an expression of ``z`` and of symbols of operands."""
        return self.transform * self.scale


@dataclass(frozen=True)
class Picked:
    """The outputs ``pick`` or ``at``, at the classes of an index tensor, K for each row.

    Attributes:
        index: class indices.
        logit: whether the logit is picked, and not the log-softmax.
    """

    index: Node
    logit: bool = False


@dataclass(frozen=True)
class Summed:
    """A moment, whose weight is that of a symbol, or one."""

    moment: Moment
    weight: Symbol | None = None


@dataclass(frozen=True)
class Chosen:
    """The values of an operand at the classes of an index tensor."""

    operand: Node
    index: Node


OfBase = Output | Picked | Summed


def symbols_of(expr: Any) -> set[Symbol]:
    """The symbols of an expression."""
    return expr.free_symbols


def has_classes(expr: Any) -> bool:
    """Whether an expression differs from class to class."""
    kinds = LogSoftmax, *OF_CLASS, *OF_INDEX
    return any(s == Z or isinstance(s, kinds) for s in symbols_of(expr))


def of_operands_alone(expr: Any) -> bool:
    """Whether an expression is one of a logit and of operands, without a softmax."""
    some = symbols_of(expr)
    return all(s == Z or (isinstance(s, Operand) and not isinstance(s, OF_INDEX)) for s in some)
