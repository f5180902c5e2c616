"""Views of logits that rearrange rows, and edits of the operands that the logits are made of.

In: what the readers of the flow find. Out: records that the rewrite replays on the hidden states,
the weight and the bias::

    z[:, :-1]                ->    Step: getitem of the hidden states
    z[..., chosen]           ->    Taken: rows of the weight
    z + vector               ->    Added: to the bias
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.calls import first_operand
from fxpass.graph.nodes import hint, is_tensor, value
from fxpass.match.views import View, reshape_rows

# Views that keep the order of the rows, so that they do not matter to flat rows.
_SAME_ROWS = ("to_local", "reshape", reshape_rows, "flatten", "unflatten", "unsqueeze", "squeeze")


@dataclass(frozen=True)
class Step:
    """One view of the logits: the node, how it rearranges rows, and the position of the class
    dimension in its output."""

    node: Node
    view: View
    dim: int


@dataclass(frozen=True)
class Taken:
    """Some of the classes: an index tensor ``[V']``, or start, stop and step of a slice."""

    index: Node | tuple[Any, ...]

    @property
    def entry(self) -> Any:
        """The index of the classes."""
        return slice(*self.index) if isinstance(self.index, tuple) else self.index


@dataclass(frozen=True)
class Added:
    """A number times the vector ``[V]`` of a symbol is added to the linear's output."""

    bias: Symbol
    factor: Expr


Edit = Taken | Added


def trimmed(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Steps without the last ones that keep the rows' order."""
    while steps and keeps_rows(steps[-1]):
        steps = steps[:-1]
    return steps


def keeps_rows(step: Step) -> bool:
    """Whether flat rows are the same before and after a view. The class dimension is the last one,
    before it and after it."""
    if step.view.target not in _SAME_ROWS:
        return False
    before, after = value(first_operand(step.node)), value(step.node)
    return step.view.before == before.dim() - 1 and step.dim == after.dim() - 1


def taken(edit: Edit, count: int | torch.SymInt) -> int | torch.SymInt:
    """The number of classes after an edit."""
    if not isinstance(edit, Taken):
        return count
    if isinstance(edit.index, Node):
        return value(edit.index).shape[0]
    numbers = all(isinstance(n, int | None) for n in edit.index)
    return len(range(*slice(*edit.index).indices(hint(count)))) if numbers else count


def is_one_number(node: Node) -> bool:
    """Whether a node is a number, or a tensor of one."""
    return not is_tensor(node) or value(node).numel() == 1


def symbols_of(expr: Any) -> set[Symbol]:
    """The symbols of an expression."""
    return expr.free_symbols
