"""One node between a linear and its loss: the producer of its logits, and its computation.

In: a node, and the position of the class dimension in its output. Out: a :class:`ChainNode`; for a
node that computes, also the expression of the logit after it, or its folds::

    %truediv = truediv(%view, 30)  ->  ChainNode(%truediv, "pointwise", before=%view)  z -> z/30
    %add = add(%linear, %b)        ->  ChainNode(%add, "tensor", before=%linear)       [Bias(%b, 1)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand, written
from fxpass.graph.functions import CASTS, function_of, out_of_place
from fxpass.graph.nodes import REQUIRED, NoMatch, is_number, is_tensor, value
from fxpass.graph.placements import is_dtensor, placement_name
from fxpass.graph.source import call_name
from fxpass.match.folds import Affine, Bias, Fold, Scale
from fxpass.match.losses import LOG_SOFTMAXES, log_softmax_dim
from fxpass.match.pointwise import POINTWISE
from fxpass.match.views import CLASSES, VIEWS, View, view_of
from fxpass.spec import expression

STACKS = {"stack"}


@dataclass(frozen=True)
class ChainNode:
    """One node of a chain, as it is read from the loss backward.

    Attributes:
        node: the call.
        kind: ``cast``, ``log_softmax``, ``placement``, ``view``, ``stack``, ``pointwise`` (of one
            logit and numbers) or ``tensor`` (with another tensor of the graph).
        before: the node that produces its logits.
        dim: position of the class dimension in ``before``.
        in_place: for ``pointwise`` and ``tensor``, whether the node writes to ``before``.
        view: for ``view``, how it rearranges rows.
        function: for ``pointwise`` and ``tensor``, its key in ``POINTWISE``.
        stacked: for ``stack``, position and size of the new dimension.
    """

    node: Node
    kind: str
    before: Node
    dim: int
    in_place: bool = False
    view: View | None = None
    function: str = ""
    stacked: tuple[int, int] = (0, 0)


def read_node(node: Node, dim: int, after: list[ChainNode]) -> ChainNode:
    """Reads ``node``.

    Args:
        node: a call whose output is the logits, or a function of them.
        dim: position of the class dimension in its output.
        after: the nodes between ``node`` and the loss, the last node first.

    Raises:
        NoMatch: the call is in no table, or has arguments that cannot be fused.
    """
    function = function_of(node)
    if function in STACKS:
        return _stacked(node, dim, after)
    if function in LOG_SOFTMAXES:
        if log_softmax_dim(node) != dim:
            raise NoMatch(node, f"%{node.name} (log_softmax) is over another dimension")
        return ChainNode(node, "log_softmax", first_operand(node), dim)
    if placement_name(node.target):
        return ChainNode(node, "placement", first_operand(node), dim)
    if function in CASTS:
        check_cast(node)
        return ChainNode(node, "cast", first_operand(node), dim)
    if function in VIEWS:
        view = view_of(node, dim)
        return ChainNode(node, "view", first_operand(node), view.dim, view=view)
    function, changed = out_of_place(function), written(node)
    if function not in POINTWISE:
        if changed:
            raise NoMatch(node, f"%{node.name} ({call_name(node)}) changes a tensor in place")
        raise NoMatch(
            node, f"%{node.name} ({call_name(node)}) between the linear and the loss is not known"
        )
    tensors = [n for n in node.all_input_nodes if is_tensor(n) or is_number(n)]
    before = tensors[0] if len(tensors) == 1 else _main_operand(node, function, tensors)
    if changed not in ([], [before]):
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) writes to another tensor")
    kind = "pointwise" if len(tensors) == 1 else "tensor"
    return ChainNode(node, kind, before, dim, in_place=bool(changed), function=function)


def _stacked(node: Node, dim: int, after: list[ChainNode]) -> ChainNode:
    """A stack of heads: ``before`` is the head whose slice the nodes ``after`` select."""
    given = arguments(node, {"tensors": REQUIRED, "dim": 0})
    tensors, new = given["tensors"], given["dim"] % value(node).dim()
    if not isinstance(tensors, tuple | list) or new == dim:
        raise NoMatch(node, f"%{node.name} (stack) stacks other than the rows of logits")
    at = new
    for reading in reversed(after):
        if reading.view is None or not reading.view.function:
            continue
        found = _picked(reading, at)
        if found is None:
            break
        picked, at = found
        if picked is not None:
            head = tensors[picked % len(tensors)]
            return ChainNode(node, "stack", head, dim - (new < dim), stacked=(new, len(tensors)))
    raise NoMatch(node, f"%{node.name} (stack) may give the loss the logits of several linears")


def _picked(reading: ChainNode, at: int) -> tuple[int | None, int] | None:
    """The effect of a view on dimension ``at`` of its input: the index that it selects, and the
    dimension's position in its output; None if they are unknown when the graph is traced."""
    assert reading.view is not None
    if reading.view.function != "getitem":
        return None
    before = after = 0
    for entry in reading.view.args[0]:
        if before == at and entry is not None:
            whole = entry == slice(None)
            return (entry, 0) if type(entry) is int else (None, after) if whole else None
        if isinstance(entry, Node):
            return None
        before += entry is not None
        after += entry is None or entry is CLASSES or isinstance(entry, slice)
    return None, after


