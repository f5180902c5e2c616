"""Functions from tensors with classes to tensors with classes: views, softmax, arithmetic.

In: a node that reads logits. Out: its :class:`fxpass.lower.records.Classes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from fxpass.formula.dtypes import held, short
from fxpass.formula.functions import exact
from fxpass.lower.bases import in_logs, softmax_base_of
from fxpass.lower.pointwise import ALGEBRA, MASKS, OF_ROWS, POINTWISE, check_size
from fxpass.lower.reading import (
    Reading,
    alike,
    arguments,
    class_dim,
    example_of,
    name_of,
    operand_of,
    reads_sizes,
    same,
    sizes_of,
)
from fxpass.lower.records import (
    Classes,
    ClassOperand,
    GivenOperand,
    RowOperand,
    Unknown,
    of_operands_alone,
    symbols_of,
)
from fxpass.lower.sums import summed


def _same(found: Reading, node: Node) -> Classes:
    """The same elements, in a dtype that is floating point."""
    source, *_ = node.all_input_nodes
    example = node.meta["val"]
    before = source.meta["val"]
    wide = ([s for s in sizes_of(n) if not same(s, 1)] for n in (source, node))
    if not alike(*wide):
        raise Unknown("rearranges logits")
    rounds = not example.is_floating_point() or example.dtype.itemsize < 2
    if before.dtype != torch.bool and rounds:
        raise Unknown(f"rounds logits to {short(example.dtype)}")
    if (example.dtype == torch.float64) != (before.dtype == torch.float64):
        raise Unknown("casts to or from float64")
    return found.classes[source]


def _softmax(found: Reading, node: Node) -> Classes:
    like = operand_of(found, node, node.args[1])
    _same(found, node)
    base = softmax_base_of(found.tables, like)
    return Classes(base.log if "log" in name_of(node) else sympy.exp(base.log))


VIEWS: dict[str, Callable[[Reading, Node], Classes]] = {
    **dict.fromkeys(("_log_softmax", "_softmax"), _softmax),
    **dict.fromkeys(("_to_copy", "detach", "alias", "clone", "view", "_unsafe_view"), _same),
    **dict.fromkeys(("unsqueeze", "squeeze", "expand", "lift_fresh_copy", "reshape"), _same),
    **dict.fromkeys(("permute", "transpose"), _same),
}


def pointwise(found: Reading, node: Node) -> Classes:
    """A function of the elements of tensors with classes."""
    name = name_of(node)
    if "getitem" in (name, node.target.__name__):  # type: ignore[union-attr]
        name = "positive"
    spellings = [t[name] for t in (ALGEBRA, POINTWISE, MASKS) if name in t]
    if not spellings:
        raise Unknown(f"{name or node.target} of logits is not known")
    given = {"x": node.args[0]} if name == "positive" else arguments(node)
    tensors = [t for t in given.values() if isinstance(t, Node) and t in found.classes]
    example = example_of(node)
    whole = example_of(tensors[0])
    if not alike(example.shape, whole.shape):
        raise Unknown("repeats the logits")
    if example.dtype == torch.float64 != whole.dtype:
        raise Unknown("promotes the logits to float64")
    dim = class_dim(tensors[0])
    operands = [expr_of(found, a, dim, whole) for a in given.values()]
    _check_numbers(name, example.dtype, operands)
    _check_integers(found, node, name, example.dtype, operands)
    exprs = [o for o in operands if isinstance(o, sympy.Expr)]
    rows = name not in OF_ROWS
    if name != "exp" and all(_of_logits(o, rows) for o in exprs):
        spellings = spellings[-1:]
    if name == "exp":
        operands[0] = in_logs(found.tables, operands[0])
    return Classes(_evaluated(name, spellings, operands))


def _evaluated(name: str, spellings: list[Any], operands: list[Any]) -> Any:
    """The expression of a function, by the first spelling that has one."""
    reason = "is not known"
    for spelling in spellings:
        parameters = [k for k in spelling.signature if k not in ("inplace", "out")]
        values = list(operands)
        if len(values) < len(parameters):  # an overload without the last ones
            values += [spelling.signature[k] for k in parameters[len(values) :]]
        values += [False, None] if "inplace" in spelling.signature else [None]
        try:
            check_size(operands)
            return spelling.value(*values)
        except (ValueError, TypeError) as error:
            reason = f"{error}"
            continue
    raise Unknown(f"{name}: {reason}")


def _of_logits(expr: Any, rows: bool) -> bool:
    alone = of_operands_alone(expr)
    return alone and (rows or not any(isinstance(s, RowOperand) for s in symbols_of(expr)))


def _check_numbers(name: str, dtype: torch.dtype, operands: list[Any]) -> None:
    """``Unknown`` for an infinite number in a function but ``where``, whose branch it may be; and
    there for one beyond the dtype's range, which eager refuses, or makes infinite."""
    infinite = [i for i, o in enumerate(operands) if o is sympy.S.NegativeInfinity]
    masks = name in ("masked_fill", "where")
    if (infinite and not masks) or infinite == [0]:
        raise Unknown("has an infinite operand")
    if masks and dtype.is_floating_point:
        numbers = [abs(o) for o in operands if isinstance(o, sympy.Rational)]
        if any(number > exact(torch.finfo(dtype).max) for number in numbers):
            raise Unknown(f"has a number beyond the range of {short(dtype)}")


