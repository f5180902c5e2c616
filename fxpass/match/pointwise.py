"""The table of spellings of functions of one logit: a node's target → its expression.

In: a target (``torch.tanh``, ``operator.mul``, the method name ``"clamp"``) and a call's arguments.
Out: an expression::

    >>> signature = POINTWISE["clamp"].signature  # input, min, max, inplace, out
    >>> POINTWISE["clamp"].value(sympy.Symbol("z"), exact(-5), exact(5), False, None)
    minimum(maximum(z, -5), 5)

A name has one meaning in torch, ``torch.nn.functional``, ``torch.special``, ``operator`` and as a
method. So one name makes a row of :data:`POINTWISE` for each place where it exists.

At a corner, an expression makes the comparison of PyTorch's backward. The table lacks functions
that are not of one logit (``softmax``, ``torch.maximum``), have no useful slope (``round``), are
random (``rrelu``), depend on the dtype (``nan_to_num``, ``float_power``), or are rarely applied to
logits (``lgamma``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from sympy import Expr

from fxpass.graph.nodes import REQUIRED, Target
from fxpass.spec.functions import call, exact, where


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


# ---------------------------------------------------------------- meanings


def _pow(base: Any, exponent: Any) -> Expr:
    if base.is_number:
        if base <= 0:
            raise ValueError(f"its base has to be positive, got {float(base):g}")
        return call("exp2", exponent * exact(math.log2(base)))
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


def _leaky_relu(x: Any, slope: Any) -> Expr:
    return where(x, ">", 0, x, _number("negative_slope", slope) * x)


def _elu(x: Any, alpha: Any) -> Expr:
    return where(x, "<=", 0, _number("alpha", alpha) * call("expm1", x), x)


def _celu(x: Any, alpha: Any) -> Expr:
    alpha = _number("alpha", alpha)
    if alpha == 0:
        raise ValueError("alpha=0 divides by zero")
    return where(x, "<=", 0, alpha * call("expm1", x / alpha), x)


def _selu(x: Any) -> Expr:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return where(x, "<=", 0, exact(scale * alpha) * call("expm1", x), exact(scale) * x)


def _gelu(x: Any, approximate: Any) -> Expr:
    if approximate == "tanh":
        inner = x + exact(0.044715) * x**3
        return x * (1 + sympy.tanh(exact(math.sqrt(2 / math.pi)) * inner)) / 2
    return x * (1 + call("erf", exact(math.sqrt(0.5)) * x)) / 2


def _softplus(x: Any, beta: Any, threshold: Any) -> Expr:
    beta, threshold = _number("beta", beta), _number("threshold", threshold)
    if beta == 0:
        raise ValueError("beta=0 divides by zero")
    return where(beta * x, ">", threshold, x, call("softplus", beta * x) / beta)


def _hardtanh(x: Any, low: Any, high: Any) -> Expr:
    low, high = _number("min_val", low), _number("max_val", high)
    return where(x, "<=", low, low, where(x, ">=", high, high, x))


def _hardswish(x: Any) -> Expr:
    return where(x, "<=", -3, 0, where(x, "<", 3, x * (x + 3) / 6, x))


def _hardshrink(x: Any, lambd: Any) -> Expr:
    return where(call("abs", x), "<=", _number("lambd", lambd), 0, x)


def _softshrink(x: Any, lambd: Any) -> Expr:
    lambd = _number("lambd", lambd)
    return where(call("abs", x), "<=", lambd, 0, x - lambd * call("sign", x))


def _threshold(x: Any, threshold: Any, value: Any) -> Expr:
    return where(x, "<=", _number("threshold", threshold), _number("value", value), x)


# ---------------------------------------------------------------- the table


def _rows(
    names: str, value: Callable[..., Any], /, operands: int = 1, **parameters: Any
) -> Iterator[tuple[Target, Spelling]]:
    """A row for every place where one of the names exists.

    ``value`` takes the operands and the parameters. In signatures, ``inplace`` and ``out`` follow.
    """

    def of_call(*arguments: Any) -> Expr:
        *used, _, out = arguments  # chain_node.py reads whether the call is in place
        if out is not None:
            raise ValueError("it writes to out=")
        return value(*used)

    required = dict.fromkeys(("input", "other")[:operands], REQUIRED)
    signature = {**required, **parameters, "inplace": False, "out": None}
    function = Spelling(signature, of_call)
    for name in names.split():
        for place in (torch, F, torch.special, operator):
            if target := getattr(place, name, None):
                yield target, function
        if hasattr(torch.Tensor, name):
            yield name, function


def _function(name: str) -> Callable[[Any], Expr]:
    return lambda x: call(name, x)


_SAME = (
    "exp",
    "expm1",
    "exp2",
    "log",
    "log1p",
    "sqrt",
    "erf",
    "sin",
    "cos",
    "sinh",
    "cosh",
    "sign",
)

POINTWISE: dict[Target, Spelling] = dict(
    row
    for rows in (
        _rows("add", lambda x, y, alpha: x + alpha * y, operands=2, alpha=1),
        _rows("sub subtract", lambda x, y, alpha: x - alpha * y, operands=2, alpha=1),
        _rows("rsub", lambda x, y, alpha: y - alpha * x, operands=2, alpha=1),
        _rows("__radd__", lambda x, y: y + x, operands=2),
        _rows("__rsub__", lambda x, y: y - x, operands=2),
        _rows("mul multiply __rmul__", lambda x, y: x * y, operands=2),
        _rows("div divide true_divide truediv", _div, operands=2, rounding_mode=None),
        _rows("__rtruediv__ __rdiv__", lambda x, y: _div(y, x, None), operands=2),
        _rows("pow", _pow, exponent=REQUIRED),
        _rows("__rpow__", lambda x, y: _pow(y, x), operands=2),
        _rows("neg negative", lambda x: -x),
        _rows("positive pos", lambda x: x),
        _rows("square", lambda x: x**2),
        _rows("rsqrt", lambda x: 1 / call("sqrt", x)),
        _rows("reciprocal", lambda x: 1 / x),
        _rows("abs absolute", _function("abs")),
        *(_rows(name, _function(name)) for name in _SAME),
        _rows("log2", lambda x: exact(1 / math.log(2)) * call("log", x)),
        _rows("log10", lambda x: exact(1 / math.log(10)) * call("log", x)),
        _rows("atan arctan", _function("atan")),
        _rows("asinh arcsinh", _function("asinh")),
        _rows("tanh", sympy.tanh),
        _rows("sigmoid expit", _function("sigmoid")),
        _rows("logsigmoid", lambda x: -call("softplus", -x)),
        _rows("softplus", _softplus, beta=1.0, threshold=20.0),
        _rows("clamp clip", _clamp, min=None, max=None),
        _rows("clamp_min", lambda x, low: _clamp(x, low, None), min=REQUIRED),
        _rows("clamp_max", lambda x, high: _clamp(x, None, high), max=REQUIRED),
        _rows("relu", lambda x: where(x, "<=", 0, 0, x)),
        _rows("relu6", lambda x: _hardtanh(x, 0, 6)),
        _rows("leaky_relu", _leaky_relu, negative_slope=0.01),
        _rows("elu", _elu, alpha=1.0),
        _rows("celu", _celu, alpha=1.0),
        _rows("selu", _selu),
        _rows("gelu", _gelu, approximate="none"),
        _rows("silu", lambda x: x * call("sigmoid", x)),
        _rows("mish", lambda x: x * sympy.tanh(call("softplus", x))),
        _rows("hardtanh", _hardtanh, min_val=-1.0, max_val=1.0),
        _rows("hardsigmoid", lambda x: where(x, "<=", -3, 0, where(x, ">=", 3, 1, (x + 3) / 6))),
        _rows("hardswish", _hardswish),
        _rows("hardshrink", _hardshrink, lambd=0.5),
        _rows("softshrink", _softshrink, lambd=0.5),
        _rows("softsign", lambda x: x / (1 + call("abs", x))),
        _rows("tanhshrink", lambda x: x - sympy.tanh(x)),
        _rows("threshold", _threshold, threshold=REQUIRED, value=REQUIRED),
    )
    for row in rows
)


def _in_place() -> Iterator[tuple[Target, Target]]:
    for target in POINTWISE:
        name = target if isinstance(target, str) else target.__name__
        for place in (torch, F):
            if getattr(place, name, None) is target and hasattr(place, f"{name}_"):
                yield getattr(place, f"{name}_"), target
        if isinstance(target, str) and hasattr(torch.Tensor, f"{name}_"):
            yield f"{name}_", target
        if getattr(operator, name, None) is target and hasattr(operator, f"i{name}"):
            yield getattr(operator, f"i{name}"), target


# Spelling that writes to its first operand → the same function out of place.
IN_PLACE: dict[Target, Target] = dict(_in_place())
