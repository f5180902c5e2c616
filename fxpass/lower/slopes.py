"""The gradient of logits, as incoming gradients of outputs.

In: an expression of the gradient of one logit, and the base of the outputs. Out: for each output a
factor of rows; the gradient is the sum of the outputs' slopes, multiplied by these factors. The
expression need not be the derivative of a function::

    exp(log) * row_g - hot_c * row_g            ->    pick at c: -row_g
    exp(log) * row_g                            ->    lse: row_g
    exp(log) * (log + 1 - moment(1,1)) * row    ->    moment(1,1): row
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy import Expr, Symbol

from fxpass.formula import expression
from fxpass.formula.expression import Z
from fxpass.formula.functions import Where
from fxpass.formula.outputs import HIGHEST_POWER, TOTAL, Moment
from fxpass.formula.reductions import slope_terms
from fxpass.lower.bases import in_logs
from fxpass.lower.hot import simplified, split_hot, split_index
from fxpass.lower.pointwise import check_size
from fxpass.lower.records import (
    Base,
    Picked,
    SpreadOperand,
    Summed,
    Unknown,
    factors_of,
    has_classes,
    symbols_of,
    terms_of,
)
from fxpass.lower.sums import expanded, moment_term, picked_value
from fxpass.lower.tables import Tables

Powers = dict[Summed, Any]  # w exp(a log) log**b -> its factor of rows


def incoming_gradients(tables: Tables, base: Base, gradient: Any, classes: Any) -> dict[Any, Expr]:
    """The incoming gradients of outputs.

    Args:
        tables: of the reading.
        base: of the outputs.
        gradient: of a logit before the base's transform.
        classes: the number of classes.

    Returns:
        by output: ``"lse"``, a :class:`Picked` or a :class:`Summed`. The expression for a
        ``Picked`` of several classes has a :class:`SpreadOperand`, one value for each class.

    Raises:
        Unknown: the gradient is no sum of slopes.
    """
    slope = sympy.diff(base.transform, Z) * base.scale
    of_index, rest = split_hot(_in_logs(tables, quotient(simplified(gradient), slope)))
    picks = _picks(tables, of_index)
    powers = _powers(base, rest)
    moments: dict[Any, Expr] = {}
    for weight in dict.fromkeys(power.weight for power in powers):
        for a in range(HIGHEST_POWER, -1, -1):
            moments |= _moments(powers, a, weight)
    softmax = powers.pop(Summed(TOTAL), sympy.Integer(0))
    if any(factor != 0 for factor in powers.values()):
        raise Unknown(f"`{gradient}` is no gradient of moments")
    for moment, factor in moments.items():
        softmax += factor * _sigma(tables, base, moment, classes)
    whole = sympy.expand(softmax + sum(_of_row(tables, c) for c in picks.values()))
    softmax = sympy.expand(softmax)
    if picks and sympy.count_ops(whole) <= sympy.count_ops(softmax):
        softmax = whole  # without the log-probabilities' slopes
    else:
        picks = {Picked(pick.index, logit=True): factor for pick, factor in picks.items()}
    softmax = sympy.powsimp(softmax, combine="exp")  # exp(lse - row) may be all that is finite
    return moments | picks | ({"lse": softmax} if softmax != 0 else {})


def _in_logs(tables: Tables, expr: Any) -> Expr:
    """An expression in log-softmaxes, whose lse cancels: log + lse would lose the digits of small
    logits."""
    if not expr.has(Z):
        return expanded(expr)
    cancelling = tables.cancelling
    in_log = in_logs(tables, expr, cancels=True)
    terms = sympy.Add.make_args(expanded(in_log))
    with_lse = {t.xreplace(cancelling) for t in terms if t.has(*cancelling)}
    found = expanded(in_log.xreplace(cancelling))
    if not with_lse.isdisjoint(sympy.Add.make_args(found)):
        raise Unknown(f"`{expr}` has logits beside the slopes")
    return found


def quotient(gradient: Any, slope: Any) -> Expr:
    """The gradient of transformed logits, from the gradient of logits and the transform's slope.

    Raises:
        Unknown: the slope is no factor of the gradient.
    """
    if slope.is_number:
        return gradient / slope
    if slope.has(Where):
        return _of_branches(expression.masked(gradient), expression.masked(slope))
    of_rows = {f for f in gradient.atoms(sympy.Function) if not has_classes(f)}
    atoms = (gradient.atoms(sympy.Function) | slope.atoms(sympy.Function)) - of_rows
    names: Any = {atom: sympy.Dummy() for atom in sorted(atoms, key=str)}
    check_size([gradient, slope])
    found = sympy.cancel(gradient.xreplace(names) / slope.xreplace(names))
    below = sympy.fraction(found)[1]
    found = found.xreplace({name: atom for atom, name in names.items()})
    below = below.xreplace({name: atom for atom, name in names.items()})
    if any(has_classes(s) for s in symbols_of(below)):
        raise Unknown(f"`{gradient}` is no multiple of the slope `{slope}`")
    return found


def _of_branches(gradient: Any, slope: Any) -> Expr:
    """The quotient of two masks; where the slope is 0, the gradient has to be 0, too."""
    number, mask = slope.as_coeff_Mul()
    factor, other = gradient.as_coeff_Mul()
    same_mask = isinstance(mask, Where) and isinstance(other, Where) and mask.func is other.func
    if not same_mask or mask.args[:2] != other.args[:2] or 0 not in mask.args[2:]:
        raise Unknown(f"`{gradient}` is no multiple of the slope `{slope}`")
    pairs = list(zip(other.args[2:], mask.args[2:], strict=True))
    if any(s == 0 and g != 0 for g, s in pairs):
        raise Unknown("has a gradient where its slope is 0")
    ((inner, of_slope),) = [(g, s) for g, s in pairs if s != 0] or [(0, 1)]
    return quotient(factor * inner, number * of_slope)


def _picks(tables: Tables, expr: Any) -> dict[Picked, Expr]:
    """The incoming gradients of log-probabilities at indices."""
    found: dict[Picked, Expr] = {}
    for term in terms_of(expr):
        symbol, rest = split_index(term)
        rows, value = factors_of(rest)
        if isinstance(symbol, SpreadOperand):
            if value != 1:
                raise Unknown(f"`{term}` is no gradient of picks")
            pick = Picked(tables.spread[symbol].index)
            value = symbol
        else:
            pick = Picked(tables.nodes[symbol])
            if value != 1:
                value = picked_value(tables, value, pick.index)
        found[pick] = found.get(pick, sympy.Integer(0)) + rows * value
    return found


def _of_row(tables: Tables, factor: Any) -> Expr:
    """The sum of a row's incoming gradients of picks."""
    spread = [s for s in symbols_of(factor) if isinstance(s, SpreadOperand)]
    if spread and len(factor.atoms(SpreadOperand)) > 1:
        raise Unknown("has several gradients at several classes")
    return factor.xreplace({s: tables.sum_symbol(s) for s in spread})


