"""Functions from tensors with classes to rows: sums, maxima, picks and the log-sum-exp.

In: a node that reads logits. Out: a :class:`fxpass.match.classes.Reduced` in the flow. A new
function is a row of ``REDUCTIONS``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.match.bases import base_of, softmax_base_of
from fxpass.match.classes import Classes, Flow, Reduced
from fxpass.match.elementwise import classes_of
from fxpass.match.losses import check_dtypes, loss_of
from fxpass.match.maxima import maximum
from fxpass.match.operands import (
    check_dim,
    check_dtype,
    operand_of,
    picks_rows_and_classes,
    whole_range,
)
from fxpass.match.outputs import Picked, Summed
from fxpass.match.sums import at, summed
from fxpass.match.views import index_of
from fxpass.spec.expression import L


def _sum(flow: Flow, node: Node) -> None:
    like = operand_of(flow, node)
    given = arguments(node, {"input": REQUIRED, "dim": None, "keepdim": False, "dtype": None})
    check_dtype(node, given)
    dims: Any = given["dim"]
    rank = value(first_operand(node)).dim()
    mean = function_of(node) == "mean"
    every = dims is None or dims in ((), [])
    if not every:
        listed = dims if isinstance(dims, tuple | list) else (dims,)
        numbers = [d for d in listed if isinstance(d, int)]
        every = rank > 1 and sorted(d % rank for d in numbers) == list(range(rank))
    if not every:
        check_dim(node, like, dims)
    elif given["keepdim"]:
        raise NoMatch.at(node, "keeps dimensions of one")
    if every and rank > 1 and not value(node).is_floating_point():
        raise NoMatch.at(node, "counts in all rows")
    total = summed(flow, node, like)
    if mean:
        size = value(first_operand(node)).shape[like.dim]
        if not isinstance(size, int):
            raise NoMatch.at(node, "divides by a number of classes that varies")
        total = total / size
    then = ("mean" if mean else "sum") if every and rank > 1 else ""
    flow.reduce(node, like, total, bool(given["keepdim"]), then)


def _logsumexp(flow: Flow, node: Node) -> None:
    like = operand_of(flow, node)
    given = arguments(node, {"input": REQUIRED, "dim": REQUIRED, "keepdim": False})
    check_dim(node, like, given["dim"])
    base, shift = base_of(flow, node, like)
    flow.reduce(node, like, flow.output(base, "lse") + shift, bool(given["keepdim"]))


def _gather(flow: Flow, node: Node) -> None:
    take = function_of(node) == "take_along_dim"
    names = {"input": REQUIRED, "dim": None if take else REQUIRED}
    names |= {"indices": REQUIRED} if take else {"index": REQUIRED, "sparse_grad": False}
    given = arguments(node, names)
    like = operand_of(flow, node)
    index: Any = given["indices" if take else "index"]
    check_dim(node, like, given["dim"])
    if not is_tensor(index) or value(index).dtype != torch.int64 or given.get("sparse_grad"):
        raise NoMatch.at(node, "has no index of int64")
    shape, taken = list(value(first_operand(node)).shape), list(value(index).shape)
    shape[like.dim] = taken[like.dim] if len(taken) == len(shape) else -1
    if shape != taken:
        raise NoMatch.at(node, "has an index of other rows")
    _pick(flow, node, like, Picked(index, like.dim, "all" if take else ""), keepdim=True)


def _pick(flow: Flow, node: Node, like: Classes, picked: Picked, keepdim: bool) -> None:
    rows = at(flow, node, like, like.expr, picked)
    if picked.count == 1:
        flow.reduce(node, like, rows, keepdim)
        return
    flow.reductions.append(Reduced(node, like, rows, keepdim))


def _getitem(flow: Flow, node: Node) -> None:
    """``z[arange(N), index]``; any other index is a view."""
    if not picks_rows_and_classes(node):
        flow.classes[node] = classes_of(flow, node, function_of(node))
        return
    like, (*rows, index) = operand_of(flow, node), index_of(node)
    shape = value(first_operand(node)).shape[:-1]
    if like.dim != len(rows) or value(index).dtype != torch.int64:
        raise NoMatch.at(node, "indexes rows and classes")
    whole = all(whole_range(flow, entry, shape, i) for i, entry in enumerate(rows))
    if not whole or value(index).shape != shape:
        raise NoMatch.at(node, "indexes some of the rows")
    _pick(flow, node, like, Picked(index, None, "negative"), keepdim=False)


# ---------------------------------------------------------------- losses


def of_loss(flow: Flow, node: Node) -> None:
    """cross_entropy and nll_loss."""
    loss = loss_of(node)
    if loss is None or loss.logits not in flow.classes or loss.node is not node:
        raise NoMatch.at(node, "is not known")
    check_dtypes(loss, flow.region)
    like = flow.classes[loss.logits]
    assert loss.target is not None
    if loss.target in flow.classes or loss.class_weight in flow.classes:
        raise NoMatch.at(node, "has a target made of the logits")
    if loss.dim != like.dim:
        raise NoMatch.at(node, "is not over the classes")
    if loss.log_softmax:
        picked = Picked(loss.target, None, ignored=loss.ignore_index)
        rows = at(flow, node, like, like.expr, picked)
        flow.reductions.append(Reduced(node, like, rows, loss=loss))
        return
    base, smooth, weighted = softmax_base_of(flow, node, like), None, L
    if loss.class_weight is not None and loss.probabilities:
        raise NoMatch.at(node, "has a weight of each class and probabilities")  # no moment has two
    if loss.class_weight is not None and loss.label_smoothing:
        weighted = flow.tensor(loss.class_weight, "class") * L
    if loss.label_smoothing:
        smooth = flow.output(base, Summed(weighted))
    if loss.probabilities:
        rows = flow.output(base, Summed(flow.given(loss.target, like.dim) * weighted))
    else:
        rows = flow.output(base, Picked(loss.target, None, ignored=loss.ignore_index))
    flow.reductions.append(Reduced(node, like, rows, loss=loss, mean_log=smooth))


REDUCTIONS: dict[str, Callable[[Flow, Node], None]] = {
    "sum": _sum,
    "mean": _sum,
    "logsumexp": _logsumexp,
    "gather": _gather,
    "take_along_dim": _gather,
    **dict.fromkeys(("getitem", "index"), _getitem),
    "max": maximum,
    "amax": maximum,
    "argmax": maximum,
    "cross_entropy_loss": of_loss,
    "nll_loss": of_loss,
}
