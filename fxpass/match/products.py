"""Matrix products and losses that sum over the classes: ``p @ atoms``, ``einsum``, ``mse_loss``.

In: a node that reads logits. Out: a :class:`fxpass.match.classes.Reduced` in the flow: the sum over
the classes of a product::

    matmul(%p, %atoms)                         ->    the sum of p * atoms
    kl_div(%log_probs, %q)                     ->    the sum of q * (log(q) - log_probs)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.match.bases import in_logs
from fxpass.match.classes import Classes, Flow
from fxpass.match.edits import symbols_of
from fxpass.match.elementwise import check_gradients, exponential, expr_of, logarithm
from fxpass.match.outputs import HOT
from fxpass.match.sums import summed
from fxpass.spec.dtypes import LOW_PRECISION
from fxpass.spec.functions import call, exact, where


def matmul(flow: Flow, node: Node) -> None:
    """``p @ atoms`` with a vector [V] or a matrix [V, 1]."""
    second = (
        "vec" if function_of(node) == "mv" else "mat2" if function_of(node) == "mm" else "other"
    )
    left, right = arguments(node, {"input": REQUIRED, second: REQUIRED}).values()
    if left not in flow.classes or right in flow.classes or not is_tensor(right):
        raise NoMatch.at(node, "is not of logits and a vector")
    like, shape = flow.classes[left], value(right).shape
    last = like.dim == value(left).dim() - 1
    column = len(shape) == 2 and isinstance(shape[1], int) and shape[1] == 1
    if not last or not (len(shape) == 1 or column) or value(left).dim() < 2:
        shown = list(shape)
        raise NoMatch.at(node, f"multiplies the logits by a matrix of shape {shown}")
    product = replace(like, expr=like.expr * flow.tensor(right, "class"))
    flow.reduce(node, like, summed(flow, node, product), keepdim=column)


def einsum(flow: Flow, node: Node) -> None:
    """``nv,nv->n``, ``...v,v->...``: products that are summed over the classes alone."""
    unknown = NoMatch.at(node, "is not a sum over the classes")
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = list(operands[0])
    if not isinstance(equation, str) or node.kwargs:
        raise unknown
    words, arrow, out = equation.replace(" ", "").partition("->")
    inputs = words.split(",")
    if not arrow or len(inputs) != len(operands) or not all(map(is_tensor, operands)):
        raise unknown
    tensors: list[Any] = operands
    first = next(i for i, t in enumerate(tensors) if t in flow.classes)
    letters, like = inputs[first], flow.classes[tensors[first]]
    rank = value(tensors[first]).dim()
    plain = letters.removeprefix("...")
    if plain != letters and like.dim == rank - 1:
        at = len(letters) - 1
    elif plain == letters and len(letters) == rank:
        at = like.dim
    else:
        raise unknown
    one = letters[at]
    if len(set(plain)) != len(plain) or out != letters[:at] + letters[at + 1 :]:
        raise unknown
    expr, whole_shape = sympy.Integer(1), value(tensors[first]).shape
    for word, tensor in zip(inputs, tensors, strict=True):
        whole = value(tensor).shape == whole_shape
        if word == one and value(tensor).shape == whole_shape[like.dim : like.dim + 1]:
            expr *= flow.tensor(tensor, "class")
        elif word == letters and whole:
            expr *= expr_of(flow, node, like, tensor, value(tensors[first]))
        else:
            raise unknown
    check_gradients(flow, node, [t for t in tensors if t in flow.classes])
    flow.reduce(node, like, summed(flow, node, replace(like, expr=expr)), keepdim=False)


_REDUCTION = {"size_average": None, "reduce": None, "reduction": "mean"}


def _elements(flow: Flow, node: Node, options: dict[str, Any]) -> tuple[Classes, dict[str, Any]]:
    """The arguments of a loss of each element, its tensors as expressions."""
    wanted = {"input": REQUIRED, "target": REQUIRED, **_REDUCTION, **options}
    given = arguments(node, wanted)
    read = [given["input"], given["target"]]
    if not all(map(is_tensor, read)) or value(read[0]).shape != value(read[1]).shape:
        raise NoMatch.at(node, "repeats an operand")
    known: list[Node] = [t for t in read if t in flow.classes]
    if not known:
        raise NoMatch.at(node, "has weights made of the logits")
    like, whole = flow.classes[known[0]], value(known[0])
    tensors = {k: t for k, t in given.items() if is_tensor(t)}
    check_gradients(flow, node, [t for t in tensors.values() if t in flow.classes])
    given |= {k: expr_of(flow, node, like, t, whole) for k, t in tensors.items()}
    return like, given


def of_elements(flow: Flow, node: Node) -> None:
    """A loss of a row of ``ELEMENTS``."""
    options, element = ELEMENTS[function_of(node)]
    like, given = _elements(flow, node, options)
    dtypes = {value(n).dtype for n in node.all_input_nodes if is_tensor(n)}
    if dtypes >= LOW_PRECISION or (function_of(node) in _NARROW and len(dtypes) > 1):
        # eager's result may be narrower than the compiler expects
        raise NoMatch.at(node, "has operands of two dtypes")
    used = (given[name] for name in ("input", "target", *options) if name != "weight")
    try:
        expr = element(*used)
    except ValueError as error:
        raise NoMatch.at(node, f"is not read: {error}") from error
    if given.get("weight") is not None:
        expr = given["weight"] * expr
    _reduce(flow, node, replace(like, expr=expr), given)


# Losses that have the dtype of their input in eager, whatever that of the target is.
_NARROW = ("huber_loss", "soft_margin_loss")


def _with_logits(x: Expr, y: Expr, positive: Expr | None) -> Expr:
    of_target = 1 if positive is None else 1 + (positive - 1) * y
    return (1 - y) * x + of_target * call("softplus", -x)


def _smooth(x: Expr, y: Expr, beta: Any) -> Expr:
    size, beta = call("abs", x - y), _number(beta)
    return where(size, "<", beta, (x - y) ** 2 / (2 * beta), size - beta / 2) if beta else size


def _huber(x: Expr, y: Expr, delta: Any) -> Expr:
    return _number(delta) * _smooth(x, y, delta)


def _number(argument: Any) -> Any:
    if not isinstance(argument, int | float):
        raise ValueError("beta= or delta= is not a number")
    return exact(argument)


# A loss of each element -> its parameters beside input, target and reduction, and its expression of
# these but ``weight``, by which it is multiplied. It lacks binary_cross_entropy, whose gradient
# PyTorch cuts where p * (1 - p) is below 1e-12, and the weights of losses whose mean they divide.
ELEMENTS: dict[str, tuple[dict[str, Any], Callable[..., Expr]]] = {
    "binary_cross_entropy_with_logits": ({"weight": None, "pos_weight": None}, _with_logits),
    "mse_loss": ({}, lambda x, y: (x - y) ** 2),
    "l1_loss": ({}, lambda x, y: call("abs", x - y)),
    "smooth_l1_loss": ({"beta": 1.0}, _smooth),
    "huber_loss": ({"weight": None, "delta": 1.0}, _huber),
    "soft_margin_loss": ({}, lambda x, y: call("softplus", -x * y)),
}


def divergence(flow: Flow, node: Node) -> None:
    """``kl_div`` of the logits' log-softmax, or from their softmax."""
    like, given = _elements(flow, node, {"log_target": False})
    source, target = given["input"], given["target"]
    expr = _divergence(flow, node, like, source, target, bool(given["log_target"]))
    _reduce(flow, node, replace(like, expr=expr), given)


