"""Sums over the classes, picks and maxima of expressions: in outputs of a base.

In: a tensor with classes. Out: rows, as an expression of outputs and of symbols of operands::

    p * (z - lse)    ->    moment(1,1)
    p * z            ->    moment(1,1) + loose: the lse has to cancel, as in lse - (p * z).sum(-1)
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import sympy
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.formula.expression import Z
from fxpass.formula.outputs import HIGHEST_POWER, TOTAL, Moment
from fxpass.lower.bases import base_of, in_logs, in_one_log
from fxpass.lower.hot import factors, simplified, split_hot
from fxpass.lower.records import (
    OF_CLASS,
    Base,
    Classes,
    LogSoftmax,
    Picked,
    SpreadOperand,
    Summed,
    Unknown,
    has_classes,
)
from fxpass.lower.records import symbols_of as symbols
from fxpass.lower.tables import Tables


def logsumexp(tables: Tables, like: Classes) -> Expr:
    """The log-sum-exp over the classes."""
    base, shift = base_of(tables, like)
    return tables.output(base, "lse") + shift


def summed(tables: Tables, like: Classes, classes: Any) -> Expr:
    """The sum of an expression over the classes, in moments of one base.

    Raises:
        Unknown: it is no sum of moments, or its terms may cancel.
    """
    of_index, others = split_hot(expanded(simplified(like.expr)))
    total = _at_indices(tables, of_index)
    expr = _logs_of_products(tables, Classes(others))
    of_loose = [base.loose for base in tables.bases]
    loose = sympy.Add(*(t for t in sympy.Add.make_args(expr) if t.has(*of_loose)))
    _check_cancellation(expr - loose)
    for term in sympy.Add.make_args(expr) if expr != 0 else ():
        rows, rest = term.as_independent(*_class_symbols(term), as_Add=False)
        total += rows * _summed_term(tables, rest, classes)
    return total


def _at_indices(tables: Tables, expr: Any) -> Any:
    """The sum of products with an index: what they are at its classes."""
    total: Any = sympy.Integer(0)
    for term in sympy.Add.make_args(expr) if expr != 0 else ():
        symbol, rows, at_class = factors(term)
        if isinstance(symbol, SpreadOperand):
            if at_class != 1:
                raise Unknown(f"sums `{term}` over the classes")
            total += rows * tables.sum_of(symbol)
        elif at_class == 1:
            total += rows
        else:
            total += rows * at(tables, Classes(at_class), tables.nodes[symbol])
    return total


def _logs_of_products(tables: Tables, like: Classes) -> Expr:
    """The expression as a sum, in which products with a softmax have no logits: p * z is p * log +
    p * loose, so that p * (z - lse) is p * log."""
    terms = sympy.Add.make_args(expanded(like.expr))
    logs = {base.log for base in tables.bases}
    mixed = [t for t in terms if t.has(Z) and not logs.isdisjoint(symbols(t))]
    if not mixed:
        return expanded(like.expr)
    with_lse = sympy.Add(*(t for t in terms if t not in mixed))
    loose = in_logs(tables, sympy.Add(*mixed), loose=True)
    found = expanded(sympy.Add(loose, with_lse))
    tight: Any = {base.loose: base.lse for base in tables.bases}
    alone = expanded(found.xreplace(tight))
    return found if any(alone.has(base.lse) for base in tables.bases) else alone


def expanded(expr: Any) -> Expr:
    """A sum of products. The operands of functions stay: their terms may cancel."""
    functions = expr.atoms(sympy.Function) - expr.atoms(sympy.exp, sympy.log)
    names: Any = {function: sympy.Dummy() for function in functions}
    found = sympy.expand(expr.xreplace(names))
    return cast(Expr, found.xreplace({name: function for function, name in names.items()}))


def _check_cancellation(expr: Expr) -> None:
    """``Unknown`` for a sum of several terms that may cancel, such as (p - q)**2: eager adds small
    differences, and the sums of the terms would lose their digits. Terms of one sign do not cancel.
    """
    rows: dict[Any, Any] = {}  # factors with classes -> what they are multiplied by
    for term in sympy.Add.make_args(expr):
        factor, rest = term.as_independent(*_class_symbols(term), as_Add=False)
        rows[rest] = factor
    one_softmax = len({frozenset(rest.atoms(LogSoftmax)) for rest in rows}) == 1
    if one_softmax and all(map(_is_expected, rows)):
        return  # sum(p) is 1, without a rounding
    one_sign = all(row.is_number for row in rows.values())
    one_sign = one_sign and len({row.is_positive for row in rows.values()}) == 1
    if len(rows) > 1 and not (one_sign and len(set(map(degree, rows))) == 1):
        raise Unknown(f"sums `{expr}`, whose terms may cancel")


def _is_expected(product: Any) -> bool:
    """Whether a product is ``p`` or ``p * log p``."""
    logs = [s for s in symbols(product) if isinstance(s, LogSoftmax)]
    return bool(logs) and product / sympy.exp(logs[0]) in (1, logs[0])


def degree(product: Any) -> int:
    """The powers of log-softmaxes and logits in a product."""
    powers = (factor.as_base_exp() for factor in sympy.Mul.make_args(product))
    logs = [p for root, p in powers if isinstance(root, Symbol) and _is_log(root)]
    return sum(int(power) for power in logs if power.is_Integer)


def _is_log(symbol: Symbol) -> bool:
    return symbol == Z or isinstance(symbol, LogSoftmax)


def _class_symbols(expr: Any) -> list[Symbol]:
    return [s for s in symbols(expr) if has_classes(s)]


def _summed_term(tables: Tables, term: Any, classes: Any) -> Expr:
    """The sum of a product ``w * exp(a log) * log**b``."""
    if term == 1:
        if not isinstance(classes, int):
            raise Unknown("multiplies by a number of classes that varies")
        return sympy.Integer(classes)
    if isinstance(term, OF_CLASS):
        return tables.sum_of(term)
    logs = [base for base in tables.bases if term.has(base.log)]
    base = logs[0] if logs else None
    if base is None:
        raise Unknown(f"sums `{term}` over the classes")
    for a, b in itertools.product(range(HIGHEST_POWER + 1), repeat=2):
        weight = term / sympy.exp(a * base.log) / base.log**b
        found = weight if isinstance(weight, Symbol) else None
        if weight == 1 or isinstance(found, OF_CLASS):
            if found is None and Moment(a, b) == TOTAL:
                return sympy.Integer(1)
            return tables.output(base, Summed(Moment(a, b), found))
    raise Unknown(f"sums `{term}` over the classes")


def at(tables: Tables, like: Classes, index: Node) -> Expr:
    """An expression at given classes, in outputs of one base and in what operands have there."""
    if all(isinstance(s, OF_CLASS) for s in symbols(like.expr) if has_classes(s)):
        given = [s for s in symbols(like.expr) if isinstance(s, OF_CLASS)]
        chosen = {s: tables.choice(tables.nodes[s], index) for s in given}
        return cast(Expr, like.expr.xreplace(chosen))
    found = in_one_log(tables, like)
    if found is None:
        raise Unknown(f"picks `{like.expr}` at a class")
    base, in_log = found

    def output(logit: bool) -> Expr:
        return tables.output(base, Picked(index, logit))

    rows = at_class(base, like.expr, in_log, output(True), output(False))
    given = [s for s in symbols(rows) if isinstance(s, OF_CLASS)]
    return cast(Expr, rows.xreplace({s: tables.choice(tables.nodes[s], index) for s in given}))


def at_class(base: Base, read: Any, expr: Any, logit: Any, log: Any) -> Expr:
    """An expression, which is ``read`` in logits and ``expr`` in the base's log-softmax, at a class
    with this logit and log-softmax. What is picked, and what is largest, are computed alike: a
    program may compare them."""
    one = Symbol("logit", real=True)
    rows = expr
    if expr.has(base.lse):  # of z, which is log + lse, the logit itself is picked: it is exact
        number, core = base.logit.as_coeff_Mul()
        rows = read.subs(core, one / number)
        if rows.has(Z) or rows == read:
            rows = sympy.powsimp(expr.subs(base.log, one - base.lse), combine="exp", deep=True)
            rows = expr if rows.has(base.lse) else rows
    for symbol, found in ((one, logit), (base.log, log)):
        rows = rows.subs(symbol, found) if rows.has(symbol) else rows
    return cast(Expr, rows)


def grows(tables: Tables, like: Classes) -> tuple[Base, Expr]:
    """The base with whose logits an expression grows, and the expression in its log-softmax."""
    found = in_one_log(tables, like, grows=True)
    if found is None:
        raise Unknown(f"takes the maximum of `{like.expr}`")
    return found


def highest(tables: Tables, like: Classes) -> Expr:
    """The largest value over the classes."""
    base, expr = grows(tables, like)
    nan = sympy.Dummy()
    rows = at_class(base, like.expr, expr, tables.output(base, "max"), nan)
    if rows.has(nan):
        raise Unknown(f"takes the maximum of `{like.expr}`, whose digits max - lse loses")
    return rows
