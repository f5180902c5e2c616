"""Functions of logits whose value is a tuple of tensors: parts of the rows, and broadcast tensors.

In: such a node, then the nodes that take tensors out of it. Out: their
:class:`fxpass.match.classes.Classes`. Others that are broadcast to logits read their shape alone::

    %parts = split(%z, 128);  %part = getitem(%parts, 0)            ->    rows 0 to 128 of %z
    %pair = broadcast_tensors(%i, %z);  %z1 = getitem(%pair, 1)     ->    %z
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import NoMatch, is_tensor, value
from fxpass.match.classes import Classes, Flow
from fxpass.match.edits import Step
from fxpass.match.operands import operand_of, viewed
from fxpass.match.views import CLASSES, View

# Functions whose result is a tuple of parts of the rows, and all whose result is a tuple.
PARTS = ("split", "split_with_sizes", "chunk", "unbind")
TUPLES = (*PARTS, "broadcast_tensors")


def tuple_of(flow: Flow, node: Node, off: bool) -> None:
    """Notes a tuple; ``off`` says that gradients are switched off."""
    if function_of(node) in PARTS:
        operand, like = first_operand(node), operand_of(flow, node)
    else:
        operand = next(n for n in _broadcast(node) if n in flow.classes)
        like = flow.classes[operand]
        if any(shape != value(operand).shape for shape in _shapes(node)):
            raise NoMatch.at(node, "repeats the logits")
    cut = off and value(operand).requires_grad
    flow.pairs[node] = replace(like, detached=like.detached or cut)


def member_of(flow: Flow, node: Node) -> None:
    """Notes a tensor that a node takes out of a tuple."""
    found, at = node.args[0], node.args[1] if len(node.args) == 2 else None
    if function_of(node) != "getitem" or not isinstance(found, Node) or not isinstance(at, int):
        raise NoMatch.at(node, "reads a tuple of logits")
    if function_of(found) in PARTS:
        flow.classes[node] = _part_of(flow, node, found, at)
        return
    operand = _broadcast(found)[at]
    if operand in flow.classes:
        like = flow.classes[operand]
        flow.classes[node] = replace(like, detached=like.detached or flow.pairs[found].detached)


def _broadcast(node: Node) -> list[Node]:
    given = node.args[0] if len(node.args) == 1 else node.args
    operands = list(given) if isinstance(given, tuple | list) else []
    if node.kwargs or not operands or not all(map(is_tensor, operands)):
        raise NoMatch.at(node, "is called in an unknown form")
    return operands  # type: ignore[return-value]


def _shapes(node: Node) -> list[Any]:
    return [tensor.shape for tensor in node.meta["example_value"]]


def _part_of(flow: Flow, node: Node, parts: Node, at: int) -> Classes:
    """A part of the rows: ``split(z, 4)[1]`` is ``z[4:8]``."""
    like, shapes = flow.pairs[parts], _shapes(parts)
    index: list[Any] = [CLASSES] * value(first_operand(parts)).dim()
    sizes = ("input", "tensor", "split_size", "split_size_or_sections", "split_sizes", "chunks")
    axis = arguments(parts, {"dim": 0, **dict.fromkeys(sizes)})["dim"]
    axis %= len(index)
    if axis == like.dim:
        raise NoMatch.at(node, "is a part of the classes")
    at %= len(shapes)
    alone = function_of(parts) == "unbind"
    if alone:
        index[axis] = at
    elif len(shapes) == 1:
        return like
    else:
        before = [shape[axis] for shape in shapes[: at + 1]]
        last = at == len(shapes) - 1  # its length may vary
        if not all(isinstance(length, int) for length in before[: at if last else None]):
            raise NoMatch.at(node, "has a size that varies")
        index[axis] = slice(sum(before[:at]), None if last else sum(before))
    after = like.dim - (alone and axis < like.dim)
    view = View(like.dim, after, operator.getitem, (tuple(index),))
    return viewed(flow, like, Step(node, view, after))
