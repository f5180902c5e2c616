"""Functions from tensors with classes to tensors with classes: views, casts, softmax, arithmetic.

In: a node that reads logits. Out: its :class:`fxpass.match.classes.Classes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from sympy import Expr
from torch import Tensor
from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand, storage, written
from fxpass.graph.functions import CASTS
from fxpass.graph.nodes import REQUIRED, NoMatch, is_number, is_tensor, value
from fxpass.graph.placements import TO_LOCAL, placement_name
from fxpass.lower.pointwise import ALGEBRA, MASKS, OF_ROWS, POINTWISE, check_size
from fxpass.match.bases import in_logs, softmax_base_of
from fxpass.match.classes import Classes, Flow, of_classes_alone
from fxpass.match.edits import Step, symbols_of
from fxpass.match.operands import (
    check_cast,
    check_dim,
    check_dtype,
    operand_of,
    picks_rows_and_classes,
    viewed,
    with_bias,
)
from fxpass.match.views import VIEWS, View, view_of
from fxpass.spec.dtypes import short
from fxpass.spec.functions import exact


def classes_of(flow: Flow, node: Node, function: str) -> Classes:
    """What a node computes element by element, or a view of it."""
    if function in VIEWS and not picks_rows_and_classes(node):
        like = operand_of(flow, node)
        return viewed(flow, like, view_step(node, like))
    if placement_name(node.target):
        like = operand_of(flow, node)
        return _placed(node, like)
    if function in CASTS:
        like = operand_of(flow, node)
        if value(first_operand(node)).dtype == torch.bool:
            return like  # 1 and 0 in every dtype
        if not value(node).is_floating_point():
            raise NoMatch.at(node, "rounds the logits")
        check_cast(node)
        return like
    if function in ("detach", "alias"):
        like = operand_of(flow, node)
        return replace(like, detached=like.detached or function == "detach")
    if function in ("log_softmax", "_log_softmax", "softmax", "_softmax"):
        like = operand_of(flow, node)
        given = arguments(node, _SOFTMAX)
        check_dim(node, like, given["dim"])
        check_dtype(node, given)
        base = softmax_base_of(flow, node, like)
        return replace(like, expr=base.log if "log" in function else sympy.exp(base.log))
    return pointwise(flow, node, function)


def _placed(node: Node, like: Classes) -> Classes:
    """The same values, placed in another way; from ``to_local`` on, views are of local tensors."""
    if placement_name(node.target) not in TO_LOCAL:
        return like
    step = Step(node, View(like.dim, like.dim, "to_local"), like.dim)
    return replace(like, steps=(*like.steps, step))


_SOFTMAX = {
    **{"input": REQUIRED, "dim": REQUIRED, "dtype": None},
    **{"_stacklevel": 3, "half_to_float": False},
}


def view_step(node: Node, like: Classes) -> Step:
    """The view of a tensor with classes."""
    view = view_of(node, like.dim)
    return Step(node, view, view.after)


def note_write(flow: Flow, node: Node, found: Classes) -> None:
    """Notes what an in-place function writes to a tensor with classes.

    Raises:
        NoMatch: an alias of the tensor is read later.
    """
    operand, memory = first_operand(node), storage(first_operand(node))
    for alias in (*flow.classes, *flow.pairs):
        shared = alias is not operand and (not is_tensor(alias) or storage(alias) in (memory, None))
        if shared and any(user > node for user in alias.users):
            raise NoMatch.at(node, f"writes to %{alias.name}")
    if written(node) != [operand]:
        raise NoMatch.at(node, "writes to another tensor")
    flow.classes[operand] = found


# Tensors of the logits' shape in one expression: hidden layers add many on their way.
MOST_GIVEN = 4


def pointwise(flow: Flow, node: Node, function: str) -> Classes:
    """A function of the elements of tensors with classes."""
    spellings = [t[function] for t in (ALGEBRA, POINTWISE, MASKS) if function in t]
    if not spellings:
        raise NoMatch.at(node, "of the logits is not known")
    given = arguments(node, spellings[0].signature)
    tensors = [t for t in given.values() if isinstance(t, Node) and t in flow.classes]
    like = flow.classes[tensors[0]]
    if any(flow.classes[t].place != like.place for t in tensors):
        raise NoMatch.at(node, "joins logits of other rows")
    if value(node).shape != value(tensors[0]).shape:
        raise NoMatch.at(node, "repeats the logits")
    if value(node).dtype == torch.float64 != flow.dtype:
        raise NoMatch.at(node, "promotes the logits to float64")
    floats = [t for t in tensors if value(t).is_floating_point()]  # and no conditions
    detached = any(flow.classes[t].detached for t in floats)
    check_gradients(flow, node, floats)
    operands = [expr_of(flow, node, like, argument, value(node)) for argument in given.values()]
    _check_numbers(node, function, operands)
    _check_integers(flow, node, function, operands)
    joined = {s for o in operands if isinstance(o, Expr) for s in symbols_of(o) if s in flow.dims}
    if len(joined) > MOST_GIVEN:
        raise NoMatch.at(node, f"joins logits and {len(joined)} tensors")
    rows = function not in OF_ROWS
    exprs = [o for o in operands if isinstance(o, Expr)]
    of_logits = all(of_classes_alone(o, rows=rows) for o in exprs)
    if of_logits and function != "exp":
        spellings = spellings[-1:]
    if function == "exp":
        operands[0] = in_logs(flow, node, like, operands[0])
    reason = "is not known"
    for spelling in spellings:
        try:
            check_size(operands)
            found = replace(like, expr=spelling.value(*operands), detached=detached)
        except (ValueError, TypeError) as error:  # a boolean of Python is no number
            reason = f"{error}"
            continue
        _check_cancelled(flow, node, exprs, found.expr)
        return with_bias(found)
    raise NoMatch.at(node, f"is not read: {reason}")


def check_gradients(flow: Flow, node: Node, tensors: Sequence[Node]) -> None:
    """``NoMatch`` if gradients flow through some of the tensors with classes that a node reads."""
    differ = len({flow.classes[t].detached for t in tensors}) == 2
    if differ and value(node).requires_grad:
        raise NoMatch.at(node, "joins logits and detached logits")


def _check_cancelled(flow: Flow, node: Node, operands: Sequence[Expr], found: Expr) -> None:
    """``NoMatch`` if a tensor is no part of the result, as s of (s * z) / s: its gradient would be
    None where eager has zeros, and where s is 0 eager has nan."""
    left = (found, *(base.logit for base in flow.bases))
    lost = set().union(*map(symbols_of, operands)).difference(*map(symbols_of, left))
    if names := sorted(f"%{flow.tensors[s].name}" for s in lost & flow.tensors.keys()):
        raise NoMatch.at(node, f"cancels {', '.join(names)}")


def _check_numbers(node: Node, function: str, operands: Sequence[Any]) -> None:
    """``NoMatch`` for an infinite number in a function but ``where``, whose branch it may be; and
    there for one beyond the dtype's range, which eager refuses, or makes infinite."""
    infinite = [i for i, o in enumerate(operands) if o is sympy.S.NegativeInfinity]
    masks = function in ("masked_fill", "where")
    if (infinite and not masks) or (infinite == [0]):
        raise NoMatch.at(node, "has an infinite operand")
    if masks and value(node).is_floating_point():
        numbers = [abs(o) for o in operands if isinstance(o, sympy.Rational)]
        if any(number > exact(torch.finfo(value(node).dtype).max) for number in numbers):
            what = f"a number beyond the range of {short(value(node).dtype)}"
            raise NoMatch.at(node, f"has {what}")


