"""Stacks of several heads' logits, out of which the program takes each head's logits again.

In: a stack, then the nodes that read it. Out: the :class:`fxpass.match.classes.Classes` of what is
taken at the head's position. Rows are replayed on copies of the head's hidden states, one for each
head, of which the index takes one::

    %all = stack((%z0, %z1), 1);  %one = getitem(%all, (slice(None), 1))    ->    %z1
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand, is_cut
from fxpass.graph.functions import CASTS, function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, needs_gradient, value
from fxpass.match.classes import Flow, Stacked
from fxpass.match.edits import Step
from fxpass.match.elementwise import view_step
from fxpass.match.operands import check_cast, viewed
from fxpass.match.views import VIEWS, View, repeat_rows


def stack_of(flow: Flow, node: Node) -> None:
    """Notes a stack with the logits of one head."""
    given = arguments(node, {"tensors": REQUIRED, "dim": 0})
    tensors, new = given["tensors"], given["dim"] % value(node).dim()
    unknown = NoMatch.at(node, "stacks other than the rows of logits")
    if not isinstance(tensors, tuple | list):
        raise unknown
    at = [i for i, tensor in enumerate(tensors) if tensor in flow.classes]
    like = flow.classes[tensors[at[0]]]
    dim = like.dim + (new <= like.dim)
    if (
        len({tensors[i] for i in at}) != 1
        or like.detached
        or _cuts_gradients(node, tensors[at[0]])
        or value(node).shape[dim] != value(tensors[at[0]]).shape[like.dim]
    ):
        raise unknown
    view = View(like.dim, dim, repeat_rows, (new, len(tensors)))
    found = viewed(flow, like, Step(node, view, dim))
    flow.stacks[node] = Stacked(node, found, new, tuple(at), len(tensors))


def taken_from_stack(flow: Flow, node: Node) -> None:
    """Notes what a node takes out of a stack: the head's logits, or a view of the stack.

    Raises:
        NoMatch: it may take the logits of several heads.
    """
    stack = flow.stacks.get(first_operand(node))
    if stack is None:
        raise NoMatch.at(node, "reads logits in another place")
    function = function_of(node)
    if _cuts_gradients(node, first_operand(node)):
        raise NoMatch.at(node, "cuts the gradients of a stack")
    if function in CASTS and value(node).is_floating_point():
        check_cast(node)
        flow.stacks[node] = stack
        return
    unknown = NoMatch(
        node, f"%{stack.node.name} (stack) may give %{node.name} the logits of several linears"
    )
    if function not in VIEWS:
        raise unknown
    step = view_step(node, stack.like)
    if not step.view.target:
        flow.stacks[node] = replace(stack, like=viewed(flow, stack.like, step))
        return
    picked, axis = _picked(step, stack.axis, unknown)
    if picked is None:
        flow.stacks[node] = replace(stack, like=viewed(flow, stack.like, step), axis=axis)
    elif picked % stack.count in stack.positions:
        flow.classes[node] = viewed(flow, stack.like, step)


def _cuts_gradients(node: Node, source: Node) -> bool:
    return is_cut(node) or (needs_gradient(source) and not needs_gradient(node))


def _picked(step: Step, axis: int, unknown: NoMatch) -> tuple[int | None, int]:
    """The effect of a view on dimension ``axis`` of its input: the index that it selects, and the
    dimension's position in its output."""
    if step.view.target is not operator.getitem:
        raise unknown
    before = after = 0
    for entry in step.view.args[0]:
        if before == axis and entry is not None:
            if type(entry) is int:
                return entry, 0
            if entry != slice(None):
                raise unknown
            return None, after
        if isinstance(entry, Node):
            raise unknown
        before += entry is not None
        after += entry is None or isinstance(entry, slice)
    return None, after
