"""Sums over the classes, picks and maxima of expressions: in outputs of a base.

In: a tensor with classes. Out: rows, as an expression of outputs and of symbols of operands::

    p * (z - lse)    ->    moment(1,1)
    p * z            ->    moment(1,1) + cancelling_lse, as in lse - (p * z).sum(-1)
"""

from __future__ import annotations

import itertools
from typing import Any

import sympy
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.formula.expression import Z
from fxpass.formula.outputs import HIGHEST_POWER, TOTAL, Moment
from fxpass.lower.bases import base_of, in_logs, in_one_log
from fxpass.lower.hot import simplified, split_hot, split_index
from fxpass.lower.records import (
    OF_CLASS,
    Base,
    LogSoftmax,
    Picked,
    SpreadOperand,
    Summed,
    Unknown,
    factors_of,
    has_classes,
    symbols_of,
    terms_of,
)
from fxpass.lower.tables import Tables


def logsumexp(tables: Tables, expr: Any) -> Expr:
    """The log-sum-exp over the classes."""
    base, shift = base_of(tables, expr)
    return tables.output_symbol(base, "lse") + shift


def class_sum(tables: Tables, expr: Any, classes: Any) -> Expr:
    """The sum of an expression over the classes, in moments of one base.

    Raises:
        Unknown: the sum is no sum of moments, or its terms may cancel.
    """
    of_index, others = split_hot(expanded(simplified(expr)))
    total = _at_indices(tables, of_index)
    expr = _logs_of_products(tables, others)
    with_lse = sympy.Add(*(t for t in sympy.Add.make_args(expr) if t.has(*tables.cancelling)))
    _check_cancellation(expr - with_lse)
    for term in terms_of(expr):
        rows, rest = factors_of(term)
        total += rows * _summed_term(tables, rest, classes)
    return total


def _at_indices(tables: Tables, expr: Any) -> Any:
    """The sum over the classes of products with an index, which are 0 at all other classes."""
    total: Any = sympy.Integer(0)
    for term in terms_of(expr):
        symbol, rest = split_index(term)
        rows, value = factors_of(rest)
        if isinstance(symbol, SpreadOperand):
            if value != 1:
                raise Unknown(f"sums `{term}` over the classes")
            value = tables.sum_symbol(symbol)
        elif value != 1:
            value = picked_value(tables, value, tables.nodes[symbol])
        total += rows * value
    return total


def _logs_of_products(tables: Tables, expr: Any) -> Expr:
    """The expression as a sum whose products with a softmax have no raw logits: p * z becomes
    p * log + p * cancelling_lse, so that p * (z - lse) becomes p * log."""
    terms = sympy.Add.make_args(expanded(expr))
    logs = {base.log for base in tables.bases}
    mixed = [t for t in terms if t.has(Z) and not logs.isdisjoint(symbols_of(t))]
    if not mixed:
        return expanded(expr)
    others = sympy.Add(*(t for t in terms if t not in mixed))
    found = expanded(sympy.Add(in_logs(tables, sympy.Add(*mixed), cancels=True), others))
    cancelled = expanded(found.xreplace(tables.cancelling))
    return found if any(cancelled.has(base.lse) for base in tables.bases) else cancelled


def expanded(expr: Any) -> Expr:
    """A sum of products. Operands of functions are not expanded: their terms may cancel."""
    functions = expr.atoms(sympy.Function) - expr.atoms(sympy.exp, sympy.log)
    names: Any = {function: sympy.Dummy() for function in functions}
    found = sympy.expand(expr.xreplace(names))
    return found.xreplace({name: function for function, name in names.items()})


def _check_cancellation(expr: Expr) -> None:
    """``Unknown`` for a sum of several terms that may cancel, such as (p - q)**2: eager adds small
    differences, whose digits the sums of the terms would lose. Terms of one sign do not cancel."""
    rows: dict[Any, Any] = {}  # factors with classes -> their factors of rows
    for term in sympy.Add.make_args(expr):
        factor, rest = factors_of(term)
        rows[rest] = factor
    one_softmax = len({frozenset(rest.atoms(LogSoftmax)) for rest in rows}) == 1
    if one_softmax and all(map(_is_expected, rows)):
        return  # sum(p) is 1, without a rounding
    one_sign = all(row.is_number for row in rows.values())
    one_sign = one_sign and len({row.is_positive for row in rows.values()}) == 1
    if len(rows) > 1 and not (one_sign and len(set(map(_log_degree, rows))) == 1):
        raise Unknown(f"sums `{expr}`, whose terms may cancel")


