"""Sums over the classes, and picks of classes, of expressions: in outputs of a base.

In: a tensor with classes. Out: rows, as an expression of outputs and of row symbols::

    p * (z - lse)    ->    moment(1,1)
    p * z            ->    none: moment(1,1) + lse would lose the digits of small logits
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import sympy
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.calls import first_operand
from fxpass.graph.nodes import NoMatch, value
from fxpass.lower.sums import degree, expanded
from fxpass.match.bases import fits, in_logs, in_one_log
from fxpass.match.classes import Classes, Flow, has_classes
from fxpass.match.edits import symbols_of
from fxpass.match.outputs import Base, Picked, Summed
from fxpass.spec.expression import L, Z
from fxpass.spec.functions import call


def summed(flow: Flow, node: Node, like: Classes) -> Expr:
    """The sum of an expression over the classes, in moments of one base.

    Raises:
        NoMatch: it is no sum of moments, or its terms may cancel.
    """
    expr, total = _logs_of_products(flow, node, like), sympy.Integer(0)
    _check_cancellation(node, expr)
    for term in sympy.Add.make_args(expr) if expr != 0 else ():
        rows, rest = term.as_independent(*_class_symbols(term), as_Add=False)
        total += rows * _summed_term(flow, node, like, rest)
    return total


def _logs_of_products(flow: Flow, node: Node, like: Classes) -> Expr:
    """The expression as a sum, in which products with a softmax have no logits: p * z is p * log +
    p * lse, so that p * (z - lse) is p * log."""
    terms = sympy.Add.make_args(expanded(like.expr))
    logs = {base.log for base in flow.bases}
    mixed = [t for t in terms if t.has(Z) and not logs.isdisjoint(symbols_of(t))]
    others = [t for t in terms if t not in mixed]
    return expanded(sympy.Add(in_logs(flow, node, like, sympy.Add(*mixed)), *others))


def _check_cancellation(node: Node, expr: Expr) -> None:
    """``NoMatch`` for a sum of several terms that may cancel, such as (p - q)**2: eager adds small
    differences, and the sums of the terms would lose their digits. Terms of one sign do not cancel.
    """
    rows: dict[Any, Any] = {}  # factors with classes -> what they are multiplied by
    for term in sympy.Add.make_args(expr):
        factor, rest = term.as_independent(*_class_symbols(term), as_Add=False)
        rows[rest] = factor
    one_sign = all(row.is_number for row in rows.values())
    one_sign = one_sign and len({row.is_positive for row in rows.values()}) == 1
    if len(rows) > 1 and not (one_sign and len(set(map(degree, rows))) == 1):
        raise NoMatch.at(node, f"sums `{expr}`, whose terms may cancel")


def _class_symbols(expr: Any) -> list[Symbol]:
    return [s for s in symbols_of(expr) if has_classes(s)]


def _summed_term(flow: Flow, node: Node, like: Classes, term: Expr) -> Expr:
    """The sum of a product ``w * exp(a log) * log**b``."""
    unknown = NoMatch.at(node, f"sums `{term}` over the classes, which is not known")
    if term == 1:
        size = value(first_operand(node)).shape[like.dim]
        if not isinstance(size, int):
            raise unknown
        return sympy.Integer(size)
    logs = [base for base in flow.bases if term.has(base.log)]
    base = (logs or flow.bases or [flow.base(like, Z, sympy.Integer(1))])[0]
    function = term.xreplace({base.log: L}).replace(sympy.exp, lambda x: call("exp", x))
    found = Summed(cast(Expr, function))
    if not fits(flow, base, like) or not found.is_moment:
        raise unknown
    return sympy.Integer(1) if function == call("exp", L) else flow.output(base, found)


def at(flow: Flow, node: Node, like: Classes, expr: Expr, picked: Picked) -> Expr:
    """An expression at given classes, in outputs of one base."""
    found = in_one_log(flow, node, like, expr)
    if found is None:
        raise NoMatch.at(node, f"picks `{expr}` at a class, which is not known")
    base, in_log = found

    def output(logit: bool) -> Expr:
        return flow.output(base, replace(picked, logit=logit))

    return at_class(base, expr, in_log, lambda: output(True), lambda: output(False))


def at_class(
    base: Base, read: Expr, expr: Expr, logit: Callable[[], Expr], log: Callable[[], Expr]
) -> Expr:
    """An expression, which is ``read`` in logits and ``expr`` in the base's log-softmax, at a class
    with this logit and log-softmax. What is picked, and what is largest, are computed alike: a
    program may compare them."""
    one, rows = Symbol("logit", real=True), expr
    if expr.has(base.lse):  # of z, which is log + lse, the logit itself is picked: it is exact
        number, core = base.logit.as_coeff_Mul()
        rows = read.subs(core, one / number)
        if rows.has(Z) or rows == read:
            rows = sympy.powsimp(expr.subs(base.log, one - base.lse), combine="exp", deep=True)
            rows = expr if rows.has(base.lse) else rows
    for symbol, found in ((one, logit), (base.log, log)):
        rows = rows.subs(symbol, found()) if rows.has(symbol) else rows
    return cast(Expr, rows)