def _check_integers(
    found: Reading, node: Node, name: str, dtype: torch.dtype, operands: list[Any]
) -> None:
    """``Unknown`` for arithmetic of integers, which may wrap, and of booleans, whose sum is a
    logical or: masks are compared and chosen, and sums count them."""
    if dtype.is_floating_point or name in ("gt", "ge", "lt", "le"):
        return
    read = [n for n in node.all_input_nodes if n.meta["val"].dtype != torch.bool]
    if name in MASKS:
        read = [n for n in read if n not in found.classes]
        masks = not read and all(o in (0, 1) for o in operands if isinstance(o, sympy.Rational))
    else:
        masks = not read and name == "mul" and dtype == torch.bool
    if not masks:
        raise Unknown(f"computes with {short(dtype)} numbers")


def expr_of(found: Reading, argument: Any, dim: int, whole: torch.Tensor) -> Any:
    """An argument of a function whose result has the shape of ``whole``, as an expression."""
    tables = found.tables
    if isinstance(argument, bool) or argument is None or isinstance(argument, str):
        return argument
    if isinstance(argument, int | float):
        if argument == -math.inf:
            return sympy.S.NegativeInfinity
        if not math.isfinite(argument):
            raise Unknown(f"needs finite constants, got {argument}")
        return exact(argument)
    if not isinstance(argument, Node) or not isinstance(argument.meta["val"], torch.Tensor):
        raise Unknown("has a number that varies")
    if argument in found.classes:
        return found.classes[argument].expr
    shape = sizes_of(argument)
    sizes = list(whole.shape)
    if (number := _number(argument)) is not None:
        return number
    aligned = [1] * (len(sizes) - len(shape)) + shape
    of_row = all(same(s, 1 if i == dim else sizes[i]) for i, s in enumerate(aligned))
    if argument in found.rows:
        known = found.rows[argument]
        if not of_row or known.index:
            raise Unknown("has rows of another shape")
        return known.expr
    if name_of(argument) == "expand" and argument not in found.late:
        return expr_of(found, argument.args[0], dim, whole)
    if argument.meta["val"].is_complex():
        raise Unknown("has a complex operand")
    if of_row or all(same(s, 1) for s in shape):
        total = _total(found, argument, dim, whole)
        return tables.node(argument, RowOperand) if total is None else total
    if argument in found.late:
        raise Unknown("reads what is computed of rows")
    if all(same(s, 1) for i, s in enumerate(aligned) if i != dim):
        return tables.node(argument, ClassOperand)
    if all(map(same, aligned, sizes)):
        sign, source = _given(argument)
        if source is not None:
            return sign * tables.node(source, GivenOperand)
        if argument.op != "placeholder":
            return _made(found, argument, dim, whole)
    raise Unknown(f"has an operand of shape {shape}, which is made of others")


