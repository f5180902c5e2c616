"""Folds: the nodes between a linear and its loss that the rewrite folds into the linear's operands.

In: nothing; these records are :mod:`fxpass.match.chain`'s output and
:mod:`fxpass.rewrite.rewrite`'s input. For example ``30 * tanh((linear(x, w) + b)[:, :-1] / 30)``
is::

    [Bias(%b, 1), RowView(%getitem, ...)]        and the function 30*tanh(z/30)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sympy import Expr
from torch.fx import Node

from fxpass.match.views import View


@dataclass(frozen=True)
class RowView:
    """A view of the rows, replayed on the hidden states, or a slice of the classes."""

    node: Node
    view: View


@dataclass(frozen=True)
class Stack:
    """A stack of several linears' logits, of which the loss reads those of one linear: replayed as
    ``count`` copies of this linear's rows along a new dimension ``dim``."""

    node: Node
    dim: int
    count: int


@dataclass(frozen=True)
class Bias:
    """``sign`` (±1) times ``operand``, one value per class, is added to the logits in ``dtype``."""

    operand: Node
    sign: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Scale:
    """The logits are multiplied or divided by ``operand``: a factor per row, or one factor that
    varies from call to call (a tensor ``[]`` or a float)."""

    operand: Node
    divide: bool


@dataclass(frozen=True)
class Affine:
    """The logits become ``factor * z + shift``, where factor and shift are constants."""

    factor: Expr
    shift: Expr


@dataclass(frozen=True)
class ToLocal:
    """``to_local``: from this node on each rank has its part of the logits as a plain tensor."""

    node: Node


Fold = RowView | Stack | Bias | Scale | Affine | ToLocal
