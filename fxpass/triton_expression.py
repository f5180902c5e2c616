"""A logit transform and its slope as the text of Triton functions.

In: the expression that a graph applies to one logit. Out: the source of ``transform`` and, for
gradients, of ``transform_and_slope``, in f32 arithmetic, with what they call::

    >>> print(functions(expression.parse("z*z/2"), slope=True)[-1])
    @triton.jit
    def transform_and_slope(z):
        return 0.5 * (z * z), z
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
from sympy import Expr

from fxpass import expression


def unit_slope(logits: Expr) -> tuple[Expr, Expr]:
    """The derivative as a constant times an expression whose largest coefficient is one.

    The constant is applied in f32 after the GEMMs: an fp16 gradient would over- or underflow.
    """
    slope = expression.derivative(logits)
    if slope.is_number:
        return slope, sympy.Integer(1)
    factor, rest = slope.as_coeff_Mul()
    if isinstance(rest, sympy.Add):
        largest = max(abs(c) for c in rest.as_coefficients_dict().values())
        factor, rest = factor * largest, rest / largest
    return factor, rest


def functions(logits: Expr, slope: bool) -> list[str]:
    """The source of ``transform`` and of what it calls, one string per function.

    Args:
        logits: the transformed logit as an expression in the raw one.
        slope: whether to add ``transform_and_slope``, which returns both. It is left out where the
            unit slope is a constant.
    """
    out = [_function("transform", [logits])]
    unit = unit_slope(logits)[1]
    if slope and not unit.is_number:
        out.append(_function("transform_and_slope", [logits, unit]))
    used = {type(e) for e in sympy.preorder_traversal([logits, unit])}
    return [source for cls, source in FUNCTIONS.items() if cls in used] + out


def _function(name: str, values: list[Expr]) -> str:
    """A function of the raw logit ``z``; what its values have in common is computed once."""
    shared, results = sympy.cse(values, symbols=sympy.numbered_symbols("u"))
    lines = [f"{symbol} = {_text(value)}" for symbol, value in shared]
    lines.append(f"return {', '.join(_text(result) for result in results)}")
    return "\n".join(["@triton.jit", f"def {name}(z):", *(f"    {line}" for line in lines)])


# sympy function → the Triton function of that name; libdevice does not run in the interpreter.
FUNCTIONS: dict[type, str] = {
    sympy.tanh: '''\
@triton.jit
def tanh(x):
    """Within 2 ulp of the f32 nearest to tanh(x); the polynomial is Cephes' tanhf."""
    x2 = x * x
    p = -5.70498872745e-3
    p = p * x2 + 2.06390887954e-2
    p = p * x2 - 5.37397155531e-2
    p = p * x2 + 1.33314422036e-1
    p = p * x2 - 3.33332819422e-1
    e = tl.exp(-2.0 * tl.abs(x))
    large = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, x + x * x2 * p, tl.where(x < 0.0, -large, large))''',
}

_SUM, _PRODUCT, _ATOM = 0, 1, 2


def _text(expr: Any, level: int = _SUM) -> str:
    """The expression in Triton, in parentheses where it binds less than ``level``."""
    write = _number if expr.is_number else _WRITERS[type(expr)]
    out, strength = write(expr)
    return f"({out})" if strength < level else out


def _number(number: Expr) -> tuple[str, int]:
    value = float(number)
    # Triton would make doubles of what f32 cannot hold; torch rounds it to f32.
    if abs(value) < 2.0**-126:
        value = 0.0
    elif abs(value) >= 2.0**128:
        return ('float("inf")' if value > 0 else '-float("inf")'), _PRODUCT
    return repr(value), _SUM if value < 0 else _ATOM


def _sum(expr: sympy.Add) -> tuple[str, int]:
    first, *rest = (_text(term, _SUM) for term in expr.as_ordered_terms())
    joined = (f" - {t[1:]}" if t.startswith("-") else f" + {t}" for t in rest)
    return first + "".join(joined), _SUM


def _product(expr: sympy.Mul) -> tuple[str, int]:
    coefficient, rest = expr.as_coeff_Mul()
    parts = rest.as_ordered_factors()
    factors = " * ".join(_text(part, _ATOM) for part in parts)
    if coefficient == 1:
        return factors, _PRODUCT
    if coefficient == -1:
        return f"-{factors if len(parts) > 1 else _text(rest, _PRODUCT)}", _SUM
    return f"{_number(coefficient)[0]} * {factors}", _PRODUCT if coefficient > 0 else _SUM


def _power(expr: sympy.Pow) -> tuple[str, int]:
    base, exponent = expr.as_base_exp()
    if not exponent.is_Integer:
        return f"tl.exp({_number(exponent)[0]} * tl.log({_text(base)}))", _ATOM
    product = " * ".join([_text(base, _ATOM)] * abs(int(exponent)))
    if exponent > 0:
        return product, _PRODUCT
    return f"1.0 / {f'({product})' if exponent < -1 else product}", _PRODUCT


def _call(expr: Expr) -> tuple[str, int]:
    (argument,) = expr.args
    return f"{type(expr).__name__}({_text(argument)})", _ATOM


_WRITERS: dict[type, Callable[[Any], tuple[str, int]]] = {
    sympy.Symbol: lambda symbol: (str(symbol), _ATOM),
    sympy.Add: _sum,
    sympy.Mul: _product,
    sympy.Pow: _power,
    **dict.fromkeys(FUNCTIONS, _call),
}