def _reduce(flow: Flow, node: Node, like: Classes, given: dict[str, Any]) -> None:
    """Notes the elements of a loss, or their sum or mean."""
    if given["size_average"] is not None or given["reduce"] is not None:
        raise NoMatch.at(node, "has size_average= or reduce=")
    whole, reduction = value(first_operand(node)), given["reduction"]
    if isinstance(reduction, int):
        reduction = ("none", "mean", "sum")[reduction]
    if reduction == "none":
        flow.classes[node] = like
        return
    rank = whole.dim()
    if reduction not in ("mean", "sum", "batchmean") or (reduction == "batchmean" and not like.dim):
        raise NoMatch.at(node, f"has reduction={reduction!r}")
    total = summed(flow, node, like)
    if reduction == "batchmean":  # the mean of rows, times the rows of a batch
        others = [n for i, n in enumerate(whole.shape) if i not in (0, like.dim)]
        if not all(isinstance(n, int) and n for n in others):
            raise NoMatch.at(node, "has batches of a number of rows that varies")
        flow.reduce(node, like, math.prod(others) * total, keepdim=False, then="mean")
        return
    if reduction == "mean":
        size = whole.shape[like.dim]
        if not isinstance(size, int):
            raise NoMatch.at(node, "divides by a number of classes that varies")
        total = total / size
    flow.reduce(node, like, total, keepdim=False, then=reduction if rank > 1 else "")


def _divergence(
    flow: Flow, node: Node, like: Classes, source: Expr, target: Expr, is_log: bool
) -> Expr:
    """``q * (log(q) - source)`` of each class, for a target q or log(q)."""
    hot = not is_log and isinstance(target, Symbol) and target.name.startswith(HOT)
    if target in flow.tensors and target not in flow.dims and not hot:
        raise NoMatch.at(node, "has a target of one value for a row")
    if not hot and any(s.name.startswith(HOT) for s in symbols_of(target)):
        raise NoMatch.at(node, "has targets of one-hot tensors")
    try:
        if hot:
            return -target * source  # 1 * log(1) and 0 * log(0) are 0
        if not is_log:
            log = sympy.log(target) if target in flow.tensors else logarithm(target)
            return target * (log - source)
        q = exponential(in_logs(flow, node, like, target))
    except ValueError as error:
        raise NoMatch.at(node, f"is not read: {error}") from error
    return q * (target - source)
