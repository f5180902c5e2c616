"""Sums over the classes, and picks of classes, of expressions: in outputs of a base.

In: a tensor with classes. Out: rows, as an expression of outputs and of row symbols::

    p * (z - lse)    ->    moment(1,1)
    p * z            ->    sum(z*exp(l)): moment(1,1) + lse would lose the digits of small logits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import sympy
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.calls import first_operand
from fxpass.graph.nodes import NoMatch, value
from fxpass.match.bases import check_compared, check_given, fits, in_logs, in_one_log
from fxpass.match.classes import Classes, Flow, has_classes
from fxpass.match.edits import symbols_of
from fxpass.match.masks import of_classes_alone
from fxpass.match.outputs import Base, Picked, Summed
from fxpass.spec import expression
from fxpass.spec.expression import L, Z
from fxpass.spec.functions import Where, call, where


def summed(flow: Flow, node: Node, like: Classes) -> Expr:
    """The sum of an expression over the classes, in outputs of one base: in moments, which one pass
    finds, or else of the expression as it is."""
    rest = like.expr.as_independent(*_class_symbols(like.expr), as_Add=False)[1]
    # terms that cancel in part before they are added up
    several = of_classes_alone(rest) and sympy.expand(rest).is_Add
    if several and not rest.is_polynomial(Z):
        return _sum_of_function(flow, node, like, like.expr)
    try:
        return _summed_terms(flow, node, like)
    except NoMatch as no:
        try:
            return _sum_of_function(flow, node, like, like.expr)
        except NoMatch:
            raise no from None


def _summed_terms(flow: Flow, node: Node, like: Classes) -> Expr:
    expr, total = _logs_of_products(flow, node, like), sympy.Integer(0)
    _check_cancellation(node, expr)
    others: list[Expr] = []
    for term in sympy.Add.make_args(expr):
        found = _at_one_hot(flow, node, like, term)
        if found is not None:
            total += found
        elif term != 0:
            others.append(term)
    if any(term.has(Z) for term in others):
        return total + _sum_of_function(flow, node, like, sympy.Add(*others))
    for term in others:
        rows, rest = term.as_independent(*_class_symbols(term), as_Add=False)
        total += rows * _summed_term(flow, node, like, rest)
    return total


def _logs_of_products(flow: Flow, node: Node, like: Classes) -> Expr:
    """The expression as a sum, in which products with a softmax have no logits: p * z is p * log +
    p * lse, so that p * (z - lse) is p * log."""
    terms = sympy.Add.make_args(_expanded(like.expr))
    logs = {base.log for base in flow.bases}
    mixed = [t for t in terms if t.has(Z) and not logs.isdisjoint(symbols_of(t))]
    others = [t for t in terms if t not in mixed]
    return _expanded(sympy.Add(in_logs(flow, node, like, sympy.Add(*mixed)), *others))


def _expanded(expr: Any) -> Expr:
    """A sum of products. The operands of functions stay: their terms may cancel."""
    functions = expr.atoms(sympy.Function) - expr.atoms(sympy.exp, sympy.log)
    names: Any = {function: sympy.Dummy() for function in functions}
    found = sympy.expand(expr.xreplace(names))
    return cast(Expr, found.xreplace({name: function for function, name in names.items()}))


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
    if len(rows) > 1 and not (one_sign and len(set(map(_degree, rows))) == 1):
        raise NoMatch.at(node, f"sums `{expr}`, whose terms may cancel")


def _degree(product: Any) -> int:
    """The powers of log-softmaxes and logits in a product."""
    powers = (factor.as_base_exp() for factor in sympy.Mul.make_args(product))
    logs = [p for root, p in powers if isinstance(root, Symbol) and _is_log(root)]
    return sum(int(power) for power in logs if power.is_Integer)


def _is_log(symbol: Symbol) -> bool:
    return symbol == Z or symbol.name.startswith("log_")


def _at_one_hot(flow: Flow, node: Node, like: Classes, term: Expr) -> Expr | None:
    """The sum of a term with a one-hot factor: the rest at its class; None for another term, as
    exp(hot * z), which is 1 at the other classes."""
    hot = [s for s in symbols_of(term) if s.name.startswith("hot_")]
    if len(hot) != 1 or not any(_is_power_of(f, hot[0]) for f in sympy.Mul.make_args(term)):
        return None
    rest = term.subs(hot[0], 1)  # its powers are equal
    rows, rest = rest.as_independent(*_class_symbols(rest), as_Add=False)
    if rest == 1:
        return rows
    return rows * at(flow, node, like, rest, flow.hit(hot[0]))


def _is_power_of(factor: Any, symbol: Symbol) -> bool:
    root, power = factor.as_base_exp()
    return root == symbol and power.is_positive is True


def _sum_of_function(flow: Flow, node: Node, like: Classes, expr: Expr) -> Expr:
    """The sum of ``r * f`` for a row r and a function f of one logit, of its log-softmax, of what
    is given at its class, and of picks."""
    unknown = NoMatch.at(node, f"sums `{expr}` over the classes, which is not known")
    expr = _compared_alike(flow, expr)
    for base in flow.bases:  # exp(log) * exp(lse) is exp(z)
        plain = sympy.powsimp(
            expr.xreplace({base.log: base.logit - base.lse}), combine="exp", deep=True
        )
        if expr.has(base.log) and not plain.has(base.lse) and fits(flow, base, like):
            expr = plain
    # both factors may be infinite or 0
    expr = sympy.powsimp(expr, combine="exp", deep=True)
    rows, rest = expr.as_independent(*_class_symbols(expr), as_Add=False)
    read = [flow.outputs[s][0] for s in symbols_of(rest) & flow.outputs.keys()]
    of_softmax = [base for base in flow.bases if rest.has(base.log) or base in read]
    if len(of_softmax) > 1 or not all(fits(flow, base, like) for base in of_softmax):
        raise unknown
    rest = _without_infinities(rest)
    if rest is None or not (of_softmax or rest.has(Z)):  # it reads no logits
        raise unknown
    found = ((b, *_in_base(b, rows, rest)) for b in of_softmax or _plain_first(flow, like))
    base, rows, function = next((one for one in found if one[2] is not None), (None, rows, None))
    if base is None or function is None:
        raise unknown
    if function / Z not in flow.tensors:
        check_given(flow, node, function)
    check_compared(flow, node, rest)
    for symbol in symbols_of(function) & flow.outputs.keys():
        pick = flow.outputs[symbol][1]
        if not isinstance(pick, Picked) or pick.count != 1 or pick.pieces or symbol in flow.parts:
            raise unknown
        if any(flow.writes([index], index, node) for index in pick.indices):
            raise unknown  # the call reads the index where the sum is
    try:
        expression.text(function)
    except ValueError as error:
        raise NoMatch(node, f"{unknown.reason}: {error}") from error
    return rows * flow.output(base, Summed(function))


def _without_infinities(expr: Expr) -> Expr | None:
    """``q * log(q)``, which is 0 where q is, with a finite logarithm there; None if a logarithm of
    given values has another factor."""
    for log in expr.atoms(sympy.log):
        q = cast(Expr, log.args[0])
        terms = [t for t in sympy.Add.make_args(sympy.expand(expr)) if t.has(log)]
        if isinstance(q, Symbol):
            if not all(q in sympy.Mul.make_args(term) for term in terms):
                return None
            one = where(q, "<", 0, q, where(q, "<=", 0, 1, q))
            expr = cast(Expr, expr.xreplace({log: call("log", one)}))
    return expr


def _compared_alike(flow: Flow, expr: Expr) -> Expr:
    """An expression in which a picked logit that is compared with logits is computed as they are,
    so that it equals itself: a lse beside a pick is ``at - pick``, as it is ``z - log`` at a class.
    """

    def of_row(side: Any) -> Any:
        picks = [flow.outputs[s] for s in sorted(symbols_of(side) & flow.outputs.keys(), key=str)]
        picks = [(base, o) for base, o in picks if isinstance(o, Picked) and side.has(base.lse)]
        if not picks or has_classes(side):
            return side
        base, pick = picks[0]
        logit, log = (flow.output(base, replace(pick, logit=which)) for which in (True, False))
        return sympy.powsimp(side.subs(base.lse, logit - log), combine="exp", deep=True)

    branches = {w: w.func(*map(of_row, w.args[:2]), *w.args[2:]) for w in expr.atoms(Where)}
    return cast(Expr, expr.xreplace(branches))


def _plain_first(flow: Flow, like: Classes) -> Iterable[Base]:
    """The bases of the rows of a tensor with classes, that of the linear's output first, or else
    made as the last one."""
    bases = [base for base in flow.bases if fits(flow, base, like)]
    yield from sorted(bases, key=lambda base: base.logit != Z)
    yield flow.base(like, Z, sympy.Integer(1))


def _in_base(base: Base, rows: Expr, rest: Expr) -> tuple[Expr, Expr | None]:
    """A factor of each row, and a function of the logit ``z`` and the log-softmax ``l`` of a base,
    whose product is ``rows * rest``; None in its place if that reads the linear's output in another
    way."""
    logit, one = Symbol("logit"), sympy.Integer(1)
    number, core = base.logit.as_coeff_Mul()
    for factor, expr in ((rows, rest), (one, rows * rest)):
        found = expr.xreplace({base.lse: logit - L, base.log: L}).subs(core, logit / number)
        if not found.has(Z):
            found = found.subs(logit, Z).replace(sympy.exp, lambda x: call("exp", x))
            return factor, cast(Expr, found.replace(sympy.log, lambda x: call("log", x)))
        if base.scale == 1:
            break
    return rows, None


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
    if not fits(flow, base, like) or not found.of_one_pass:
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
