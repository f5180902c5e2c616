"""Counts the copies of a block of logits that exist beside it at once.

In: a computation. Out: the number of its temporaries of the size of a block, for the plan of rows
and classes::

    >>> block_copies(Reductions(("pick",), gradients=("x",)), scaled=False, backward=True)
    0
    >>> block_copies(Reductions(("pick", Moment(1, 1))), scaled=False, backward=False)
    2
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import sympy

from fxpass.formula import expression
from fxpass.formula.expression import Z, given_in
from fxpass.formula.outputs import TOTAL, Moment, Output, of_one_softmax
from fxpass.formula.reductions import Reductions, raw_moments


@functools.lru_cache(maxsize=1024)
def block_copies(spec: Reductions, scaled: bool, backward: bool) -> int:
    """Copies of a block of logits that :mod:`fxpass.aten.reductions` needs at once; ``scaled``:
    rows have a scale; ``backward``: this run computes the gradients of the spec."""
    rounded = int(spec.rounds_logits)  # of 16 bits
    if not (backward and spec.gradients):
        return max(rounded, _of_sums(spec, scaled, keep=False))
    if not spec.total:
        return max(rounded, _of_slope(spec, spec.rows, scaled))
    keep = not of_one_softmax(spec.total)
    return max(_of_sums(spec, scaled, keep), _of_slope(spec, spec.total, scaled))


def _of_sums(spec: Reductions, scaled: bool, keep: bool) -> int:
    """Copies for the sums; ``keep``: their exponentials may not overwrite the logits."""
    read = (*spec.outputs, *spec.total)
    transformed = int(spec.transform != Z)
    value = _of_expression(spec.transform)
    moments = raw_moments(read)
    # the terms of a sum, or the powers of one; its weights, and their product
    terms = int(keep or moments not in ((), (TOTAL,)))
    terms += terms and any(moment.b > 0 for moment in moments)
    if spec.weight_positions:
        terms = 3
    return max(value, transformed + scaled, max(transformed, scaled) + terms)


def _of_slope(spec: Reductions, outputs: Sequence[Output], scaled: bool) -> int:
    """Copies for the gradient of some outputs."""
    transformed = int(spec.transform != Z)
    value = _of_expression(spec.transform)
    slope = _of_expression(expression.derivative(spec.transform)) if transformed else 0
    # the transformed logits become the gradient; else there are a softmax, a term and its weights
    terms = 0
    if not of_one_softmax(outputs):
        weighted = any(isinstance(o, Moment) and o.weight is not None for o in outputs)
        terms = 3 + weighted
        slope = 1 + slope
    return max(value, transformed + scaled + max(terms, slope))


def _of_expression(expr: Any) -> int:
    """Copies of z that exist at once where an expression is evaluated, its operands and its result
    included, by :meth:`fxpass.formula.operands.Operands.evaluate`."""
    return len(given_in(expr)) + _copies(expr)


def _copies(expr: Any) -> int:
    """Copies of z that exist at once in :func:`expression.evaluate`, its result included."""
    if isinstance(expr, sympy.Symbol):
        return 0
    if expr.is_number:
        return 1
    joined = isinstance(expr, sympy.Add | sympy.Mul)
    alive = 0
    most = 1
    for operand in expr.args:
        if operand.is_number:
            continue
        most = max(most, alive + _copies(operand))
        alive = 1 if joined else alive + (not isinstance(operand, sympy.Symbol))
    return most if joined else max(most, alive + 1 + isinstance(expr, expression.Where))