def _total(found: Reading, node: Node, dim: int, whole: torch.Tensor) -> Any:
    """The sum over the classes of what operands make; None for other rows."""
    source: Any = node.args[0] if node.args else None
    if name_of(node) != "sum" or not alike(sizes_of(source), whole.shape):
        return None
    dims = [d % len(whole.shape) for d in arguments(node)["dim"] or ()]
    if dims != [dim]:
        return None
    try:
        return summed(found.tables, Classes(expr_of(found, source, dim, whole)), whole.shape[dim])
    except Unknown:
        return None


def _made(found: Reading, node: Node, dim: int, whole: torch.Tensor) -> Any:
    """An operand as large as the logits, which is computed of smaller ones."""
    name = name_of(node)
    if name in VIEWS:
        source: Any = node.args[0]
        wide = ([s for s in sizes_of(n) if not same(s, 1)] for n in (source, node))
        if name in ("_softmax", "_log_softmax") or not alike(*wide):
            raise Unknown(f"has an operand that {name} makes")
        if name == "_to_copy" and not _keeps(source, node):
            raise Unknown("has an operand that a cast changes")
        return expr_of(found, source, class_dim(source), source.meta["val"])
    spellings = [t[name] for t in (POINTWISE, MASKS) if name in t]
    if not spellings:
        raise Unknown(f"has an operand that {name} makes")
    operands = [expr_of(found, a, dim, whole) for a in arguments(node).values()]
    return _evaluated(name, spellings, operands)


def _number(node: Node) -> Any:
    """The number that a tensor of one number is made of."""
    casts: list[torch.dtype] = []
    while name_of(node) in (*_SAME_VALUES, "select", "slice"):
        casts += [node.meta["val"].dtype] * (name_of(node) == "_to_copy")
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    if name_of(node) in ("scalar_tensor", "full"):
        number: Any = node.args[0 if name_of(node) == "scalar_tensor" else 1]
        made = node.meta["val"].dtype
        for dtype in (made, *reversed(casts)) if casts or not made.is_floating_point else ():
            number = held(number, dtype)
        if number == -math.inf:
            return sympy.S.NegativeInfinity
        if isinstance(number, int | float) and math.isfinite(number):
            return exact(number)
    return None


_SAME_VALUES = ("view", "unsqueeze", "squeeze", "detach", "alias", "clone", "expand", "_to_copy")
_SAME_VALUES += ("reshape", "_unsafe_view")


def _keeps(source: Node, node: Node) -> bool:
    """Whether a cast keeps numbers, or rounds them: not from 2.7 to 2, nor to True."""
    old = source.meta["val"].dtype
    new = node.meta["val"].dtype
    return new.is_floating_point or new == old or old == torch.bool


def _given(node: Node) -> tuple[int, Node | None]:
    """The sign and the tensor of an operand as large as logits, if it is an input, in a dtype that
    is not smaller, and not made of smaller tensors."""
    sign = 1
    while node.op != "placeholder":
        source, *more = [n for n in node.all_input_nodes if not reads_sizes(n)] or [node]
        name = name_of(node)
        old = source.meta["val"]
        new = node.meta["val"]
        floats = old.is_floating_point() and new.is_floating_point()
        wider = name == "_to_copy" and floats and old.itemsize <= new.itemsize
        if more or source is node or not (name in _SAME_VALUES or (name == "neg" and floats)):
            return sign, None
        if name == "_to_copy" and not wider:
            return sign, None
        sign = -sign if name == "neg" else sign
        node = source
    shape = [size for size in sizes_of(node) if not same(size, 1)]
    return (sign, node) if len(shape) == 2 else (sign, None)
