"""What a call of the operator reduces, and its outputs, before it has positions of operands.

In: nothing. Out: records of symbols, which stand for tensors of the graph
(:class:`fxpass.match.classes.Flow`)::

    Summed(given_q * exp(l))                  ->    moment(1,0,0), where given_q is the first
    Summed(softplus(z) - given_q*z)           ->    sum(softplus(z)-given0*z)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.nodes import value
from fxpass.match.edits import Added, Edit, Step, Taken, symbols_of
from fxpass.spec import expression
from fxpass.spec.expression import L, Z
from fxpass.spec.outputs import Moment, Output, sum_of

# The kind of symbols of one-hot tensors, and of those of indices that may be negative, counted from
# the end.
HOT, WRAPPED = "hot_", "hot_+"  # no name of a node begins with +


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
        """The symbols of the tensors that the transform reads, but for one-hot tensors."""
        return [s for s in beside(self.transform) if not s.name.startswith(HOT)]

    @property
    def hits(self) -> list[Symbol]:
        """The symbols of the one-hot tensors that the transform reads."""
        return [s for s in beside(self.transform) if s.name.startswith(HOT)]

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
        pieces: of pieces of the rows that are joined, the picks of each, in order; ``index`` is the
            first one's.
    """

    index: Node
    dim: int | None
    wraps: str = ""
    ignored: int | None = None
    logit: bool = False
    pieces: tuple[Picked, ...] = ()

    @property
    def count(self) -> int | torch.SymInt:
        """K."""
        return 1 if self.dim is None else value(self.index).shape[self.dim]

    @property
    def indices(self) -> tuple[Node, ...]:
        """The tensors that it is made of."""
        return tuple(pick.index for pick in self.pieces or (self,))


@dataclass(frozen=True)
class Summed:
    """A sum of a function of a base's logit ``z`` and log-softmax ``l``, of values given at its
    class or for its row, and of outputs at picks."""

    function: Expr

    @property
    def given(self) -> list[Symbol]:
        """The symbols of given values."""
        return [s for s in beside(self.function) if s.name.startswith(("class_", "given_", "row_"))]

    @property
    def hits(self) -> list[Symbol]:
        """The symbols of one-hot tensors."""
        return [s for s in beside(self.function) if s.name.startswith(HOT)]

    @property
    def picks(self) -> list[Symbol]:
        """The symbols of outputs at picks."""
        return [s for s in beside(self.function) if s not in (*self.given, *self.hits)]

    @property
    def of_one_pass(self) -> bool:
        """Whether it is a moment."""
        names = {symbol: expression.given(i) for i, symbol in enumerate(self.given)}
        return isinstance(sum_of(self.function.xreplace(names)), Moment)  # type: ignore[arg-type]

    @property
    def late(self) -> bool:
        """Whether it reads the softmax, or picks."""
        return self.function.has(L) or bool(self.picks)


OfBase = Output | Picked | Summed


def beside(function: Expr) -> list[Symbol]:
    """What a function of one logit reads beside the logit."""
    return sorted(symbols_of(function) - {Z, L}, key=str)


def given_of(output: object) -> list[Symbol]:
    """The symbols of the values that are given for an output."""
    return output.given if isinstance(output, Summed) else []
