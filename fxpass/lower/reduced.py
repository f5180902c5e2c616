"""Functions from tensors with classes to rows, and from rows to rows.

In: a node that reads logits, or rows. Out: its :class:`fxpass.lower.records.RowValues`. Sums,
multiples, exponentials and logarithms of rows are read, since they may cancel; other functions of
rows stay in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fxpass.formula.dtypes import dtype_name
from fxpass.formula.functions import exact
from fxpass.lower.pointwise import expanded_exp, expanded_log
from fxpass.lower.reading import (
    SAME_ELEMENTS,
    Reading,
    arguments,
    aten_name,
    class_dim,
    equal_sizes,
    operand_of,
    sizes_of,
)
from fxpass.lower.records import RowValues, Unknown, symbols_of
from fxpass.lower.sums import class_argmax, class_max, class_sum, logsumexp, picked_value
from fxpass.lower.tables import Tables


def _reduction(function: Callable[[Tables, Any], Any]) -> Callable[[Reading, Node], RowValues]:
    def rule(reading: Reading, node: Node) -> RowValues:
        expr = operand_of(reading, node, arguments(node)["dim"])
        return RowValues(function(reading.tables, expr))

    return rule


def _sum(reading: Reading, node: Node) -> RowValues:
    given = arguments(node)
    source, *_ = node.all_input_nodes
    dims = given["dim"]
    if dims is not None and sorted(d % len(sizes_of(source)) for d in dims) == [0, 1]:
        reading.totals.add(node)  # over the rows, too
        dims = [1]
    expr = operand_of(reading, node, dims)
    old = source.meta["val"].dtype
    new = node.meta["val"].dtype
    if (new == torch.float64) != (old == torch.float64) or (
        old.is_floating_point and not new.is_floating_point
    ):
        raise Unknown(f"adds up in {dtype_name(new)}")
    classes = sizes_of(source)[class_dim(source)]
    total = class_sum(reading.tables, expr, classes)
    if aten_name(node) != "mean":
        return RowValues(total)
    if not isinstance(classes, int):
        raise Unknown("divides by a number of classes that varies")
    return RowValues(total / classes)


def _gather(reading: Reading, node: Node) -> RowValues:
    given = arguments(node)
    index = node.args[2]
    expr = operand_of(reading, node, given["dim"])
    if not isinstance(index, Node) or index in reading.rows or index in reading.opaque:
        raise Unknown("picks a class that is computed from logits")
    if index in reading.classes or given["sparse_grad"]:
        raise Unknown("has an index of another kind")
    source = node.all_input_nodes[0]
    dim = class_dim(source)
    sizes = sizes_of(index)
    inside = [size for i, size in enumerate(sizes) if i not in (0, dim)]
    of_rows = equal_sizes(sizes[0], sizes_of(source)[0])
    if not of_rows or not all(equal_sizes(size, 1) for size in inside):
        raise Unknown("has an index of other rows")
    if not isinstance(sizes[dim], int):
        raise Unknown("picks a number of classes that varies")
    return RowValues(picked_value(reading.tables, expr, index))


def _argmax(reading: Reading, node: Node) -> RowValues:
    expr = operand_of(reading, node, arguments(node)["dim"])
    return RowValues(class_argmax(reading.tables, expr), index=True)


def max_item(reading: Reading, node: Node) -> RowValues:
    """A result of ``max``: the largest values, or their classes."""
    expr = reading.pairs[node.args[0]]  # type: ignore[index]
    if node.args[1] == 0:
        return RowValues(class_max(reading.tables, expr))
    return RowValues(class_argmax(reading.tables, expr), index=True)


REDUCTIONS: dict[str, Callable[[Reading, Node], RowValues]] = {
    **{"sum": _sum, "mean": _sum, "gather": _gather, "argmax": _argmax},
    **{"amax": _reduction(class_max), "logsumexp": _reduction(logsumexp)},
}


# ---------------------------------------------------------------- rows


def row_values(reading: Reading, node: Node) -> RowValues | None:
    """The result of a call on rows, if it is arithmetic that may cancel, or a view."""
    name = aten_name(node)
    tables = reading.tables
    given = arguments(node) if name else {}
    first: Any = node.args[0]
    views = (*SAME_ELEMENTS, "select")
    if name in views and first in reading.rows and node.all_input_nodes[0] is first:
        return reading.rows[first] if _keeps_values(first, node) else None
    if first in reading.totals:
        raise Unknown("reads a sum over the rows")
    if name not in _ARITHMETIC or any(n not in reading.rows for n in node.all_input_nodes):
        return None
    exprs: list[Any] = []
    for argument in [a for k, a in given.items() if k in ("self", "other")]:
        if isinstance(argument, Node):
            exprs.append(reading.rows[argument].expr)
        elif isinstance(argument, int | float) and math.isfinite(argument):
            exprs.append(exact(argument))
        else:
            return None
    numbers = sum(e.is_number for e in exprs)
    index = any(reading.rows[n].index for n in node.all_input_nodes)
    if index or (name in ("mul", "div") and (numbers != 1 or exprs[-1] == 0 or exprs[0].is_number)):
        return None
    if name in ("exp", "log") and symbols_of(exprs[0]) - tables.outputs.keys():
        return None
    try:
        return RowValues(_ARITHMETIC[name](*exprs, given.get("alpha", 1)))
    except (ValueError, TypeError):
        return None


def _keeps_values(source: Node, node: Node) -> bool:
    """Tells if a view or a cast of rows keeps their values, but for rounding."""
    old = source.meta["val"].dtype
    new = node.meta["val"].dtype
    sizes, others = ([s for s in sizes_of(n)[1:] if not equal_sizes(s, 1)] for n in (source, node))
    floats = old.is_floating_point and new.is_floating_point
    return sizes == others and (old == new or (floats and torch.float64 not in (old, new)))


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, alpha: x + y * exact(alpha),
    "sub": lambda x, y, alpha: x - y * exact(alpha),
    "rsub": lambda x, y, alpha: y - x * exact(alpha),
    "mul": lambda x, y, _: x * y,
    "div": lambda x, y, _: x / y,
    "neg": lambda x, _: -x,
    "exp": lambda x, _: expanded_exp(x),
    "log": lambda x, _: expanded_log(x),
}
