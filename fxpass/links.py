"""One node between a linear and its loss: which node its logits come from, what it makes of them.

In: a node, and where its output has the classes. Out: a :class:`Link` to the node before it; and in
the order of the data, for the kinds that compute, the expression of the logit after it or the steps
that it becomes::

    %truediv = truediv(%view, 30)   ->   Link(%truediv, "pointwise", before=%view)   z -> z/30
    %add = add(%linear, %b)         ->   Link(%add, "tensor", before=%linear)        [Bias(%b, 1)]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy import Expr
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node

from fxpass import expression
from fxpass.losses import LOG_SOFTMAXES, log_softmax_dim
from fxpass.movements import MOVEMENTS, Moved, moved, moved_operand
from fxpass.placements import is_dtensor, placement_name
from fxpass.pointwise import IN_PLACE, POINTWISE
from fxpass.rules import CASTS, REQUIRED, NoMatch, Target, arguments, is_tensor, value, writes
from fxpass.source import call_name
from fxpass.steps import Affine, Bias, Scale, Step

STACKS: set[Target] = {torch.stack}


@dataclass(frozen=True)
class Link:
    """One node of the way, as the walk from the loss meets it.

    Attributes:
        node: the call.
        kind: ``cast``, ``log_softmax``, ``placement``, ``move``, ``stack``, ``pointwise`` (of one
            logit and numbers) or ``tensor`` (with another tensor of the graph).
        before: the node that it takes the logits from.
        dim: position of the class dimension in ``before``.
        in_place: whether it writes to ``before``; of the kinds that compute.
        moved: how it moves rows, for ``move``.
        function: its key in ``POINTWISE``, out of place; of the kinds that compute.
        stacked: position of the new dimension, for ``stack``.
    """

    node: Node
    kind: str
    before: Node
    dim: int
    in_place: bool = False
    moved: Moved | None = None
    function: Target = None
    stacked: int = 0


def link_of(node: Node, dim: int, after: list[Link]) -> Link:
    """The link that ``node`` is.

    Args:
        node: a call whose output is the logits, or a function of them.
        dim: position of the class dimension in its output.
        after: the links between it and the loss, the latest first.

    Raises:
        NoMatch: no table knows the call, or not in this form.
    """
    if node.target in STACKS:
        return _stacked(node, dim, after)
    if node.target in LOG_SOFTMAXES:
        if log_softmax_dim(node) != dim:
            raise NoMatch(node, f"%{node.name} (log_softmax) is over another dimension")
        return Link(node, "log_softmax", _first(node), dim)
    if placement_name(node.target):
        return Link(node, "placement", _first(node), dim)
    if node.target in CASTS:
        _check_cast(node)
        return Link(node, "cast", _first(node), dim)
    if node.target in MOVEMENTS:
        step = moved(node, dim)
        return Link(node, "move", moved_operand(node), step.dim, moved=step)
    in_place = node.target in IN_PLACE or bool(node.kwargs.get("inplace"))
    function = IN_PLACE.get(node.target, node.target)
    if function not in POINTWISE:
        if writes(node):
            raise NoMatch(node, f"%{node.name} ({call_name(node)}) changes a tensor in place")
        raise NoMatch(
            node, f"%{node.name} ({call_name(node)}) between the linear and the loss is not known"
        )
    tensors = [n for n in node.all_input_nodes if is_tensor(n)]
    before = tensors[0] if len(tensors) == 1 else _main_operand(node, function, tensors)
    kind = "pointwise" if len(tensors) == 1 else "tensor"
    return Link(node, kind, before, dim, in_place=in_place, function=function)


def _stacked(node: Node, dim: int, after: list[Link]) -> Link:
    """A stack of which what comes after it, latest first, takes the logits of one linear."""
    given = arguments(node, {"tensors": REQUIRED, "dim": 0})
    tensors, new = given["tensors"], given["dim"] % value(node).dim()
    if not isinstance(tensors, tuple | list) or new == dim:
        raise NoMatch(node, f"%{node.name} (stack) stacks other than the rows of logits")
    # follow the number of each tensor through what comes after
    shape = [_hint(size) for size in value(node).shape]
    shape[dim] = 1
    numbers = torch.arange(len(tensors)).view(-1, *[1] * (len(shape) - 1)).movedim(0, new)
    numbers = numbers.expand(shape)
    for link in reversed(after):
        if link.moved is not None and link.moved.replay is not None:
            op, target, args = link.moved.replay(1)
            args = torch.fx.map_arg(args, lambda n: _hint(n.meta["example_value"]))
            function = getattr(torch.Tensor, target) if op == "call_method" else target
            numbers = function(numbers, *args)
    chosen = numbers.unique().tolist()
    if len(chosen) != 1:
        raise NoMatch(node, f"%{node.name} (stack) gives the loss the logits of several linears")
    return Link(node, "stack", tensors[chosen[0]], dim - (new < dim), stacked=new)


def _hint(size: Any) -> Any:
    """A size as a number: what it was when the graph was traced, where it may vary."""
    return size if isinstance(size, int) else int(size.node.hint)


def _first(node: Node) -> Node:
    before = node.args[0] if node.args else node.kwargs.get("input")
    if not is_tensor(before):
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) is not of a tensor of the graph")
    assert isinstance(before, Node)
    return before


def _main_operand(node: Node, function: Target, tensors: list[Node]) -> Node:
    """The logits among several tensor operands."""
    if _operation(function) is None or node.kwargs or len(node.args) != 2:
        raise NoMatch(node, _combines(node))
    shape = value(node).shape
    whole = [n for n in tensors if value(n).shape == shape]
    computed = [n for n in whole if n.op in ("call_function", "call_method")]
    if not computed:
        raise NoMatch(node, _combines(node))
    return computed[0]


def _check_cast(node: Node) -> None:
    old, new = value(_first(node)), value(node)
    if old.device != new.device:
        raise NoMatch(
            node,
            f"%{node.name} moves the logits from {old.device} to {new.device}; move the labels to "
            f"{old.device} instead, and the loss afterwards",
        )
    if new.dtype == torch.float64 and old.dtype != torch.float64:
        raise NoMatch(
            node, f"%{node.name} casts {old.dtype} logits to float64; the fused loss is f32"
        )


def check_plain(node: Node) -> None:
    """``NoMatch`` if a node's value is no floating-point tensor, plain or sharded."""
    example = value(node)
    if not example.is_floating_point():
        raise NoMatch(node, f"%{node.name} is {example.dtype}, not floating point")
    if is_functorch_wrapped_tensor(example):
        raise NoMatch(node, f"%{node.name} is inside a torch.func transform (vmap, grad, ...)")
    plain = (torch._subclasses.FakeTensor, torch.nn.Parameter)
    if not (type(example) is torch.Tensor or isinstance(example, plain) or is_dtensor(example)):
        raise NoMatch(node, f"%{node.name} is a {type(example).__name__}, not a plain tensor")


