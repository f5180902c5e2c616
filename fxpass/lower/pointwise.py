"""The table of functions of one logit: an ATen function's name → its expression.

In: a name (``tanh``, ``mul``, ``clamp``; see :mod:`fxpass.graph.functions`) and a call's arguments.
Out: an expression::

    >>> list(POINTWISE["clamp"].signature)
    ['input', 'min', 'max']
    >>> POINTWISE["clamp"].value(sympy.Symbol("z"), exact(-5), exact(5))
    minimum(maximum(z, -5), 5)

At a corner, an expression makes the comparison of PyTorch's backward. The table has functions that
programs apply to logits before a loss: scales, soft-caps, clamps, masks. Others run in a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import sympy
from sympy import Expr

from fxpass.formula.expression import Z
from fxpass.formula.functions import Where, call, exact, where
from fxpass.graph.nodes import REQUIRED
from fxpass.lower.records import HotOperand, RowOperand


@dataclass(frozen=True)
class Spelling:
    """A function of one logit and of numbers.

    Attributes:
        signature: its parameters in order, with their defaults.
        value: a function of all parameters by position that returns the expression. Tensors are
            expressions, numbers are exact rationals; None, booleans and strings are unchanged. A
            ``ValueError`` tells the user why the call is no logit transform.
    """

    signature: Mapping[str, Any]
    value: Callable[..., Expr]


# Operations in the operands of a function. An expression is a tree: a tensor that a program uses
# twice, as in z + tanh(z), has its operations there twice; after 24 such steps, 2**24 times.
MOST_OPERATIONS = 200


def check_size(operands: Iterable[Any]) -> None:
    """``ValueError`` if expressions are too large to be one function of a logit."""
    trees = (sympy.preorder_traversal(o) for o in operands if isinstance(o, Expr))
    n = len([*islice(chain.from_iterable(trees), MOST_OPERATIONS + 1)])
    if n > MOST_OPERATIONS:
        raise ValueError(f"functions of more than {MOST_OPERATIONS} operations are not fused")


# ---------------------------------------------------------------- meanings


def _pow(base: Any, exponent: Any) -> Expr:
    exponent = _number("exponent", exponent)
    if abs(exponent) > 64:
        raise ValueError(f"exponents beyond 64 are not fused, got {float(exponent):g}")
    if exponent.q == 2:
        return call("sqrt", base) ** (2 * exponent)
    return base**exponent


def _div(x: Any, y: Any, rounding_mode: Any) -> Expr:
    if rounding_mode is not None:
        raise ValueError(f"rounding_mode={rounding_mode!r} is not fused")
    if y == 0:
        raise ValueError("it divides by zero")
    return x / y


def _clamp(x: Any, low: Any, high: Any) -> Expr:
    x = x if low is None else call("maximum", x, _number("min", low))
    return x if high is None else call("minimum", x, _number("max", high))


def _number(name: str, value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return exact(value)
    if not isinstance(value, sympy.Rational):
        raise ValueError(f"{name}= is not a number")
    return value


# ---------------------------------------------------------------- the table


def _where(condition: Any, x: Any, y: Any) -> Expr:
    if isinstance(condition, HotOperand):
        if x.has(sympy.S.NegativeInfinity) or y.has(sympy.S.NegativeInfinity):
            raise ValueError("masks one class of each row")
        return condition * x + (1 - condition) * y
    if isinstance(condition, Where) and condition.args[2:] == (1, 0):
        return condition.func(*condition.args[:2], x, y)  # type: ignore[return-value]
    return where(condition, ">", 0, x, y)


def spelling(value: Callable[..., Any], /, operands: int = 1, **parameters: Any) -> Spelling:
    """The spelling of a function, whose ``value`` takes the operands and the parameters."""
    required = dict.fromkeys(("input", "other", "third")[:operands], REQUIRED)
    return Spelling(required | parameters, value)


def _unary(name: str) -> Spelling:
    return spelling(lambda x: call(name, x))


_UNARY = ("exp", "log", "sqrt", "sign", "abs", "sigmoid", "tanh")

POINTWISE: dict[str, Spelling] = {
    **{name: _unary(name) for name in _UNARY},
    "add": spelling(lambda x, y, alpha: x + alpha * y, operands=2, alpha=1),
    "sub": spelling(lambda x, y, alpha: x - alpha * y, operands=2, alpha=1),
    "rsub": spelling(lambda x, y, alpha: y - alpha * x, operands=2, alpha=1),
    "mul": spelling(lambda x, y: x * y, operands=2),
    "div": spelling(_div, operands=2, rounding_mode=None),
    "pow": spelling(_pow, exponent=REQUIRED),
    "neg": spelling(lambda x: -x),
    "fma": spelling(lambda x, y, z: x * y + z, operands=3),
    "positive": spelling(lambda x: x),
    "square": spelling(lambda x: x**2),
    "rsqrt": spelling(lambda x: 1 / call("sqrt", x)),
    "reciprocal": spelling(lambda x: 1 / x),
    "clamp": spelling(_clamp, min=None, max=None),
    "clamp_min": spelling(lambda x, low: _clamp(x, low, None), min=REQUIRED),
    "clamp_max": spelling(lambda x, high: _clamp(x, None, high), max=REQUIRED),
    "relu": spelling(lambda x: where(x, "<=", 0, 0, x)),
}

# Functions of masks, and comparisons, whose value is 1 or 0.
MASKS: dict[str, Spelling] = {
    **{
        name: spelling(lambda x, y, sign=sign: where(x, sign, y, 1, 0), operands=2)
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    },
    "where": spelling(_where, operands=3),
    "masked_fill": spelling(lambda x, mask, y: _where(mask, y, x), mask=REQUIRED, value=REQUIRED),
}


# ---------------------------------------------------------------- with a softmax


def expanded_exp(x: Expr) -> Expr:
    """The exponential of a sum as a product of exponentials."""
    return sympy.expand(sympy.exp(sympy.expand(x)), power_exp=True, mul=False)


def expanded_log(x: Expr) -> Expr:
    """The logarithm of a product as a sum. A softmax is positive; a logit may be negative."""
    if x.has(Z):
        raise ValueError("a logarithm of logits is not fused")
    others = [f for f in sympy.Mul.make_args(x) if not isinstance(f, sympy.exp)]
    if any(f.is_number and not f.is_positive for f in others):
        raise ValueError("a logarithm of a negative number is not fused")
    if sum(not f.is_number for f in others) > 1 or any(f.is_Pow for f in others):
        raise ValueError("a logarithm of a product, of which two factors may be negative")
    return sympy.expand_log(sympy.log(x), force=True)


def _xlogy(x: Expr, y: Expr) -> Expr:
    """``x log y``, which is 0 where x is 0. So is a moment if x is a multiple of a softmax."""
    log = expanded_log(y)
    if not x.has(sympy.exp):
        raise ValueError("its first operand is not a softmax")
    if any(isinstance(s, RowOperand) for s in x.free_symbols):
        raise ValueError("a factor of a row may be 0")
    return x * log


def _unbounded(x: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """A clamp to finite numbers is no clamp: a moment adds 0 where a log-softmax is infinite."""
    if high is not None or low is None or not low.is_number or low > -1e30:
        raise ValueError("a clamped softmax is not fused")
    return x


# Functions of any expressions, with the parameters of POINTWISE, in sympy's own functions.
ALGEBRA: dict[str, Spelling] = {
    "exp": spelling(expanded_exp),
    "log": spelling(expanded_log),
    "clamp": spelling(_unbounded, min=None, max=None),
    "clamp_min": spelling(lambda x, low: _unbounded(x, low, None), min=REQUIRED),
    "entr": spelling(lambda x: -_xlogy(x, x)),
    "xlogy": spelling(_xlogy, operands=2),
}

# Functions of expressions with row symbols.
OF_ROWS = (
    *("add", "sub", "rsub", "mul", "fma", "div", "neg", "positive", "square", "pow"),
    *("exp", "log", "entr", "xlogy"),
)