def _is_expected(product: Any) -> bool:
    """Tells if a product is ``p`` or ``p * log p``."""
    logs = [s for s in symbols_of(product) if isinstance(s, LogSoftmax)]
    return bool(logs) and product / sympy.exp(logs[0]) in (1, logs[0])


def _log_degree(product: Any) -> int:
    """The sum of the powers of log-softmaxes and logits in a product."""
    powers = (factor.as_base_exp() for factor in sympy.Mul.make_args(product))
    logs = [power for root, power in powers if root == Z or isinstance(root, LogSoftmax)]
    return sum(int(power) for power in logs if power.is_Integer)


def _summed_term(tables: Tables, term: Any, classes: Any) -> Expr:
    """The sum of a product ``w * exp(a log) * log**b``."""
    if term == 1:
        if not isinstance(classes, int):
            raise Unknown("multiplies by a number of classes that varies")
        return sympy.Integer(classes)
    if isinstance(term, OF_CLASS):
        return tables.sum_symbol(term)
    base = next((base for base in tables.bases if term.has(base.log)), None)
    moment = None if base is None else moment_term(base, term)
    if base is None or moment is None:
        raise Unknown(f"sums `{term}` over the classes")
    return sympy.Integer(1) if moment == Summed(TOTAL) else tables.output_symbol(base, moment)


def moment_term(base: Base, term: Any) -> Summed | None:
    """The moment that is the sum of a product ``w * exp(a log) * log**b``; None for other terms."""
    for a, b in itertools.product(range(HIGHEST_POWER + 1), repeat=2):
        weight = term / sympy.exp(a * base.log) / base.log**b
        if weight == 1 or isinstance(weight, OF_CLASS):
            return Summed(Moment(a, b), None if weight == 1 else weight)
    return None


def picked_value(tables: Tables, expr: Any, index: Node) -> Expr:
    """An expression at the classes of an index, in outputs of one base and in operands' values."""
    if all(isinstance(s, OF_CLASS) for s in symbols_of(expr) if has_classes(s)):
        return _choose(tables, expr, index)
    if (found := in_one_log(tables, expr)) is None:
        raise Unknown(f"picks `{expr}` at a class")
    base, in_log = found

    def output(logit: bool) -> Expr:
        return tables.output_symbol(base, Picked(index, logit))

    rows = value_at_class(base, expr, in_log, output(True), output(False))
    return _choose(tables, rows, index)


def _choose(tables: Tables, expr: Any, index: Node) -> Expr:
    """An expression with its operands' values at the classes of an index."""
    given = [s for s in symbols_of(expr) if isinstance(s, OF_CLASS)]
    return expr.xreplace({s: tables.choice_symbol(tables.nodes[s], index) for s in given})


def value_at_class(base: Base, in_logits: Any, in_log: Any, logit: Any, log: Any) -> Expr:
    """An expression, given in logits and in the base's log-softmax, at a class with this logit and
    log-softmax. Picked and largest values have the same expression, since a program may compare
    them."""
    raw = Symbol("logit", real=True)
    rows = in_log
    if in_log.has(base.lse):  # of z, which is log + lse, the logit itself is picked: it is exact
        number, core = base.logit.as_coeff_Mul()
        rows = in_logits.subs(core, raw / number)
        if rows.has(Z) or rows == in_logits:
            rows = in_log.subs(base.log, raw - base.lse)
            rows = sympy.powsimp(rows, combine="exp", deep=True)
            rows = in_log if rows.has(base.lse) else rows
    for symbol, value in ((raw, logit), (base.log, log)):
        rows = rows.subs(symbol, value) if rows.has(symbol) else rows
    return rows


def growing_base(tables: Tables, expr: Any) -> tuple[Base, Expr]:
    """The base with whose logits an expression grows, and the expression in its log-softmax."""
    found = in_one_log(tables, expr, grows=True)
    if found is None:
        raise Unknown(f"takes the maximum of `{expr}`")
    return found


def class_argmax(tables: Tables, expr: Any) -> Symbol:
    """The class of the largest value."""
    base, _ = growing_base(tables, expr)
    return tables.output_symbol(base, "argmax")


def class_max(tables: Tables, expr: Any) -> Expr:
    """The largest value over the classes."""
    base, in_log = growing_base(tables, expr)
    nan = sympy.Dummy()
    rows = value_at_class(base, expr, in_log, tables.output_symbol(base, "max"), nan)
    if rows.has(nan):
        raise Unknown(f"takes the maximum of `{expr}`, whose digits max - lse loses")
    return rows