def _check_integers(flow: Flow, node: Node, function: str, operands: Sequence[Any]) -> None:
    """``NoMatch`` for arithmetic of integers, which may wrap, and of booleans, whose sum is a
    logical or: masks are compared and chosen, and sums count them."""
    if value(node).is_floating_point() or function in ("gt", "ge", "lt", "le"):
        return
    read = [n for n in node.all_input_nodes if is_tensor(n) and value(n).dtype != torch.bool]
    if function in MASKS:
        read = [n for n in read if n not in flow.classes]
        masks = not read and all(o in (0, 1) for o in operands if isinstance(o, sympy.Rational))
    else:
        masks = not read and function == "mul" and value(node).dtype == torch.bool
    if not masks:
        what = f"computes with {short(value(node).dtype)} numbers"
        raise NoMatch.at(node, f"{what}")


def expr_of(flow: Flow, node: Node, like: Classes, argument: Any, whole: Tensor) -> Any:
    """An argument of a pointwise function, whose result has the shape of ``whole``, as an
    expression."""
    if isinstance(argument, bool) or argument is None or isinstance(argument, str):
        return argument
    if isinstance(argument, int | float):
        if argument == -math.inf:
            return sympy.S.NegativeInfinity
        if not math.isfinite(argument):
            raise NoMatch.at(node, f"needs finite constants, got {argument}")
        return exact(argument)
    if isinstance(argument, Node) and is_number(argument):
        return flow.tensor(argument, "row")
    if not isinstance(argument, Node) or not is_tensor(argument):
        raise NoMatch.at(node, "has a number that varies")
    if argument in flow.classes:
        if flow.classes[argument].place != like.place:
            raise NoMatch.at(node, "joins logits of other rows")
        return flow.classes[argument].expr
    known = flow.row(argument, node)
    if known is not None and is_row(value(argument), like, whole):
        return known
    tensor = value(argument)
    if tensor.is_complex():
        raise NoMatch.at(node, f"has an operand of {tensor.dtype}")
    if tensor.numel() == 1 or is_row(tensor, like, whole):
        return flow.tensor(argument, "row")
    after = whole.dim() - like.dim
    of_classes = list(tensor.shape[-after : -after + 1 or None]) == [whole.shape[like.dim]]
    if of_classes and tensor.numel() == whole.shape[like.dim] and tensor.dim() <= whole.dim():
        return flow.tensor(argument, "class")
    if tensor.shape == whole.shape:
        return flow.given(argument, like.dim)
    if tensor.dim() <= whole.dim() and _repeats_rows(tensor, like, whole):
        return flow.repeated_row(argument, like)
    raise NoMatch.at(node, f"has an operand of shape {list(tensor.shape)}")


def is_row(tensor: Tensor, like: Classes, whole: Tensor) -> bool:
    """Whether a tensor has one value for each row, where the classes are."""
    return tensor.dim() == whole.dim() and list(tensor.shape) == [
        1 if i == like.dim else size for i, size in enumerate(whole.shape)
    ]


def _repeats_rows(tensor: torch.Tensor, like: Classes, whole: torch.Tensor) -> bool:
    """Whether a tensor has one value for several rows, where the classes are: ``[B, 1, 1]``."""
    shape = (*[1] * (whole.dim() - tensor.dim()), *tensor.shape)
    rows = [
        (s, w) for i, (s, w) in enumerate(zip(shape, whole.shape, strict=True)) if i != like.dim
    ]
    numbers = all(isinstance(s, int) and isinstance(w, int) for s, w in rows if s != 1)
    return shape[like.dim] == 1 and numbers and all(s in (1, w) for s, w in rows)
