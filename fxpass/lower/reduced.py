"""Functions from tensors with classes to rows, and from rows to rows.

In: a node that reads logits, or rows. Out: its :class:`fxpass.lower.records.RowValues`. Of rows,
sums, multiples, exponentials and logarithms are read, which may cancel; all else stays in the
graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fxpass.formula.dtypes import short
from fxpass.formula.functions import exact
from fxpass.lower.pointwise import exponential, logarithm
from fxpass.lower.reading import (
    Reading,
    arguments,
    class_dim,
    name_of,
    operand_of,
    same,
    sizes_of,
)
from fxpass.lower.records import Classes, RowValues, Unknown, symbols_of
from fxpass.lower.sums import at, grows, highest, logsumexp, summed
from fxpass.lower.tables import Tables


def _reduction(function: Callable[[Tables, Classes], Any]) -> Callable[[Reading, Node], RowValues]:
    def of(found: Reading, node: Node) -> RowValues:
        return RowValues(function(found.tables, operand_of(found, node, arguments(node)["dim"])))

    return of


def _sum(found: Reading, node: Node) -> RowValues:
    given = arguments(node)
    source, *_ = node.all_input_nodes
    dims = given["dim"]
    if dims is not None and sorted(d % len(sizes_of(source)) for d in dims) == [0, 1]:
        found.totals.add(node)  # over the rows, too
        dims = [1]
    like = operand_of(found, node, dims)
    old = source.meta["val"].dtype
    new = node.meta["val"].dtype
    if (new == torch.float64) != (old == torch.float64) or (
        old.is_floating_point and not new.is_floating_point
    ):
        raise Unknown(f"adds up in {short(new)}")
    classes = sizes_of(source)[class_dim(source)]
    total = summed(found.tables, like, classes)
    if name_of(node) != "mean":
        return RowValues(total)
    if not isinstance(classes, int):
        raise Unknown("divides by a number of classes that varies")
    return RowValues(total / classes)


def _gather(found: Reading, node: Node) -> RowValues:
    given = arguments(node)
    index = node.args[2]
    like = operand_of(found, node, given["dim"])
    if not isinstance(index, Node) or index in found.rows or index in found.late:
        raise Unknown("picks a class that is computed from logits")
    if index in found.classes or given["sparse_grad"]:
        raise Unknown("has an index of another kind")
    source = node.all_input_nodes[0]
    dim = class_dim(node.all_input_nodes[0])
    sizes = sizes_of(index)
    inside = [size for i, size in enumerate(sizes) if i not in (0, dim)]
    if not same(sizes[0], sizes_of(source)[0]) or not all(same(size, 1) for size in inside):
        raise Unknown("has an index of other rows")
    if not isinstance(sizes[dim], int):
        raise Unknown("picks a number of classes that varies")
    return RowValues(at(found.tables, like, index))


def _amax(found: Reading, node: Node) -> RowValues:
    return RowValues(highest(found.tables, operand_of(found, node, arguments(node)["dim"])))


def _argmax(found: Reading, node: Node) -> RowValues:
    base, _ = grows(found.tables, operand_of(found, node, arguments(node)["dim"]))
    return RowValues(found.tables.output(base, "argmax"), index=True)


def of_pair(found: Reading, node: Node) -> RowValues:
    like = found.pairs[node.args[0]]  # type: ignore[index]
    if node.args[1] == 0:
        return RowValues(highest(found.tables, like))
    return RowValues(found.tables.output(grows(found.tables, like)[0], "argmax"), index=True)


REDUCTIONS: dict[str, Callable[[Reading, Node], RowValues]] = {
    **{"sum": _sum, "mean": _sum, "gather": _gather, "amax": _amax, "argmax": _argmax},
    "logsumexp": _reduction(logsumexp),
}


# ---------------------------------------------------------------- rows


def of_rows(found: Reading, node: Node) -> RowValues | None:
    """The result of a call on rows, if it is arithmetic that may cancel, or a view."""
    name = name_of(node)
    tables = found.tables
    given = arguments(node) if name else {}
    first: Any = node.args[0]
    if name in _SAME_ROWS and first in found.rows and node.all_input_nodes[0] is first:
        before = first.meta["val"]
        after = node.meta["val"]
        many = [s for s in sizes_of(first)[1:] if not same(s, 1)]
        if many != [s for s in sizes_of(node)[1:] if not same(s, 1)] or (
            before.dtype != after.dtype
            and not (before.is_floating_point() and after.is_floating_point())
        ):
            return None
        if (before.dtype == torch.float64) != (after.dtype == torch.float64):
            return None
        return found.rows[first]
    if first in found.totals:
        raise Unknown("reads a sum over the rows")
    if name not in _ARITHMETIC or any(n not in found.rows for n in node.all_input_nodes):
        return None
    exprs: list[Any] = []
    for argument in [a for k, a in given.items() if k in ("self", "other")]:
        if isinstance(argument, Node):
            exprs.append(found.rows[argument].expr)
        elif isinstance(argument, int | float) and math.isfinite(argument):
            exprs.append(exact(argument))
        else:
            return None
    numbers = sum(e.is_number for e in exprs)
    index = any(found.rows[n].index for n in node.all_input_nodes)
    if index or (name in ("mul", "div") and (numbers != 1 or exprs[-1] == 0 or exprs[0].is_number)):
        return None
    if name in ("exp", "log") and symbols_of(exprs[0]) - tables.outputs.keys():
        return None
    try:
        return RowValues(_ARITHMETIC[name](*exprs, given.get("alpha", 1)))
    except (ValueError, TypeError):
        return None


_SAME_ROWS = (
    *("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "select", "_to_copy"),
    *("alias", "clone", "detach", "expand"),
)
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, alpha: x + y * exact(alpha),
    "sub": lambda x, y, alpha: x - y * exact(alpha),
    "rsub": lambda x, y, alpha: y - x * exact(alpha),
    "mul": lambda x, y, _: x * y,
    "div": lambda x, y, _: x / y,
    "neg": lambda x, _: -x,
    "exp": lambda x, _: exponential(x),
    "log": lambda x, _: logarithm(x),
}
