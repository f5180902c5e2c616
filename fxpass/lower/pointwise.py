"""The table of functions of one logit: an ATen function's name → its expression.

In: a name (``tanh``, ``mul``, ``clamp``; see :mod:`fxpass.graph.functions`) and a call's arguments.
Out: an expression::

    >>> signature = POINTWISE["clamp"].signature  # input, min, max, inplace, out
    >>> POINTWISE["clamp"].value(sympy.Symbol("z"), exact(-5), exact(5), False, None)
    minimum(maximum(z, -5), 5)

At a corner, an expression makes the comparison of PyTorch's backward. The table has what programs
apply to logits before a loss: scales, soft-caps, clamps, masks. Other functions run in a region.
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
            given as expressions, numbers as exact rationals, and None, booleans and strings as
            they are. Its ``ValueError`` tells the user why the call is no logit transform.
    """

    signature: Mapping[str, Any]
    value: Callable[..., Expr]


# Operations in the operands of a function. An expression is a tree: where a program uses a tensor
# twice, as in z + tanh(z), its operations are there twice, and after 24 times 2**24 times.
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


def row(value: Callable[..., Any], /, operands: int = 1, **parameters: Any) -> Spelling:
    """The row of a function. ``value`` takes the operands and the parameters; in the signature,
    ``inplace`` and ``out`` follow."""

    def of_call(*arguments: Any) -> Expr:
        *used, _, out = arguments  # the reader asks the schema whether the call is in place
        if out is not None:
            raise ValueError("it writes to out=")
        return value(*used)

    required = dict.fromkeys(("input", "other", "third")[:operands], REQUIRED)
    return Spelling({**required, **parameters, "inplace": False, "out": None}, of_call)


def _same(name: str) -> Spelling:
    return row(lambda x: call(name, x))


_UNARY = ("exp", "log", "sqrt", "sign", "abs", "sigmoid", "tanh")

POINTWISE: dict[str, Spelling] = {
    **{name: _same(name) for name in _UNARY},
    "add": row(lambda x, y, alpha: x + alpha * y, operands=2, alpha=1),
    "sub": row(lambda x, y, alpha: x - alpha * y, operands=2, alpha=1),
    "rsub": row(lambda x, y, alpha: y - alpha * x, operands=2, alpha=1),
    "mul": row(lambda x, y: x * y, operands=2),
    "div": row(_div, operands=2, rounding_mode=None),
    "pow": row(_pow, exponent=REQUIRED),
    "neg": row(lambda x: -x),
    "fma": row(lambda x, y, z: x * y + z, operands=3),
    "positive": row(lambda x: x),
    "square": row(lambda x: x**2),
    "rsqrt": row(lambda x: 1 / call("sqrt", x)),
    "reciprocal": row(lambda x: 1 / x),
    "clamp": row(_clamp, min=None, max=None),
    "clamp_min": row(lambda x, low: _clamp(x, low, None), min=REQUIRED),
    "clamp_max": row(lambda x, high: _clamp(x, None, high), max=REQUIRED),
    "relu": row(lambda x: where(x, "<=", 0, 0, x)),
}

# Functions of masks, and comparisons, which give 1 or 0.
MASKS: dict[str, Spelling] = {
    **{
        name: row(lambda x, y, sign=sign: where(x, sign, y, 1, 0), operands=2)
        for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    },
    "where": Spelling(
        {"condition": REQUIRED, "input": REQUIRED, "other": REQUIRED, "out": None},
        lambda condition, x, y, _: _where(condition, x, y),
    ),
    "masked_fill": row(lambda x, mask, y: _where(mask, y, x), mask=REQUIRED, value=REQUIRED),
}


# ---------------------------------------------------------------- with a softmax

# Functions of any expressions, with the parameters of POINTWISE, and their sympy form. In a
# division the sign of a zero may be lost; the operands are sums and products of finite values.
ALGEBRA: dict[str, Spelling] = {
    "exp": row(lambda x: exponential(x)),
    "log": row(lambda x: logarithm(x)),
    "clamp": row(lambda x, low, high: _unbounded(x, low, high), min=None, max=None),
    "clamp_min": row(lambda x, low: _unbounded(x, low, None), min=REQUIRED),
    "entr": row(lambda x: -_xlogy(x, x)),
    "xlogy": row(lambda x, y: _xlogy(x, y), operands=2),
}

# Those of expressions with row symbols.
OF_ROWS = (
    *("add", "sub", "rsub", "mul", "fma", "div", "neg", "positive", "square", "pow"),
    *("exp", "log", "entr", "xlogy"),
)


def exponential(x: Expr) -> Expr:
    """As a product of exponentials."""
    return sympy.expand(sympy.exp(sympy.expand(x)), power_exp=True, mul=False)


def logarithm(x: Expr) -> Expr:
    """The logarithm of a softmax, which is positive: a logit may not be."""
    if x.has(Z):
        raise ValueError("a logarithm of logits is not fused")
    others = [f for f in sympy.Mul.make_args(x) if not isinstance(f, sympy.exp)]
    if any(f.is_number and not f.is_positive for f in others):
        raise ValueError("a logarithm of a negative number is not fused")
    if sum(not f.is_number for f in others) > 1 or any(f.is_Pow for f in others):
        raise ValueError("a logarithm of a product, of which two factors may be negative")
    return sympy.expand_log(sympy.log(x), force=True)


def _xlogy(x: Expr, y: Expr) -> Expr:
    """Where x is 0, so is the product: a moment has this only if x is a multiple of a softmax."""
    log = logarithm(y)
    if not x.has(sympy.exp):
        raise ValueError("its first operand is not a softmax")
    if any(isinstance(s, RowOperand) for s in x.free_symbols):
        raise ValueError("a factor of a row may be 0")
    return x * log


def _unbounded(x: Expr, low: Expr | None, high: Expr | None) -> Expr:
    """A clamp to finite numbers: where the softmax is 0, an infinite log-softmax counts nothing."""
    if high is not None or low is None or not low.is_number or low > -1e30:
        raise ValueError("a clamped softmax is not fused")
    return x
