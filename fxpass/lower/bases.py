"""The logits of which a softmax is taken, and expressions in its log-softmax and log-sum-exp.

In: an expression of a logit. Out: its :class:`fxpass.lower.records.Base`, and what rows add::

    2 * z + row  ->  the base with the transform 2 * z, and the shift row
    p * z        ->  exp(log_0) * (log_0 + lse_0)
"""

from __future__ import annotations

from typing import Any, cast

import sympy
from sympy import Expr, Symbol

from fxpass.formula.expression import Z
from fxpass.lower.records import (
    OF_CLASS,
    Base,
    Classes,
    RowOperand,
    Unknown,
    has_classes,
    of_operands_alone,
    symbols_of,
)
from fxpass.lower.tables import Tables


def base_of(tables: Tables, like: Classes) -> tuple[Base, Expr]:
    """The base of logits of which a softmax is taken, and the shift of each row that they have."""
    expr = sympy.expand(like.expr, deep=False) if like.expr.is_Add else like.expr
    shift, rest = split(expr)
    if rest == 0:
        raise Unknown("reads no logits: they cancel")
    for base in tables.bases:  # log_softmax(log_softmax(z)), or of z + lse
        if rest == base.log:
            return base, shift - base.lse
        if rest == base.logit:
            return base, shift
    classes = [s for s in symbols_of(rest) if has_classes(s)]
    scale, transform = rest.as_independent(*classes, as_Add=False)
    number = scale.as_coeff_Mul()[0]
    scale = scale / number
    transform = number * transform
    reads = transform.has(Z) and of_operands_alone(transform)
    rows = {s for s in symbols_of(scale) if isinstance(s, RowOperand)}
    if not reads or symbols_of(scale) - rows:
        raise Unknown(f"`{like.expr}` is no function of one logit")
    return tables.base(transform, scale), shift


def softmax_base_of(tables: Tables, like: Classes) -> Base:
    """The base of logits of which a softmax is taken. It does not depend on a shift by reductions,
    but a shift by a tensor of rows is computed: a mask of them may absorb the logits.
    """
    base, shift = base_of(tables, like)
    rows = {s for s in symbols_of(shift) if isinstance(s, RowOperand)}
    terms = sympy.Add.make_args(sympy.expand(shift))
    added = sympy.Add(*(t for t in terms if not rows.isdisjoint(symbols_of(t))))
    if added == 0:
        return base
    if symbols_of(added) - rows:
        raise Unknown(f"`{like.expr}` is no function of one logit")
    return tables.base(base.logit + added, sympy.Integer(1))


def split(expr: Any) -> tuple[Expr, Expr]:
    """The terms without classes and those with classes."""
    terms = sympy.Add.make_args(expr)
    rows = [t for t in terms if not has_classes(t)]
    return sympy.Add(*rows), sympy.Add(*(t for t in terms if has_classes(t)))


def in_logs(tables: Tables, expr: Any, loose: bool = False) -> Expr:
    """An expression with the raw logits as log-softmax and lse of a base; ``loose``: the lse has
    to cancel."""

    def lse(base: Base) -> Symbol:
        return base.loose if loose else base.lse

    if not expr.has(Z):
        return expr
    read = [base for base in tables.bases if expr.has(base.log)]
    for some in (read, tables.bases):
        replaced = [expr.subs(base.logit, base.log + lse(base)) for base in some]
        if found := [one for one in replaced if not one.has(Z)]:
            return cast(Expr, min(found, key=sympy.count_ops))  # of a logit, not of a function of z
    for base in read:  # p * z, where p is the softmax of a multiple of z
        factor = base.logit / Z
        if factor.is_number:  # another one may be 0
            return expr.subs(Z, (base.log + lse(base)) / factor)
    poly = sympy.expand(expr)
    if not read and (not poly.is_polynomial(Z) or sympy.Poly(poly, Z).degree() == 1):
        try:
            base, shift = base_of(tables, Classes(poly))
            return base.log + lse(base) + shift
        except Unknown:
            if not poly.is_polynomial(Z):
                raise
    if not poly.is_polynomial(Z):
        raise Unknown(f"`{expr}` is not known")
    base = tables.base(Z, sympy.Integer(1))
    return poly.subs(Z, base.log + lse(base))


def in_one_log(tables: Tables, like: Classes, grows: bool = False) -> tuple[Base, Expr] | None:
    """A base, and the expression in its log-softmax and in rows: of a base that exists, or of one
    of this expression. None for another expression, and if it has to grow with the logits."""
    found = in_logs(tables, like.expr)
    logs = [base for base in tables.bases if found.has(base.log)]
    if len(logs) == 1:
        (base,) = logs
        rest = split(sympy.expand(found))[1] if grows else found
        factor, core = rest.as_coeff_Mul()
        alone = all(
            s == base.log or (isinstance(s, OF_CLASS) and not grows)
            for s in symbols_of(rest)
            if has_classes(s)
        )
        if alone and (not grows or (factor > 0 and core in (base.log, sympy.exp(base.log)))):
            return base, found
    if not logs or any(like.expr.has(base.log) for base in tables.bases):
        return None
    base, shift = base_of(tables, like)
    return base, base.log + base.lse + shift