def _main_operand(node: Node, function: str, tensors: list[Node]) -> Node:
    """The logits among several tensor operands."""
    if function not in _BINARY:
        raise NoMatch(node, _combines(node))
    shape = value(node).shape
    whole = [n for n in tensors if is_tensor(n) and value(n).shape == shape]
    computed = [n for n in whole if n.op in ("call_function", "call_method")]
    if not computed:
        raise NoMatch(node, _combines(node))
    return computed[0]


def check_cast(node: Node) -> None:
    old, new = value(first_operand(node)), value(node)
    if old.device != new.device:
        raise NoMatch(
            node,
            f"%{node.name} moves the logits from {old.device} to {new.device}; move the labels to "
            f"{old.device} instead, and the loss afterwards",
        )
    if new.dtype.itemsize < 2:
        raise NoMatch(node, f"%{node.name} rounds the logits to {new.dtype}")
    if new.dtype == torch.float64 and old.dtype != torch.float64:
        raise NoMatch(
            node, f"%{node.name} casts {old.dtype} logits to float64; the fused loss is f32"
        )


def check_plain(node: Node) -> None:
    """``NoMatch`` unless a node's value is a floating-point tensor, plain or a DTensor."""
    example = value(node)
    if not example.is_floating_point():
        raise NoMatch(node, f"%{node.name} is {example.dtype}, not floating point")
    if example.dtype.itemsize < 2:
        raise NoMatch(node, f"%{node.name} is {example.dtype}, which the fused loss does not take")
    if is_functorch_wrapped_tensor(example):
        raise NoMatch(node, f"%{node.name} is inside a torch.func transform (vmap, grad, ...)")
    plain = (torch._subclasses.FakeTensor, torch.nn.Parameter)
    if not (type(example) is torch.Tensor or isinstance(example, plain) or is_dtensor(example)):
        raise NoMatch(node, f"%{node.name} is a {type(example).__name__}, not a plain tensor")


# ---------------------------------------------------------------- in the order of the data


def apply_pointwise(reading: ChainNode, expr: Expr) -> Expr:
    """The expression of the logit after a ``pointwise`` node; ``expr`` is the logit before it.

    Raises:
        NoMatch: an argument is not a number, or its row in ``POINTWISE`` cannot express it.
    """
    node, row = reading.node, POINTWISE[reading.function]
    given = arguments(node, row.signature)
    try:
        operands = [_operand(node, argument, reading.before, expr) for argument in given.values()]
        return row.value(*operands)
    except ValueError as error:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}): {error}") from error


def _operand(node: Node, argument: Any, before: Node, expr: Expr) -> Any:
    if argument is before:
        return expr
    if isinstance(argument, Node | torch.SymInt | torch.SymFloat | torch.SymBool):
        raise NoMatch(
            node,
            f"%{node.name} ({call_name(node)}) has an operand that is not a number: {argument}",
        )
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return expression.exact(argument)
    return argument


def tensor_folds(reading: ChainNode) -> list[Fold]:
    """The folds of a ``tensor`` node: a bias or a factor per row.

    Raises:
        NoMatch: the node is neither.
    """
    node, operation = reading.node, reading.function
    left, right, *options = arguments(node, POINTWISE[reading.function].signature).values()
    plain = {"alpha": 1, "rounding_mode": None, "inplace": False, "out": None}
    names = list(POINTWISE[reading.function].signature)[2:]
    if any(option != plain[name] for name, option in zip(names, options, strict=True)):
        raise NoMatch(node, _combines(node))
    other = right if left is reading.before else left
    if not isinstance(other, Node) or left is right:
        raise NoMatch(node, _combines(node))
    from_end = value(node).dim() - reading.dim  # the class dimension, counted from the end
    shape = [] if is_number(other) else list(value(other).shape)
    v, dtype = value(node).shape[reading.dim], value(node).dtype
    classes = shape[-from_end] if len(shape) >= from_end else 1
    if operation in ("add", "sub"):
        rows = [s for i, s in enumerate(shape) if len(shape) - i != from_end]
        if classes != v or any(s != 1 for s in rows):
            raise NoMatch(node, _combines(node))
        if operation == "add":
            return [Bias(other, 1, dtype)]
        if other is right:
            return [Bias(other, -1, dtype)]
        return [Affine(sympy.Integer(-1), sympy.Integer(0)), Bias(other, 1, dtype)]
    if classes != 1 or (operation == "div" and other is left):
        raise NoMatch(node, _combines(node))
    return [Scale(other, operation == "div")]


_BINARY = ("add", "sub", "mul", "div")


def _combines(node: Node) -> str:
    """The reason for not fusing a node with another tensor."""
    names = ", ".join(f"%{n.name}" for n in node.all_input_nodes)
    return (
        f"%{node.name} ({call_name(node)}) combines the logits with another tensor ({names}); "
        "what can be fused are functions of one logit and of numbers, a bias [V], and a factor "
        "per row"
    )
