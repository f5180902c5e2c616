"""The gradient of logits, as incoming gradients of outputs.

In: an expression of the gradient of one logit, and the base of which outputs are taken. Out: for
each output the number of a row by which its slope is multiplied, such that the sum is the
gradient. Any expression of this kind is one: it need not be the derivative of anything::

    exp(log) * row_g - hot_c * row_g            ->    pick at c: -row_g
    exp(log) * row_g                            ->    lse: row_g
    exp(log) * (log + 1 - moment(1,1)) * row    ->    moment(1,1): row
"""

from __future__ import annotations

import itertools
from typing import Any

import sympy
from sympy import Expr, Symbol

from fxpass.formula import expression
from fxpass.formula.expression import Z
from fxpass.formula.functions import Where
from fxpass.formula.outputs import HIGHEST_POWER, TOTAL, Moment
from fxpass.formula.reductions import for_slope
from fxpass.lower.bases import in_logs
from fxpass.lower.hot import factors, simplified, split_hot
from fxpass.lower.pointwise import check_size
from fxpass.lower.records import (
    OF_CLASS,
    Base,
    Classes,
    Picked,
    SpreadOperand,
    Summed,
    Unknown,
    has_classes,
    symbols_of,
)
from fxpass.lower.sums import at, expanded
from fxpass.lower.tables import Tables

Powers = dict[tuple[int, int, Symbol | None], Any]  # exp(a log) log**b w -> its factor of a row


def coefficients(tables: Tables, base: Base, gradient: Any, classes: Any) -> dict[Any, Expr]:
    """The incoming gradients of outputs.

    Args:
        tables: of the reading.
        base: of which outputs are taken.
        gradient: of a logit before the base's transform.
        classes: their number.

    Returns:
        by output: ``"lse"``, a :class:`Picked` or a :class:`Summed`; of a ``Picked`` with several
        classes, an expression of what a :class:`SpreadOperand` has at each of them.

    Raises:
        Unknown: it is no sum of slopes.
    """
    slope = sympy.diff(base.transform, Z) * base.scale
    found = quotient(simplified(gradient), slope)
    found = _in_logs(tables, found)
    of_index, rest = split_hot(found)
    picks = _picks(tables, of_index)
    powers = _powers(base, rest)
    made: dict[Any, Expr] = {}
    for weight in dict.fromkeys(w for _, _, w in powers):
        for a in range(HIGHEST_POWER, -1, -1):
            made |= _moments(powers, a, weight)
    softmax = powers.pop((1, 0, None), sympy.Integer(0))
    if any(factor != 0 for factor in powers.values()):
        raise Unknown(f"`{gradient}` is no gradient of moments")
    for moment, factor in made.items():
        softmax += factor * _sigma(tables, base, moment, classes)
    whole = sympy.expand(softmax + sum(_of_row(tables, c) for c in picks.values()))
    softmax = sympy.expand(softmax)
    if picks and sympy.count_ops(whole) <= sympy.count_ops(softmax):
        softmax = whole  # what log-probabilities leave
    else:
        picks = {Picked(pick.index, logit=True): factor for pick, factor in picks.items()}
    softmax = sympy.powsimp(softmax, combine="exp")  # exp(lse - row) may be all that is finite
    return made | picks | ({"lse": softmax} if softmax != 0 else {})


def _in_logs(tables: Tables, expr: Any) -> Expr:
    """An expression whose logits are log-softmaxes, if nothing else is left of them: log + lse
    would lose the digits of small logits."""
    if not expr.has(Z):
        return expanded(expr)
    tight: Any = {base.loose: base.lse for base in tables.bases}
    loose = in_logs(tables, expr, loose=True)
    terms = sympy.Add.make_args(expanded(loose))
    read = {t.xreplace(tight) for t in terms if t.has(*tight)}
    found = expanded(loose.xreplace(tight))
    if not read.isdisjoint(sympy.Add.make_args(found)):
        raise Unknown(f"`{expr}` has logits beside the slopes")
    return found


def quotient(gradient: Any, slope: Any) -> Expr:
    """The gradient of what a transform makes of logits, from that of the logits and its slope.

    Raises:
        Unknown: the slope is no factor of the gradient.
    """
    if slope.is_number:
        return gradient / slope
    if slope.has(Where):
        return _of_branches(expression.masked(gradient), expression.masked(slope))
    atoms = (gradient.atoms(sympy.Function) | slope.atoms(sympy.Function)) - _sums(gradient)
    names: Any = {atom: sympy.Dummy() for atom in sorted(atoms, key=str)}
    check_size([gradient, slope])
    found = sympy.cancel(gradient.xreplace(names) / slope.xreplace(names))
    below = sympy.fraction(found)[1]
    found = found.xreplace({name: atom for atom, name in names.items()})
    below = below.xreplace({name: atom for atom, name in names.items()})
    if any(has_classes(s) for s in symbols_of(below)):
        raise Unknown(f"`{gradient}` is no multiple of the slope `{slope}`")
    return found


