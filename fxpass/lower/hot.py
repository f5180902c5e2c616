"""Tensors with a value at the class of an index, and 0 at all others: gradients of picks.

In: nodes of a function of rows. Out: expressions with symbols of the index::

    scatter(zeros, 1, %c, -1.0) * %g     ->    -hot_c * row_g
    eq(%c, arange(V))                    ->    hot_c
    scatter_add(zeros, 1, %k, %g)        ->    spread_k, of several classes in a row
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.formula.functions import Where
from fxpass.lower.reading import (
    Reading,
    arguments,
    aten_name,
    class_dim,
    equal_shapes,
    equal_sizes,
    sizes_beyond_one,
    sizes_of,
)
from fxpass.lower.records import (
    OF_INDEX,
    HotOperand,
    RowOperand,
    Spread,
    SpreadOperand,
    Unknown,
    has_classes,
    symbols_of,
)


def is_hot(node: Node, logits: Node) -> bool:
    """Tells if a node, which reads no logits, makes a tensor of their size from an index."""
    if not isinstance(node.meta["val"], torch.Tensor) or aten_name(node) not in _OF_INDEX:
        return False
    sizes = sizes_beyond_one(node)
    if not equal_shapes(sizes, sizes_of(logits)) or not equal_sizes(sizes_of(node)[0], sizes[0]):
        return False
    return aten_name(node) != "eq" or _compared_index(node) is not None


_OF_INDEX = ("scatter", "scatter_add", "eq")


def _compared_index(node: Node) -> Node | None:
    """The index ``[n, 1]`` that a node compares with all classes."""
    pair = [a for a in node.args if isinstance(a, Node)]
    if len(pair) != 2:
        return None
    for index, classes in (pair, pair[::-1]):
        if _is_arange(classes, sizes_of(node)[class_dim(node)]) and _is_of_rows(index, node):
            return index
    return None


def _is_arange(node: Node, classes: Any) -> bool:
    """Tells if a node is ``arange(V)``."""
    if not equal_shapes(sizes_beyond_one(node), [classes]):
        return False
    while aten_name(node) in ("unsqueeze", "view", "reshape", "expand", "_to_copy"):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    options = {"dtype", "device", "layout", "pin_memory"}
    return aten_name(node) == "arange" and len(node.args) == 1 and set(node.kwargs) <= options


def _is_of_rows(index: Node, like: Node) -> bool:
    sizes = sizes_of(index)
    whole = sizes_of(like)
    aligned = [1] * (len(whole) - len(sizes)) + sizes
    return all(equal_sizes(s, whole[0] if i == 0 else 1) for i, s in enumerate(aligned))


def hot_classes(reading: Reading, node: Node, operand: Any) -> Expr:
    """The result of a node of :func:`is_hot`; ``operand`` reads an argument as an expression."""
    if aten_name(node) == "eq":
        return _symbol(reading, _compared_index(node))
    given = arguments(node)
    dim = class_dim(node)
    index = given["index"]
    base = operand(given["self"])
    if given["dim"] % len(sizes_of(node)) != dim or given.get("reduce") is not None:
        raise Unknown("scatters along the rows")
    source = given["value"] if "value" in given else given["src"]
    several = isinstance(source, Node) and not equal_sizes(sizes_of(index)[dim], 1)
    if several and source not in reading.rows and equal_shapes(sizes_of(source), sizes_of(index)):
        value: Any = reading.tables.operand_symbol(source, RowOperand)
    else:
        value = operand(source)
    if not isinstance(value, Expr) or has_classes(value) or value.is_infinite:
        raise Unknown("scatters values of classes")
    adds = aten_name(node) == "scatter_add"
    if equal_sizes(sizes_of(index)[dim], 1):
        symbol = _symbol(reading, index)
        return base + symbol * (value if adds else value - base)
    if not adds or base != 0:
        raise Unknown("scatters several values over others")
    symbol = SpreadOperand(f"spread_{node.name}", real=True)
    reading.tables.spread[symbol] = Spread(index, value)
    return symbol


def _symbol(reading: Reading, index: Node | None) -> Expr:
    computed = reading.rows, reading.opaque, reading.classes
    if index is None or any(index in nodes for nodes in computed):
        raise Unknown("has an index that is computed from logits")
    if index.meta["val"].is_floating_point():
        raise Unknown("has an index that is no class")
    return reading.tables.operand_symbol(index, HotOperand)


def simplified(expr: Any) -> Any:
    """An expression whose masks of rows are factors: ``x * where(row, 1, 0)`` for ``where(row, x,
    0)``; and without lower bounds that only a log-softmax whose softmax is 0 falls below."""
    if not expr.has(Where) or not expr.args:
        return expr
    expr = expr.func(*map(simplified, expr.args))
    if not isinstance(expr, Where):
        return expr
    args: Any = expr.args
    x, y, first, second = args
    if x.is_number and x < _LEAST and second == 0 and _vanishes(first):
        return first
    if has_classes(sympy.Tuple(x, y)) or not any(map(has_classes, (first, second))):
        return expr
    if sympy.S.NegativeInfinity in (first, second):
        return expr
    where: Any = expr.func
    mask = where(x, y, sympy.S.One, sympy.S.Zero)
    others = where(x, y, sympy.S.Zero, sympy.S.One)
    return first * mask + second * others


_LEAST = -1e30  # no logit is less, but for -inf


def _vanishes(expr: Any) -> bool:
    """Tells if each term is 0 where a softmax is 0."""
    terms = sympy.Add.make_args(sympy.expand(expr))
    return all(any(has_classes(e) for e in t.atoms(sympy.exp)) for t in terms)


def split_hot(expr: Any) -> tuple[Expr, Expr]:
    """The terms of a sum with a symbol of an index, and the other terms. The square of a one-hot
    symbol is the symbol."""
    terms = [_without_powers(term) for term in sympy.Add.make_args(expr)]
    with_index = [t for t in terms if any(isinstance(s, OF_INDEX) for s in symbols_of(t))]
    others = sympy.Add(*(t for t in terms if t not in with_index))
    return sympy.Add(*with_index), others


def _without_powers(term: Any) -> Any:
    bases: Any = {
        power: power.base
        for power in term.atoms(sympy.Pow)
        if isinstance(power.base, HotOperand) and power.exp.is_Integer and power.exp > 0
    }
    return term.xreplace(bases) if bases else term


def split_index(term: Any) -> tuple[Symbol, Any]:
    """The symbol of an index in a product, and the product of the other factors.

    Raises:
        Unknown: the term is no product with one index.
    """
    symbols = [s for s in symbols_of(term) if isinstance(s, OF_INDEX)]
    if len(symbols) != 1 or term.as_coeff_exponent(symbols[0])[1] != 1:
        raise Unknown(f"`{term}` reads several indices")
    rest = term / symbols[0]
    if symbols[0] in symbols_of(rest):
        raise Unknown(f"`{term}` is no product with an index")
    return symbols[0], rest
