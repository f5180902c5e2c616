"""Records of a row function: the symbols of its expressions, rows, and their outputs.

In: nodes of a canonical ATen graph, whose tensors have their rows first. Out: sympy expressions,
and records. Symbols stand for nodes and for outputs of the operator; the class of an operand's
symbol tells the operand's shape::

    %mul = mul(%softmax, %log_softmax)    ->    exp(log_0)*log_0
    %sum = sum(%mul, [1])                 ->    RowValues(moment(1,1)_0)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from sympy import Add, Expr, Symbol
from torch.fx import Node

from fxpass.formula.expression import Z
from fxpass.formula.outputs import Moment, Output


class Operand(Symbol):
    """The symbol of an operand; ``label`` names its kind in messages."""

    label = ""


class RowOperand(Operand):
    """An operand ``[n, 1]``, or an operand's values at picked classes."""

    label = "row"


class ClassOperand(Operand):
    """An operand ``[V]``."""

    label = "class"


class GivenOperand(Operand):
    """An operand ``[n, V]``."""

    label = "given"


class HotOperand(Operand):
    """One-hot: 1 at the class of an index ``[n, 1]``, 0 at all other classes."""

    label = "hot"


class SpreadOperand(Operand):
    """A number at each class of an index ``[n, K]``, 0 at all other classes."""

    label = "spread"


class LogSoftmax(Symbol):
    """The symbol of the log-softmax of a base."""


OF_CLASS = ClassOperand, GivenOperand
OF_INDEX = HotOperand, SpreadOperand


class Unknown(Exception):  # noqa: N818
    """Why a row function is not lowered."""


@dataclass(frozen=True)
class RowValues:
    """A number for each row, or for each of its K picks, as an expression of outputs and of symbols
    of operands; ``index``: the number is a class."""

    expr: Expr
    index: bool = False


@dataclass(frozen=True)
class Base:
    """Logits that a softmax, or another reduction, reads.

    Attributes:
        transform: one logit, as an expression of ``z`` and of the operands at its class.
        scale: a factor of each row, as an expression of row symbols.
        log, lse: the symbols of the log-softmax and of the log-sum-exp.
        cancelling_lse: the symbol of the lse in expectations of logits. It has to cancel: in a sum
            with the lse, small logits lose their digits.
    """

    transform: Expr
    scale: Expr
    log: LogSoftmax
    lse: Symbol
    cancelling_lse: Symbol

    @property
    def logit(self) -> Expr:
        """The logit as an expression of ``z`` and of symbols of operands."""
        return self.transform * self.scale


@dataclass(frozen=True)
class Picked:
    """The outputs ``pick`` or ``at``, at the classes of an index tensor, K for each row.

    Attributes:
        index: class indices.
        logit: the logit is picked, not the log-softmax.
    """

    index: Node
    logit: bool = False

    @property
    def name(self) -> Output:
        """The output in a spec."""
        return "at" if self.logit else "pick"


@dataclass(frozen=True)
class Summed:
    """A moment, with the symbol of its weight; None for ones."""

    moment: Moment
    weight: Symbol | None = None


@dataclass(frozen=True)
class Chosen:
    """The values of an operand at the classes of an index tensor."""

    operand: Node
    index: Node


@dataclass(frozen=True)
class Spread:
    """A number at each class of an index tensor ``[n, K]``."""

    index: Node
    value: Expr


OfBase = Output | Picked | Summed


class BaseOutput(NamedTuple):
    """An output of a base."""

    base: Base
    output: OfBase


def symbols_of(expr: Any) -> set[Symbol]:
    """The symbols of an expression."""
    return expr.free_symbols


def has_classes(expr: Any) -> bool:
    """Tells if an expression differs from class to class."""
    kinds = LogSoftmax, *OF_CLASS, *OF_INDEX
    return any(s == Z or isinstance(s, kinds) for s in symbols_of(expr))


def terms_of(expr: Any) -> tuple[Any, ...]:
    """The terms of a sum; none of 0."""
    return Add.make_args(expr) if expr != 0 else ()


def factors_of(product: Any) -> tuple[Any, Any]:
    """The factor of a product that is a number of each row, and the factor with classes."""
    classes = [s for s in symbols_of(product) if has_classes(s)]
    return product.as_independent(*classes, as_Add=False)


def of_operands_alone(expr: Any) -> bool:
    """Tells if an expression reads a logit and operands alone, without a softmax."""
    some = symbols_of(expr)
    return all(s == Z or (isinstance(s, Operand) and not isinstance(s, OF_INDEX)) for s in some)