def _powers(base: Base, expr: Any) -> Powers:
    """The terms of a sum by their powers; ``Unknown`` if a term is in no slope of a moment."""
    found: Powers = {}
    for term in terms_of(expr):
        rows, rest = factors_of(term)
        if (power := moment_term(base, rest)) is None:
            raise Unknown(f"`{rest}` is in no gradient of a moment")
        found[power] = found.get(power, sympy.Integer(0)) + rows
    return found


def _moments(powers: Powers, a: int, weight: Symbol | None) -> dict[Any, Expr]:
    """The incoming gradients of the moments with one power of the softmax. Their slopes are removed
    from ``powers``: the slope of ``exp(a l) l**b`` is ``exp(a l) (a l**b + b l**(b - 1))``."""
    found: dict[Any, Expr] = {}
    for b in range(HIGHEST_POWER, -1, -1):
        moment = Moment(a, b)
        highest = b if a else b - 1
        if highest < 0 or (moment == TOTAL and weight is None):
            continue
        power = Summed(Moment(a, highest), weight)
        factor = sympy.expand(powers.pop(power, sympy.Integer(0)))
        if factor == 0:
            continue
        found[Summed(moment, weight)] = factor / (a or b)
        if a and b:
            lower = Summed(Moment(a, b - 1), weight)
            powers[lower] = powers.get(lower, sympy.Integer(0)) - b * factor / a
    return found


def _sigma(tables: Tables, base: Base, summed: Summed, classes: Any) -> Expr:
    """The factor of the softmax in the slope of a moment, with its sign."""
    total: Any = sympy.Integer(0)
    for factor, moment in slope_terms(summed.moment):
        if moment == TOTAL and summed.weight is None:
            total += factor
        elif moment == Moment(0, 0) and summed.weight is not None:
            total += factor * tables.sum_symbol(summed.weight)
        elif moment == Moment(0, 0) and isinstance(classes, int):
            total += factor * classes
        else:
            total += factor * tables.output_symbol(base, Summed(moment, summed.weight))
    return total
