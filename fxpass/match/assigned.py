"""Assignments to some of the logits: ``z[:, banned] = -inf``, ``z[arange, labels] -= margin``.

In: a node that writes numbers, or functions of the targets' logits, into logits. Out: the
:class:`fxpass.match.classes.Classes` after it, a ``where`` of a mask or of a one-hot tensor::

    setitem(%z, (slice(None), slice(90, None)), -30)    ->    where(class > 0, -30, z)
    %picked = getitem(%z, (%arange, %labels));  %less = sub(%picked, 0.35)
    setitem(%z, (%arange, %labels), %less)              ->    where(hot > 0, z - 0.35, z)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from sympy import Expr
from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand, is_cut
from fxpass.graph.functions import function_of, out_of_place
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.match.classes import Classes, Flow
from fxpass.match.edits import Taken, symbols_of
from fxpass.match.elementwise import expr_of
from fxpass.match.masks import SCATTER, function_over, hot, index_of, made_of
from fxpass.match.operands import check_dim, keeps_order, operand_of, whole_range
from fxpass.match.outputs import Picked
from fxpass.match.pointwise import MASKS
from fxpass.match.views import entries_of

_INDEX_PUT = {
    **{"input": REQUIRED, "indices": REQUIRED, "values": REQUIRED, "accumulate": False},
    "unsafe": False,
}
_FILL = {"input": REQUIRED, "dim": REQUIRED, "index": REQUIRED, "value": REQUIRED}


def assigned(flow: Flow, node: Node) -> Classes:
    """The logits after an assignment.

    Raises:
        NoMatch: it assigns to rows, to several picks of a row, or values that are no function of
            the logit that is replaced.
    """
    function = out_of_place(function_of(node))
    like, added = operand_of(flow, node), False
    if function in ("setitem", "index_put"):
        if function == "setitem":
            _, index, new = node.args
            index = index if isinstance(index, tuple) else (index,)
        else:
            given = arguments(node, _INDEX_PUT)
            index, new, added = given["indices"], given["values"], given["accumulate"]
            index = tuple(slice(None) if i is None else i for i in index)
        mask, target = _selected(flow, node, like, index)
    else:
        given = arguments(node, _FILL if function == "index_fill" else SCATTER)
        check_dim(node, like, given["dim"])
        if function == "index_fill":
            new, target = given["value"], None
            mask = _some(flow, node, like, given["index"])
        else:
            new = given["src"] if given.get("value") is None else given["value"]
            added = function == "scatter_add"
            mask, target = _picked(flow, node, like, given["index"])
            if given["reduce"] is not None:
                raise NoMatch.at(node, "has reduce=")
    expr = _value(flow, node, like, new, target)
    expr = like.expr + expr if added else expr
    if mask is None or (added and not is_tensor(new)):
        raise NoMatch.at(node, "has an index that changes later")
    return replace(like, expr=MASKS["where"].value(mask, expr, like.expr, None))


# The functions of assignments; "_" is at the end of in-place spellings.
ASSIGNMENTS = ("setitem", "index_put", "index_fill", "scatter", "scatter_add")


def _selected(
    flow: Flow, node: Node, like: Classes, index: tuple[Any, ...]
) -> tuple[Expr | None, Node | None]:
    """The mask of what an index selects; for one class of each row, their index tensor too."""
    whole = value(first_operand(node))
    if len(index) == 1 and _is_of(index[0], whole.shape, torch.bool):
        made = made_of(flow, index[0], like, whole)
        return (flow.given(index[0], like.dim) if made is None else made), None
    matrix = whole.dim() == 2 and like.dim == 1
    if matrix and len(index) == 2 and _is_of(index[1], whole.shape[:1], torch.int64):
        rows, picked = index
        if whole_range(flow, rows, whole.shape[:1]):
            return hot(flow, node, picked, wraps=True), picked
    entries = entries_of(index, whole.dim())
    if len(entries) == whole.dim():
        rest = (*entries[: like.dim], *entries[like.dim + 1 :])
        if all(isinstance(e, slice) and e == slice(None) for e in rest):
            return _some(flow, node, like, entries[like.dim]), None
    raise NoMatch.at(node, "assigns to rows of the logits")


def _is_of(argument: Any, shape: torch.Size, dtype: torch.dtype) -> bool:
    return is_tensor(argument) and value(argument).shape == shape and value(argument).dtype == dtype


def _some(flow: Flow, node: Node, like: Classes, entry: Any) -> Expr:
    """The mask of some classes."""
    if any(isinstance(edit, Taken) for edit in like.edits):
        raise NoMatch.at(node, "assigns to some of the chosen classes")
    if is_tensor(entry):
        if value(entry).dim() > 1 or value(entry).dtype not in (torch.bool, torch.int64):
            raise NoMatch.at(node, "has an index of unknown form")
        if value(entry).dtype == torch.bool and value(entry).dim() == 1:
            return flow.tensor(entry, "class")
    return flow.selected(node, entry)


def _picked(flow: Flow, node: Node, like: Classes, index: Any) -> tuple[Expr | None, Node]:
    """The one-hot tensor of an index ``[N, 1]``, and the index."""
    whole = list(value(first_operand(node)).shape)
    whole[like.dim] = 1
    if not is_tensor(index) or list(value(index).shape) != whole or like.dim != len(whole) - 1:
        raise NoMatch.at(node, "is not of one class of each row")
    if value(index).dtype != torch.int64:
        raise NoMatch.at(node, "has no index of int64")
    return hot(flow, node, index), index


def _value(flow: Flow, node: Node, like: Classes, new: Any, target: Node | None) -> Expr:
    """What is assigned: a number, or a function of the logits at ``target``."""
    if not is_tensor(new):
        new = int(new) if isinstance(new, bool) else new
        if value(first_operand(node)).dtype == torch.bool and new not in (0, 1):
            raise NoMatch.at(node, f"assigns {new} to booleans")
        return expr_of(flow, node, like, new, value(first_operand(node)))
    trained = value(first_operand(node)).requires_grad
    at = None if target is None else index_of(target)

    def leaf(one: Node) -> Expr | None:
        """The logit at the target, as an expression of all logits."""
        expr = flow.rows.get(one)
        if expr is None or at is None or flow.writes([at], at, node):
            return None
        for symbol in symbols_of(expr) & flow.outputs.keys():
            base, output = flow.outputs[symbol]
            same = isinstance(output, Picked) and index_of(output.index) is at
            if not same or not output.logit or output.ignored is not None:  # type: ignore[union-attr]
                return None
            if base.logit != like.expr or flow.base(like, base.transform, base.scale) is not base:
                return None
            expr = cast(Expr, expr.subs(symbol, base.logit))
        return expr if expr == like.expr else None

    found: dict[Node, Expr | None] = {}
    fits = target is not None and value(new).numel() == value(target).numel()
    expr = _computed(flow, new, node, leaf, trained, found) if fits else None
    if expr is None:
        what = "values that are no function of the logits at the target"
        raise NoMatch.at(node, f"assigns {what}")
    flow.spelled += [one for one, of_one in found.items() if of_one is not None]
    return expr


def _computed(
    flow: Flow, node: Node, reader: Node, leaf: Any, trained: bool, found: dict[Node, Expr | None]
) -> Expr | None:
    """The expression of rows that pointwise functions make of leaves and numbers; noted in
    ``found``, since a node may be read over many paths."""

    def read(operand: Node) -> Expr | None:
        return _computed(flow, operand, node, leaf, trained, found)

    if flow.writes([node], node, reader):
        return None
    if (of_leaf := leaf(node)) is not None:
        return of_leaf
    if value(node).requires_grad != trained or not value(node).is_floating_point():
        return None
    if is_cut(node):
        return None
    if node not in found:
        same = keeps_order(node)
        found[node] = read(first_operand(node)) if same else function_over(node, read)
    return found[node]
