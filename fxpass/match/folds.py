"""What is folded into a linear's operands: all between it and its loss but functions of one logit.

In: nothing; these are the words in which :mod:`fxpass.match.chain` tells
:mod:`fxpass.rewrite.rewrite` what to do. For example ``30 *
tanh((linear(x, w) + b)[:, :-1] / 30)`` is::

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
    """Rows move, or some of the classes stay: to be replayed on the hidden states."""

    node: Node
    view: View


@dataclass(frozen=True)
class Stack:
    """The logits of several linears are stacked, of which the loss is given those of one: as if
    there were ``count`` of it along a new dimension ``dim``."""

    node: Node
    dim: int
    count: int


@dataclass(frozen=True)
class Bias:
    """``[V]`` numbers (of any shape that holds one row) are added to the logits in ``dtype``; sign
    is ±1."""

    operand: Node
    sign: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Scale:
    """The logits are multiplied or divided by a number per row, or by one number that varies from
    call to call: a tensor ``[]`` or a float."""

    operand: Node
    divide: bool


@dataclass(frozen=True)
class Affine:
    """The logits become ``factor * z + shift``, numbers of the graph."""

    factor: Expr
    shift: Expr


@dataclass(frozen=True)
class ToLocal:
    """DTensors end: from here on each rank has its own part of the logits, as a plain tensor."""

    node: Node


Fold = RowView | Stack | Bias | Scale | Affine | ToLocal
