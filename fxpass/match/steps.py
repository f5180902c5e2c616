"""What may happen between a linear and its loss beside a function of one logit.

In: nothing; these are the words in which :mod:`fxpass.match.walk` tells
:mod:`fxpass.rewrite.rewrite` what to do to the linear's operands. For example ``30 *
tanh((linear(x, w) + b)[:, :-1] / 30)`` is::

    [Bias(%b, 1), Move(%getitem, ...)]        and the function 30*tanh(z/30)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sympy import Expr
from torch.fx import Node

from fxpass.match.movements import Moved


@dataclass(frozen=True)
class Move:
    """Rows move, or some of the classes stay: to be replayed on the hidden states."""

    node: Node
    moved: Moved


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
class Local:
    """DTensors end: from here on each rank has its own part of the logits, as a plain tensor."""

    node: Node


Step = Move | Stack | Bias | Scale | Affine | Local
