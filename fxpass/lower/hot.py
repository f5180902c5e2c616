"""Tensors with a value at the class of an index, and 0 at all others: what picks are in backward.

In: nodes of a function of rows. Out: expressions with symbols of the index::

    scatter(zeros, 1, %c, -1.0) * %g     ->    -hot_c * row_g
    eq(%c, arange(V))                    ->    hot_c
    scatter_add(zeros, 1, %k, %g)        ->    spread_k, of several classes in a row
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from sympy import Expr
from torch.fx import Node

from fxpass.formula.functions import Where
from fxpass.lower.reading import (
    Reading,
    alike,
    arguments,
    class_dim,
    name_of,
    same,
    sizes_of,
)
from fxpass.lower.records import (
    OF_INDEX,
    Classes,
    HotOperand,
    RowOperand,
    SpreadOperand,
    Unknown,
    has_classes,
    symbols_of,
)


def is_hot(node: Node, logits: Node) -> bool:
    """Whether a node that reads no logits makes a tensor of their size from an index."""
    if not isinstance(node.meta["val"], torch.Tensor) or name_of(node) not in _MADE:
        return False
    sizes = sizes_of(node)
    wide = [s for s in sizes if not same(s, 1)]
    if len(wide) != 2 or not same(sizes[0], wide[0]) or not all(map(same, wide, sizes_of(logits))):
        return False
    return name_of(node) != "eq" or _compared(node) is not None


_MADE = ("scatter", "scatter_add", "eq")


def _compared(node: Node) -> Node | None:
    """The index ``[n, 1]`` that a node compares with all classes."""
    pair = [a for a in node.args if isinstance(a, Node)]
    if len(pair) != 2:
        return None
    for index, classes in (pair, pair[::-1]):
        if _counts(classes, sizes_of(node)[class_dim(node)]) and _is_of_rows(index, node):
            return index
    return None


def _counts(node: Node, classes: Any) -> bool:
    """Whether a node is ``arange(V)``."""
    wide = [s for s in sizes_of(node) if not same(s, 1)]
    while name_of(node) in ("unsqueeze", "view", "reshape", "expand", "_to_copy"):
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    counts = name_of(node) == "arange" and len(node.args) == 1
    counts = counts and not set(node.kwargs) - {"dtype", "device", "layout", "pin_memory"}
    return counts and len(wide) == 1 and same(wide[0], classes)


def _is_of_rows(index: Node, like: Node) -> bool:
    sizes = sizes_of(index)
    whole = sizes_of(like)
    aligned = [1] * (len(whole) - len(sizes)) + sizes
    return all(same(s, whole[0] if i == 0 else 1) for i, s in enumerate(aligned))


def hot(found: Reading, node: Node, operand: Any) -> Classes:
    """The value of such a node; ``operand`` reads another argument as an expression."""
    if name_of(node) == "eq":
        return Classes(_symbol(found, _compared(node)))
    given = arguments(node)
    dim = class_dim(node)
    index = given["index"]
    base = operand(given["self"])
    if given["dim"] % len(sizes_of(node)) != dim or given.get("reduce") is not None:
        raise Unknown("scatters along the rows")
    source = given["value"] if "value" in given else given["src"]
    several = isinstance(source, Node) and not same(sizes_of(index)[dim], 1)
    if several and source not in found.rows and alike(sizes_of(source), sizes_of(index)):
        value: Any = found.tables.node(source, RowOperand)
    else:
        value = operand(source)
    if not isinstance(value, Expr) or has_classes(value) or value.is_infinite:
        raise Unknown("scatters values of classes")
    adds = name_of(node) == "scatter_add"
    if same(sizes_of(index)[dim], 1):
        symbol = _symbol(found, index)
        return Classes(base + symbol * (value if adds else value - base))
    if not adds or base != 0:
        raise Unknown("scatters several values over others")
    symbol = SpreadOperand(f"spread_{node.name}", real=True)
    found.tables.spread[symbol] = index, value
    return Classes(symbol)


def _symbol(found: Reading, index: Node | None) -> Expr:
    if index is None or index in found.rows or index in found.late or index in found.classes:
        raise Unknown("has an index that is computed from logits")
    if index.meta["val"].is_floating_point():
        raise Unknown("has an index that is no class")
    return found.tables.node(index, HotOperand)


def simplified(expr: Any) -> Any:
    """An expression whose masks of rows are factors: ``where(row, x, 0)`` is ``x * where(row, 1,
    0)``. Without a bound that a log-softmax exceeds wherever its softmax is not 0."""
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
    one: Any = sympy.Integer(1)
    none: Any = sympy.Integer(0)
    where: Any = expr.func
    return first * where(x, y, one, none) + second * where(x, y, none, one)


_LEAST = -1e30  # no logit is less, but for -inf


def _vanishes(expr: Any) -> bool:
    """Whether each term is 0 where a softmax is."""
    terms = (t for t in sympy.Add.make_args(sympy.expand(expr)))
    return all(any(has_classes(e) for e in t.atoms(sympy.exp)) for t in terms)


def split_hot(expr: Any) -> tuple[Expr, Expr]:
    """The terms of a sum of products with a symbol of an index, and the others. Of a product with
    the same symbol twice, one remains."""
    terms = [_once(term) for term in sympy.Add.make_args(expr)]
    with_index = [t for t in terms if any(isinstance(s, OF_INDEX) for s in symbols_of(t))]
    others = sympy.Add(*(t for t in terms if t not in with_index))
    return sympy.Add(*with_index), others


def _once(term: Any) -> Any:
    found: Any = {
        power: power.base
        for power in term.atoms(sympy.Pow)
        if isinstance(power.base, HotOperand) and power.exp.is_Integer and power.exp > 0
    }
    return term.xreplace(found) if found else term


def factors(term: Any) -> tuple[Any, Expr, Expr]:
    """A term with an index as its symbol, what it is multiplied by in each row, and what at each
    class.

    Raises:
        Unknown: it reads several indices.
    """
    symbols = [s for s in symbols_of(term) if isinstance(s, OF_INDEX)]
    if len(symbols) != 1 or term.as_coeff_exponent(symbols[0])[1] != 1:
        raise Unknown(f"`{term}` reads several indices")
    rest = term / symbols[0]
    if symbols[0] in symbols_of(rest):
        raise Unknown(f"`{term}` is no product with an index")
    classes = [s for s in symbols_of(rest) if has_classes(s)]
    rows, at_class = rest.as_independent(*classes, as_Add=False) if classes else (rest, 1)
    return symbols[0], rows, sympy.sympify(at_class)
