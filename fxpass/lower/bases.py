"""The logits that a softmax reads, and expressions in its log-softmax and log-sum-exp.

In: an expression of a logit. Out: its :class:`fxpass.lower.records.Base`, and the shift of rows::

    2 * z + row  ->  the base with the transform 2 * z, and the shift row
    p * z        ->  exp(log_0) * (log_0 + lse_0)
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy import Expr, Symbol

from fxpass.formula.expression import Z
from fxpass.lower.records import (
    OF_CLASS,
    Base,
    RowOperand,
    Unknown,
    factors_of,
    has_classes,
    of_operands_alone,
    symbols_of,
)
from fxpass.lower.tables import Tables


def base_of(tables: Tables, logits: Any) -> tuple[Base, Expr]:
    """The base of logits, and the shift that rows add to them."""
    expr = sympy.expand(logits, deep=False) if logits.is_Add else logits
    shift, rest = split_by_classes(expr)
    if rest == 0:
        raise Unknown("reads no logits: they cancel")
    for base in tables.bases:  # log_softmax(log_softmax(z)), or of z + lse
        if rest == base.log:
            return base, shift - base.lse
        if rest == base.logit:
            return base, shift
    scale, transform = factors_of(rest)
    number = scale.as_coeff_Mul()[0]
    scale = scale / number
    transform = number * transform
    reads = transform.has(Z) and of_operands_alone(transform)
    rows = {s for s in symbols_of(scale) if isinstance(s, RowOperand)}
    if not reads or symbols_of(scale) - rows:
        raise Unknown(f"`{logits}` is no function of one logit")
    return tables.base_with(transform, scale), shift


def softmax_base_of(tables: Tables, logits: Any) -> Base:
    """The base of a softmax's logits, without their shift by reductions: a softmax does not depend
    on it. A shift by a tensor of rows is computed: a mask of rows may absorb the logits."""
    base, shift = base_of(tables, logits)
    rows = {s for s in symbols_of(shift) if isinstance(s, RowOperand)}
    terms = sympy.Add.make_args(sympy.expand(shift))
    added = sympy.Add(*(t for t in terms if not rows.isdisjoint(symbols_of(t))))
    if added == 0:
        return base
    if symbols_of(added) - rows:
        raise Unknown(f"`{logits}` is no function of one logit")
    return tables.base_with(base.logit + added, sympy.Integer(1))


def split_by_classes(expr: Any) -> tuple[Expr, Expr]:
    """The terms without classes and the terms with classes."""
    terms = sympy.Add.make_args(expr)
    rows = [t for t in terms if not has_classes(t)]
    return sympy.Add(*rows), sympy.Add(*(t for t in terms if has_classes(t)))


def in_logs(tables: Tables, expr: Any, cancels: bool = False) -> Expr:
    """An expression in which raw logits are the log-softmax of a base plus its lse; ``cancels``:
    the lse has to cancel."""

    def lse(base: Base) -> Symbol:
        return base.cancelling_lse if cancels else base.lse

    if not expr.has(Z):
        return expr
    read = [base for base in tables.bases if expr.has(base.log)]
    for some in (read, tables.bases):
        replaced = [expr.subs(base.logit, base.log + lse(base)) for base in some]
        if complete := [e for e in replaced if not e.has(Z)]:
            return min(complete, key=sympy.count_ops)  # of a logit, not a function of z
    for base in read:  # p * z, where p is the softmax of a multiple of z
        factor = base.logit / Z
        if factor.is_number:  # a factor of rows may be 0
            return expr.subs(Z, (base.log + lse(base)) / factor)
    poly = sympy.expand(expr)
    if not read and (not poly.is_polynomial(Z) or sympy.Poly(poly, Z).degree() == 1):
        try:
            base, shift = base_of(tables, poly)
            return base.log + lse(base) + shift
        except Unknown:
            if not poly.is_polynomial(Z):
                raise
    if not poly.is_polynomial(Z):
        raise Unknown(f"`{expr}` is not known")
    base = tables.base_with(Z, sympy.Integer(1))
    return poly.subs(Z, base.log + lse(base))


def in_one_log(tables: Tables, logits: Any, grows: bool = False) -> tuple[Base, Expr] | None:
    """A base, and the expression in rows and in the base's log-softmax, which is the only one; the
    expression itself may become a base. None if there is no such base; ``grows``: also for an
    expression that does not grow with the logits."""
    found = in_logs(tables, logits)
    logs = [base for base in tables.bases if found.has(base.log)]
    if len(logs) == 1:
        (base,) = logs
        rest = split_by_classes(sympy.expand(found))[1] if grows else found
        factor, core = rest.as_coeff_Mul()
        with_classes = [s for s in symbols_of(rest) if has_classes(s) and s != base.log]
        alone = not with_classes if grows else all(isinstance(s, OF_CLASS) for s in with_classes)
        if alone and (not grows or (factor > 0 and core in (base.log, sympy.exp(base.log)))):
            return base, found
    if not logs or any(logits.has(base.log) for base in tables.bases):
        return None
    base, shift = base_of(tables, logits)
    return base, base.log + base.lse + shift