def _sums(expr: Any) -> set[Any]:
    """The functions in which no class is read."""
    return {f for f in expr.atoms(sympy.Function) if not any(map(has_classes, symbols_of(f)))}


def _of_branches(gradient: Any, slope: Any) -> Expr:
    """Where the slope is 0, so has to be the gradient."""
    number, mask = slope.as_coeff_Mul()
    factor, other = gradient.as_coeff_Mul()
    alike = isinstance(mask, Where) and isinstance(other, Where) and mask.func is other.func
    if not alike or mask.args[:2] != other.args[:2] or 0 not in mask.args[2:]:
        raise Unknown(f"`{gradient}` is no multiple of the slope `{slope}`")
    pairs = list(zip(other.args[2:], mask.args[2:], strict=True))
    if any(s == 0 and g != 0 for g, s in pairs):
        raise Unknown("has a gradient where its slope is 0")
    ((inner, of_slope),) = [(g, s) for g, s in pairs if s != 0] or [(0, 1)]
    return quotient(factor * inner, number * of_slope)


def _picks(tables: Tables, expr: Any) -> dict[Picked, Expr]:
    """The incoming gradients of log-probabilities at indices."""
    found: dict[Picked, Expr] = {}
    for term in sympy.Add.make_args(expr) if expr != 0 else ():
        symbol, rows, at_class = factors(term)
        if isinstance(symbol, SpreadOperand):
            if at_class != 1:
                raise Unknown(f"`{term}` is no gradient of picks")
            pick = Picked(tables.spread[symbol][0])
            each = symbol
        else:
            pick = Picked(tables.nodes[symbol])
            each = sympy.Integer(1)
            if at_class != 1:
                rows *= at(tables, Classes(at_class), pick.index)
        found[pick] = found.get(pick, sympy.Integer(0)) + rows * each
    return found


def _of_row(tables: Tables, factor: Any) -> Expr:
    """The sum of a row's incoming gradients of picks."""
    spread = [s for s in symbols_of(factor) if isinstance(s, SpreadOperand)]
    if spread and len(factor.atoms(SpreadOperand)) > 1:
        raise Unknown("has several gradients at several classes")
    return factor.xreplace({s: tables.sum_of(s) for s in spread})


def _powers(base: Base, expr: Any) -> Powers:
    found: Powers = {}
    for term in sympy.Add.make_args(expr) if expr != 0 else ():
        classes = [s for s in symbols_of(term) if has_classes(s)]
        rows, rest = term.as_independent(*classes, as_Add=False) if classes else (term, 1)
        key = _power(base, rest)
        found[key] = found.get(key, sympy.Integer(0)) + rows
    return found


def _power(base: Base, rest: Any) -> tuple[int, int, Symbol | None]:
    for a, b in itertools.product(range(HIGHEST_POWER + 1), repeat=2):
        weight = rest / sympy.exp(a * base.log) / base.log**b
        if weight == 1:
            return a, b, None
        if isinstance(weight, OF_CLASS):
            return a, b, weight
    raise Unknown(f"`{rest}` is in no gradient of a moment")


def _moments(powers: Powers, a: int, weight: Symbol | None) -> dict[Any, Expr]:
    """The incoming gradients of the moments with one power of the softmax; takes what they explain
    out of ``powers``: the slope of ``exp(a l) l**b`` is ``exp(a l) (a l**b + b l**(b - 1))``."""
    found: dict[Any, Expr] = {}
    for b in range(HIGHEST_POWER, -1, -1):
        moment = Moment(a, b)
        highest = b if a else b - 1
        if highest < 0 or (moment == TOTAL and weight is None):
            continue
        factor = sympy.expand(powers.pop((a, highest, weight), sympy.Integer(0)))
        if factor == 0:
            continue
        found[Summed(moment, weight)] = factor / (a or b)
        if a and b:
            key = a, b - 1, weight
            powers[key] = powers.get(key, sympy.Integer(0)) - b * factor / a
    return found


def _sigma(tables: Tables, base: Base, summed: Summed, classes: Any) -> Expr:
    """The number by which the softmax is multiplied in the slope of a moment, with its sign."""
    total: Any = sympy.Integer(0)
    for factor, moment in for_slope(summed.moment):
        if moment == TOTAL and summed.weight is None:
            total += factor
        elif moment == Moment(0, 0) and summed.weight is None and isinstance(classes, int):
            total += factor * classes
        elif moment == Moment(0, 0, None) and summed.weight is not None:
            total += factor * tables.sum_of(summed.weight)
        else:
            total += factor * tables.output(base, Summed(moment, summed.weight))
    return total
