"""Functions from tensors with classes to rows: sums, maxima, picks and the log-sum-exp.

In: a node that reads logits. Out: a :class:`fxpass.match.classes.Reduced` in the flow. A new
function is a row of ``REDUCTIONS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import sympy
import torch
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.calls import arguments, first_operand, written
from fxpass.graph.functions import function_of
from fxpass.graph.nodes import REQUIRED, NoMatch, is_tensor, value
from fxpass.graph.source import call_name
from fxpass.match.bases import base_of, fits, in_logs
from fxpass.match.classes import (
    Classes,
    Flow,
    Picked,
    Reduced,
    Weighted,
    check_dim,
    check_dtype,
    has_classes,
    operand_of,
    picks_rows_and_classes,
    symbols_of,
)
from fxpass.match.elementwise import classes_of
from fxpass.match.losses import loss_of
from fxpass.match.maxima import maximum
from fxpass.spec.expression import Z
from fxpass.spec.reductions import HIGHEST_POWER, TOTAL, LogitSum, Moment


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
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) keeps dimensions of one")
    total = _summed(flow, node, like)
    if mean:
        size = value(first_operand(node)).shape[like.dim]
        if not isinstance(size, int):
            raise NoMatch(node, f"%{node.name} divides by a number of classes that varies")
        total = total / size
    then = ("mean" if mean else "sum") if every and rank > 1 else ""
    flow.reduce(node, like, total, bool(given["keepdim"]), then)


def _summed(flow: Flow, node: Node, like: Classes) -> Expr:
    """The sum of an expression over the classes, in outputs of one base."""
    expr, total = _logs_of_products(flow, node, like), sympy.Integer(0)
    _check_cancellation(flow, node, expr)
    rest = sympy.Integer(0)
    for term in sympy.Add.make_args(expr):
        found = _at_one_hot(flow, node, like, term)
        found = _sum_of_logits(flow, like, term) if found is None else found
        total, rest = (total, rest + term) if found is None else (total + found, rest)
    expr = sympy.expand(in_logs(flow, node, like, rest))
    for term in sympy.Add.make_args(expr):
        if term == 0:
            continue
        rows, rest = term.as_independent(*_class_symbols(term), as_Add=False)
        total += rows * _summed_term(flow, node, like, rest)
    return total


def _logs_of_products(flow: Flow, node: Node, like: Classes) -> Expr:
    """The expression as a sum, in which products with a softmax have no logits: p * z is p * log +
    p * lse, so that p * (z - lse) is p * log."""
    terms = sympy.Add.make_args(sympy.expand(like.expr))
    logs = {base.log for base in flow.bases}
    mixed = [t for t in terms if t.has(Z) and not logs.isdisjoint(symbols_of(t))]
    others = [t for t in terms if t not in mixed]
    return sympy.expand(sympy.Add(in_logs(flow, node, like, sympy.Add(*mixed)), *others))


def _check_cancellation(flow: Flow, node: Node, expr: Expr) -> None:
    """``NoMatch`` for a sum of several terms that may cancel, such as (p - q)**2: eager adds small
    differences, and the sums of the terms would lose their digits.

    Terms of one sign do not cancel, and p * (log + lse) is p * z. A logit and a log-softmax, and
    multiples of them by given values, are rounded already before eager subtracts given values.
    """
    groups: dict[Any, dict[int, Any]] = {}  # factors but for powers of log or z -> coefficients
    for term in sympy.Add.make_args(expr):
        rows, rest = term.as_independent(*_class_symbols(term), as_Add=False)
        factors = sympy.Mul.make_args(rest)
        degree = sum(int(f.as_base_exp()[1]) for f in factors if _is_log(f))  # type: ignore[arg-type]
        others = sympy.Mul(*(f for f in factors if not _is_log(f)))
        groups.setdefault(others, {})[degree] = rows
    shifts = {base.lse for base in flow.bases}
    for found in groups.values():
        if set(found) == {0, 1} and sympy.cancel(found[0] / found[1]) in shifts:
            del found[0]
    left = [one for found in groups.values() for one in found.items()]
    read = [(others, degree) for others, found in groups.items() for degree in found]
    rounded = [one for one in read if one[1] or _has_logs(one[0])]
    if len(rounded) == 1 and rounded[0][1] == 1 and not _has_logs(rounded[0][0]):
        return
    signs = {rows.is_positive for _, rows in left if rows.is_number}
    one_sign = len(signs) == 1 and all(rows.is_number for _, rows in left)
    if len(left) > 1 and not (one_sign and len({degree for degree, _ in left}) == 1):
        raise NoMatch(node, f"%{node.name} sums `{expr}`, whose terms may cancel")


def _has_logs(expr: Expr) -> bool:
    return any(s == Z or s.name.startswith("log_") for s in symbols_of(expr))


def _is_log(factor: Any) -> bool:
    """Whether a factor is a power of a log-softmax or of the logit."""
    root, power = factor.as_base_exp()
    is_log = isinstance(root, Symbol) and (root == Z or root.name.startswith("log_"))
    return is_log and power.is_Integer and power > 0


def _at_one_hot(flow: Flow, node: Node, like: Classes, term: Expr) -> Expr | None:
    """The sum of a term with a one-hot factor: the rest at its class; None for another term."""
    hot = [s for s in symbols_of(term) if s.name.startswith("hot_")]
    if len(hot) != 1:
        return None
    rest = term.subs(hot[0], 1)  # its powers are equal
    rows, rest = rest.as_independent(*_class_symbols(rest), as_Add=False)
    if rest == 1:
        return rows
    return rows * _at(flow, node, like, rest, Picked(flow.tensors[hot[0]], None))


def _sum_of_logits(flow: Flow, like: Classes, term: Expr) -> Expr | None:
    """The sum of ``r * w * f(z)`` for a row r, weights w and a function f of one logit, which is
    the transform of a base; None for another term."""
    rows, rest = term.as_independent(*_class_symbols(term), as_Add=False)
    others = symbols_of(rest) - {Z}
    weight = next(iter(others), None)
    transform = rest if weight is None else rest / weight
    if len(others) > 1 or not others <= flow.tensors.keys() or symbols_of(transform) != {Z}:
        return None
    base = flow.base(like, transform, sympy.Integer(1))
    if weight is None:
        return rows * flow.output(base, LogitSum())
    return rows * flow.output(base, Weighted(LogitSum(), weight))


def _class_symbols(expr: Any) -> list[Symbol]:
    return [s for s in symbols_of(expr) if has_classes(s)]


def _summed_term(flow: Flow, node: Node, like: Classes, term: Expr) -> Expr:
    """The sum of a product ``w * exp(a log) * log**b``."""
    unknown = NoMatch(node, f"%{node.name} sums `{term}` over the classes, which is not known")
    a = b = 0
    weight, base = None, None
    for factor in sympy.Mul.make_args(term):
        root, power = factor.as_base_exp()
        if isinstance(factor, sympy.exp):
            exponent: Any = factor.args[0]
            number, symbol = exponent.as_coeff_Mul()
            power = number
        else:
            symbol = root
        if factor == 1:
            continue
        if not isinstance(symbol, Symbol) or not power.is_Integer or power < 0:
            raise unknown
        if symbol.name.startswith("log_"):
            if base is not None and base.log != symbol:
                raise unknown
            base = next(one for one in flow.bases if one.log == symbol)
            if isinstance(factor, sympy.exp):
                a = int(power)
            else:
                b = int(power)
        elif symbol is root and symbol in flow.tensors and weight is None and power == 1:
            weight = symbol
        else:
            raise unknown
    if a > HIGHEST_POWER or b > HIGHEST_POWER:
        raise unknown
    if base is None and weight is None:
        size = value(first_operand(node)).shape[like.dim]
        if not isinstance(size, int):
            raise unknown
        return sympy.Integer(size)
    if base is None:
        base = flow.bases[0] if flow.bases else flow.base(like, Z, sympy.Integer(1))
    if not fits(flow, base, like):
        raise unknown
    moment = Moment(a, b)
    if weight is None:
        return sympy.Integer(1) if moment == TOTAL else flow.output(base, moment)
    return flow.output(base, Weighted(moment, weight))


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
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) has no index of int64")
    shape, taken = list(value(first_operand(node)).shape), list(value(index).shape)
    shape[like.dim] = taken[like.dim] if len(taken) == len(shape) else -1
    if shape != taken:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) has an index of other rows")
    whole = cast(Node, flow.same.get(index, index))
    _pick(flow, node, like, Picked(whole, like.dim, "all" if take else ""), keepdim=True)


def _pick(flow: Flow, node: Node, like: Classes, picked: Picked, keepdim: bool) -> None:
    rows = _at(flow, node, like, like.expr, picked)
    if picked.count == 1:
        flow.reduce(node, like, rows, keepdim)
        return
    lse = {base.lse for base in flow.bases}
    if any(s in flow.tensors or s in lse for s in rows.free_symbols):
        raise NoMatch(node, f"%{node.name} picks several classes of shifted logits")
    flow.reductions.append(Reduced(node, like, rows, keepdim))


def _at(flow: Flow, node: Node, like: Classes, expr: Expr, picked: Picked) -> Expr:
    """An expression at given classes, in outputs of one base."""
    expr = in_logs(flow, node, like, expr)
    logs = [base for base in flow.bases if expr.has(base.log)]
    tensors = [s for s in symbols_of(expr) if s in flow.tensors and has_classes(s)]
    if len(logs) != 1 or tensors or not fits(flow, logs[0], like):
        raise NoMatch(node, f"%{node.name} picks `{expr}` at a class, which is not known")
    # of z, which is log + lse, the logit itself is picked: it is exact
    logit = Symbol("logit", real=True)
    rows = expr.subs(logs[0].log, logit - logs[0].lse)
    if rows.has(logs[0].lse):
        return expr.subs(logs[0].log, flow.output(logs[0], picked))
    return rows.subs(logit, flow.output(logs[0], replace(picked, logit=True)))


def _getitem(flow: Flow, node: Node) -> None:
    """``z[arange(N), index]``; any other index is a view."""
    if not picks_rows_and_classes(node):
        flow.classes[node] = classes_of(flow, node, "getitem")
        return
    like, picked = operand_of(flow, node), cast(Any, node.args[1])
    rows, index = picked
    if like.dim != 1 or value(index).dtype != torch.int64 or value(index).dim() != 1:
        raise NoMatch(node, f"%{node.name} indexes rows and classes")
    given = arguments(rows, _ARANGE)
    n = value(first_operand(node)).shape[0]
    whole = given["start"] == 0 and given["step"] == 1 and value(rows).shape[0] == n
    changed = any(rows in written(user) for user in rows.users)
    if changed or not whole or value(index).shape[0] != n:
        raise NoMatch(node, f"%{node.name} indexes some of the rows")
    _pick(flow, node, like, Picked(index, None, "negative"), keepdim=False)


_ARANGE = {
    **{"start": 0, "end": REQUIRED, "step": 1, "dtype": None, "device": None},
    **{"layout": None, "pin_memory": None, "requires_grad": False},
}


# ---------------------------------------------------------------- losses


def _loss(flow: Flow, node: Node) -> None:
    """cross_entropy and nll_loss with class indices, or cross_entropy with given probabilities."""
    loss = loss_of(node)
    if loss is None or loss.logits not in flow.classes or loss.node is not node:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) is not known")
    like = flow.classes[loss.logits]
    assert loss.target is not None
    if loss.target in flow.classes or loss.class_weight in flow.classes:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) has a target made of the logits")
    if loss.dim != like.dim:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) is not over the classes")
    if loss.log_softmax:
        expr = in_logs(flow, node, like, like.expr)
        base = next((base for base in flow.bases if base.log == expr), None)
        if base is None or not fits(flow, base, like):
            raise NoMatch(node, f"%{node.name} reads `{like.expr}`, not a log-softmax")
    else:
        base, _ = base_of(flow, node, like)
    if loss.probabilities:
        if loss.class_weight is not None or loss.label_smoothing:
            raise NoMatch(node, f"%{node.name} has class weights or smoothing of probabilities")
        target = flow.tensor(loss.target, "given")
        flow.dims[target] = like.dim
        rows = -flow.output(base, Weighted(Moment(0, 1), target))
        flow.reduce(node, like, rows, False, loss.reduction.replace("none", ""))
        return
    picked = Picked(loss.target, None, ignored=loss.ignore_index)
    smooth = None
    if loss.label_smoothing:
        smooth = flow.output(base, Moment(0, 1))
        if loss.class_weight is not None:
            weight = flow.tensor(loss.class_weight, "class")
            smooth = flow.output(base, Weighted(Moment(0, 1), weight))
    rows = flow.output(base, picked)
    flow.reductions.append(Reduced(node, like, rows, loss=loss, mean_log=smooth))


REDUCTIONS: dict[str, Callable[[Flow, Node], None]] = {
    "sum": _sum,
    "mean": _sum,
    "logsumexp": _logsumexp,
    "gather": _gather,
    "take_along_dim": _gather,
    "getitem": _getitem,
    "max": maximum,
    "amax": maximum,
    "argmax": maximum,
    "cross_entropy_loss": _loss,
    "nll_loss": _loss,
}
