"""Functions from tensors with classes to tensors with classes: views, softmax, arithmetic.

In: a node that reads logits. Out: its expression of a class's element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from sympy import Expr
from torch.fx import Node

from fxpass.formula.dtypes import cast_number, dtype_name
from fxpass.formula.functions import exact
from fxpass.lower.bases import in_logs, softmax_base_of
from fxpass.lower.pointwise import ALGEBRA, MASKS, OF_ROWS, POINTWISE, check_size
from fxpass.lower.reading import (
    SAME_ELEMENTS,
    Reading,
    arguments,
    aten_name,
    class_dim,
    equal_shapes,
    equal_sizes,
    example_of,
    operand_of,
    reads_sizes,
    sizes_beyond_one,
    sizes_of,
)
from fxpass.lower.records import (
    ClassOperand,
    GivenOperand,
    RowOperand,
    Unknown,
    of_operands_alone,
    symbols_of,
)
from fxpass.lower.sums import class_sum


def _view(reading: Reading, node: Node) -> Expr:
    """A view or a cast of logits, which neither reorders nor rounds them."""
    source, *_ = node.all_input_nodes
    example = node.meta["val"]
    before = source.meta["val"]
    if not equal_shapes(sizes_beyond_one(source), sizes_beyond_one(node)):
        raise Unknown("rearranges logits")
    rounds = not example.is_floating_point() or example.dtype.itemsize < 2
    if before.dtype != torch.bool and rounds:
        raise Unknown(f"rounds logits to {dtype_name(example.dtype)}")
    if (example.dtype == torch.float64) != (before.dtype == torch.float64):
        raise Unknown("casts to or from float64")
    return reading.classes[source]


def _softmax(reading: Reading, node: Node) -> Expr:
    like = operand_of(reading, node, node.args[1])
    _view(reading, node)
    base = softmax_base_of(reading.tables, like)
    return base.log if "log" in aten_name(node) else sympy.exp(base.log)


VIEWS: dict[str, Callable[[Reading, Node], Expr]] = {
    **dict.fromkeys(("_log_softmax", "_softmax"), _softmax),
    **dict.fromkeys((*SAME_ELEMENTS, "lift_fresh_copy", "permute", "transpose"), _view),
}


def pointwise_classes(reading: Reading, node: Node) -> Expr:
    """A function of the elements of tensors with classes."""
    name = aten_name(node)
    if "getitem" in (name, node.target.__name__):  # type: ignore[union-attr]
        name = "positive"
    spellings = [t[name] for t in (ALGEBRA, POINTWISE, MASKS) if name in t]
    if not spellings:
        raise Unknown(f"{name or node.target} of logits is not known")
    given = {"x": node.args[0]} if name == "positive" else arguments(node)
    tensors = [t for t in given.values() if isinstance(t, Node) and t in reading.classes]
    example = example_of(node)
    whole = example_of(tensors[0])
    if not equal_shapes(example.shape, whole.shape):
        raise Unknown("repeats the logits")
    if example.dtype == torch.float64 != whole.dtype:
        raise Unknown("promotes the logits to float64")
    dim = class_dim(tensors[0])
    operands = [expr_of(reading, a, dim, whole) for a in given.values()]
    _check_numbers(name, example.dtype, operands)
    _check_integers(reading, node, name, example.dtype, operands)
    exprs = [o for o in operands if isinstance(o, Expr)]
    if name != "exp" and all(_reads_logits_alone(e, name not in OF_ROWS) for e in exprs):
        spellings = spellings[-1:]
    if name == "exp":
        operands[0] = in_logs(reading.tables, operands[0])
    return _evaluated(name, spellings, operands)


def _evaluated(name: str, spellings: list[Any], operands: list[Any]) -> Any:
    """The expression of a function, by the first spelling that has one."""
    reason = "is not known"
    for spelling in spellings:
        defaults = list(spelling.signature.values())[len(operands) :]  # an overload may lack some
        try:
            check_size(operands)
            return spelling.value(*operands, *defaults)
        except (ValueError, TypeError) as error:
            reason = f"{error}"
    raise Unknown(f"{name}: {reason}")


def _reads_logits_alone(expr: Any, rows: bool) -> bool:
    """Tells if an expression reads a logit and operands alone; ``rows``: also operands of rows."""
    alone = of_operands_alone(expr)
    return alone and (rows or not any(isinstance(s, RowOperand) for s in symbols_of(expr)))


def _check_numbers(name: str, dtype: torch.dtype, operands: list[Any]) -> None:
    """``Unknown`` for an infinite number, unless a mask selects it; and for the number of a mask
    beyond the dtype's range, which eager refuses, or makes infinite."""
    infinite = [i for i, o in enumerate(operands) if o is sympy.S.NegativeInfinity]
    masks = name in ("masked_fill", "where")
    if (infinite and not masks) or infinite == [0]:
        raise Unknown("has an infinite operand")
    if masks and dtype.is_floating_point:
        numbers = [abs(o) for o in operands if isinstance(o, sympy.Rational)]
        if any(number > exact(torch.finfo(dtype).max) for number in numbers):
            raise Unknown(f"has a number beyond the range of {dtype_name(dtype)}")


def _check_integers(
    reading: Reading, node: Node, name: str, dtype: torch.dtype, operands: list[Any]
) -> None:
    """``Unknown`` for arithmetic of integers, which may wrap, and of booleans, whose sum is a
    logical or. Masks may be compared, selected and multiplied."""
    if dtype.is_floating_point or name in ("gt", "ge", "lt", "le"):
        return
    read = [n for n in node.all_input_nodes if n.meta["val"].dtype != torch.bool]
    if name in MASKS:
        read = [n for n in read if n not in reading.classes]
        masks = not read and all(o in (0, 1) for o in operands if isinstance(o, sympy.Rational))
    else:
        masks = not read and name == "mul" and dtype == torch.bool
    if not masks:
        raise Unknown(f"computes with {dtype_name(dtype)} numbers")