# ---------------------------------------------------------------- in the order of the data


def apply_pointwise(link: Link, expr: Expr) -> Expr:
    """The expression after a ``pointwise`` link, of the one before it.

    Raises:
        NoMatch: an argument that is no number, or that its row in ``POINTWISE`` does not know.
    """
    node, row = link.node, POINTWISE[link.function]
    given: dict[str, Any] = dict(zip(row.signature, node.args, strict=False))
    if len(node.args) > len(row.signature):
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) has arguments that are not known")
    for name, argument in node.kwargs.items():
        if name == "inplace":
            continue
        if name not in row.signature:
            raise NoMatch(node, f"%{node.name} ({call_name(node)}) has {name}=, which is not known")
        given[name] = argument
    try:
        operands = [
            _operand(node, given.get(name, default), link.before, expr)
            for name, default in row.signature.items()
        ]
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


def tensor_steps(link: Link) -> list[Step]:
    """What a ``tensor`` link is: a bias or a factor per row.

    Raises:
        NoMatch: it is neither.
    """
    node, operation = link.node, _operation(link.function)
    left, right = node.args
    other = right if left is link.before else left
    if not isinstance(other, Node) or left is right:
        raise NoMatch(node, _combines(node))
    from_end = value(node).dim() - link.dim  # the class dimension, counted from the end
    shape = list(value(other).shape)
    v = value(node).shape[link.dim]
    classes = shape[-from_end] if len(shape) >= from_end else 1
    if operation in ("add", "sub"):
        rows = [s for i, s in enumerate(shape) if len(shape) - i != from_end]
        if classes != v or any(s != 1 for s in rows):
            raise NoMatch(node, _combines(node))
        if operation == "add":
            return [Bias(other, 1)]
        if other is right:
            return [Bias(other, -1)]
        return [Affine(sympy.Integer(-1), sympy.Integer(0)), Bias(other, 1)]
    if classes != 1 or (operation == "div" and other is left):
        raise NoMatch(node, _combines(node))
    return [Scale(other, operation == "div")]


def _operation(function: Target) -> str | None:
    """``add``, ``sub``, ``mul`` or ``div``, however it is spelled; None for anything else."""
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    return {"truediv": "div", "true_divide": "div"}.get(name, name) if name in _BINARY else None


_BINARY = ("add", "sub", "mul", "div", "truediv", "true_divide")


def _combines(node: Node) -> str:
    """The reason why a node with another tensor is not fused."""
    names = ", ".join(f"%{n.name}" for n in node.all_input_nodes)
    return (
        f"%{node.name} ({call_name(node)}) combines the logits with another tensor ({names}); "
        "what can be fused are functions of one logit and of numbers, a bias [V], and a factor "
        "per row"
    )