def expr_of(reading: Reading, argument: Any, dim: int, whole: torch.Tensor) -> Any:
    """An argument of a function whose result is like ``whole``, as an expression.

    Raises:
        Unknown: no expression has its value.
    """
    tables = reading.tables
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
    if argument in reading.classes:
        return reading.classes[argument]
    shape = sizes_of(argument)
    sizes = list(whole.shape)
    if (number := _constant(argument)) is not None:
        return number
    aligned = [1] * (len(sizes) - len(shape)) + shape
    of_row = all(equal_sizes(s, 1 if i == dim else sizes[i]) for i, s in enumerate(aligned))
    if argument in reading.rows:
        rows = reading.rows[argument]
        if not of_row or rows.index:
            raise Unknown("has rows of another shape")
        return rows.expr
    if aten_name(argument) == "expand" and argument not in reading.opaque:
        return expr_of(reading, argument.args[0], dim, whole)
    if argument.meta["val"].is_complex():
        raise Unknown("has a complex operand")
    if of_row or all(equal_sizes(s, 1) for s in shape):
        total = _operand_sum(reading, argument, dim, whole)
        return tables.operand_symbol(argument, RowOperand) if total is None else total
    if argument in reading.opaque:
        raise Unknown("reads what is computed of rows")
    if all(equal_sizes(s, 1) for i, s in enumerate(aligned) if i != dim):
        return tables.operand_symbol(argument, ClassOperand)
    if all(map(equal_sizes, aligned, sizes)):
        if (signed := _signed_input(reading, argument)) is not None:
            return signed
        if argument.op != "placeholder":
            return _computed_operand(reading, argument, dim, whole)
    raise Unknown(f"has an operand of shape {shape}, which is made of others")


def _operand_sum(reading: Reading, node: Node, dim: int, whole: torch.Tensor) -> Any:
    """The sum over the classes of an expression of operands; None for other nodes."""
    source: Any = node.args[0] if node.args else None
    if aten_name(node) != "sum" or not equal_shapes(sizes_of(source), whole.shape):
        return None
    dims = [d % len(whole.shape) for d in arguments(node)["dim"] or ()]
    if dims != [dim]:
        return None
    try:
        expr = expr_of(reading, source, dim, whole)
        return class_sum(reading.tables, expr, whole.shape[dim])
    except Unknown:
        return None


def _computed_operand(reading: Reading, node: Node, dim: int, whole: torch.Tensor) -> Any:
    """An operand as large as the logits that is computed from smaller ones, as an expression."""
    name = aten_name(node)
    if name in VIEWS:
        source: Any = node.args[0]
        moved = not equal_shapes(sizes_beyond_one(source), sizes_beyond_one(node))
        if name in ("_softmax", "_log_softmax") or moved:
            raise Unknown(f"has an operand that {name} makes")
        if name == "_to_copy" and not _cast_keeps_numbers(source, node):
            raise Unknown("has an operand that a cast changes")
        return expr_of(reading, source, class_dim(source), source.meta["val"])
    spellings = [t[name] for t in (POINTWISE, MASKS) if name in t]
    if not spellings:
        raise Unknown(f"has an operand that {name} makes")
    operands = [expr_of(reading, a, dim, whole) for a in arguments(node).values()]
    return _evaluated(name, spellings, operands)


def _constant(node: Node) -> Any:
    """The number that fills a tensor; None for other tensors."""
    casts: list[torch.dtype] = []
    while aten_name(node) in (*SAME_ELEMENTS, "select", "slice"):
        casts += [node.meta["val"].dtype] * (aten_name(node) == "_to_copy")
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    if aten_name(node) in ("scalar_tensor", "full"):
        number: Any = node.args[0 if aten_name(node) == "scalar_tensor" else 1]
        made = node.meta["val"].dtype
        for dtype in (made, *reversed(casts)) if casts or not made.is_floating_point else ():
            number = cast_number(number, dtype)
        if number == -math.inf:
            return sympy.S.NegativeInfinity
        if isinstance(number, int | float) and math.isfinite(number):
            return exact(number)
    return None


def _cast_keeps_numbers(source: Node, node: Node) -> bool:
    """Tells if a cast keeps numbers but for rounding: 2.7 becomes neither 2 nor True."""
    old = source.meta["val"].dtype
    new = node.meta["val"].dtype
    return new.is_floating_point or new == old or old == torch.bool


def _signed_input(reading: Reading, node: Node) -> Expr | None:
    """An operand that is an input as large as the logits, also negated, or cast without rounding;
    None for other operands."""
    sign = 1
    while node.op != "placeholder":
        source, *more = [n for n in node.all_input_nodes if not reads_sizes(n)] or [node]
        name = aten_name(node)
        old = source.meta["val"]
        new = node.meta["val"]
        floats = old.is_floating_point() and new.is_floating_point()
        if more or source is node or not (name in SAME_ELEMENTS or (name == "neg" and floats)):
            return None
        if name == "_to_copy" and not (floats and old.itemsize <= new.itemsize):
            return None
        sign = -sign if name == "neg" else sign
        node = source
    if len(sizes_beyond_one(node)) != 2:
        return None
    return sign * reading.tables.operand_symbol(node, GivenOperand)
