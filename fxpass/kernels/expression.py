"""Prints a logit transform and its slope as Triton functions.

In: the expression that a graph applies to one logit. Out: the source of ``transform`` and of
``transform_and_slope``, in f32 arithmetic, and of the functions they call::

    >>> print(functions(expression.parse("z*z/2"))[-1])
    @triton.jit
    def transform_and_slope(z):
        return 0.5 * (z * z), z
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sympy
from sympy import Expr, Symbol

from fxpass.spec import expression
from fxpass.spec.expression import L, operands
from fxpass.spec.functions import FUNCTIONS, Where


def unit_slope(logits: Expr) -> tuple[Expr, Expr]:
    """The derivative as a constant times an expression whose largest coefficient is one.

    The constant is applied in f32 after the GEMMs; in an fp16 gradient it would over- or underflow.
    """
    return normalized(expression.derivative(logits))


def normalized(expr: Any) -> tuple[Any, Any]:
    """An expression as a constant times an expression whose largest coefficient is one."""
    if expr.is_number:
        return expr, sympy.Integer(1)
    factor, rest = expr.as_coeff_Mul()
    if isinstance(rest, sympy.Add):
        terms = [normalized(term) for term in rest.args]
        largest = max(abs(coefficient) for coefficient, _ in terms)
        return factor * largest, sympy.Add(*(c / largest * term for c, term in terms))
    if isinstance(rest, Where):
        x, y, *branches = rest.args
        units = [normalized(branch) for branch in branches]
        largest = max(abs(coefficient) for coefficient, _ in units)
        return factor * largest, rest.func(x, y, *(c / largest * unit for c, unit in units))
    if isinstance(rest, sympy.Mul):
        units = [normalized(part) if isinstance(part, Where) else (1, part) for part in rest.args]
        coefficients, parts = zip(*units, strict=True)
        return sympy.Mul(factor, *coefficients), sympy.Mul(*parts)
    return factor, rest


# The source of all functions that a transform may call beside those of ``tl``. It is read, not
# imported, because it imports triton.
LIBRARY = "".join(
    Path(__file__).with_name("functions.py").read_text(encoding="utf-8").partition("@")[1:]
)


def functions(logits: Expr) -> list[str]:
    """The source of ``transform``, and of ``transform_and_slope``, which returns both, unless the
    unit slope is a constant; ``logits``: the transformed logit."""
    unit = unit_slope(logits)[1]
    out = [function("transform", logits)]
    if not unit.is_number:
        out.append(function("transform_and_slope", logits, unit))
    return out


def parameters(expr: Expr) -> list[str]:
    """The names of what an expression reads, in the order of :func:`function`'s parameters."""
    beside = (f"{kind}{i}" for kind, i in operands(expr))
    return ["z", *(["l"] if expr.has(L) else []), *beside]


def function(name: str, *values: Expr) -> str:
    """A function that returns expressions of what the first one reads; common subexpressions are
    computed once."""
    # The base of an integer power is printed several times; as an extra value, cse names it.
    powers = [p for value in values for p in value.atoms(sympy.Pow) if p.exp.is_Integer]
    bases = sorted({p.base for p in powers if not p.base.is_Atom}, key=sympy.default_sort_key)
    shared, results = sympy.cse([*values, *bases], symbols=sympy.numbered_symbols("u"))
    lines = [f"{symbol} = {text(value)}" for symbol, value in shared]
    lines.append(f"return {', '.join(text(result) for result in list(results)[: len(values)])}")
    define = f"def {name}({', '.join(parameters(values[0]))}):"
    return "\n".join(["@triton.jit", define, *(f"    {line}" for line in lines)])


_SUM, _PRODUCT, _ATOM = 0, 1, 2

# The functions of :mod:`fxpass.spec.functions` that ``tl`` has.
_BUILT_IN = {name: f"tl.{name}" for name in ("exp", "exp2", "log", "erf", "abs", "sin", "cos")}
_BUILT_IN["sqrt"] = "tl.sqrt_rn"


def text(expr: Any, level: int = _SUM) -> str:
    """An expression of f32 numbers in Triton, in parentheses if its precedence is lower than
    ``level``."""
    out, strength = _written(expr)
    return f"({out})" if strength < level else out


def _written(expr: Any) -> tuple[str, int]:
    """The text, and the precedence of its outermost operation."""
    if expr.is_number:
        return _number(expr)
    if isinstance(expr, Symbol):
        return expr.name, _ATOM
    if isinstance(expr, sympy.Add):
        first, *rest = (text(term) for term in expr.as_ordered_terms())
        joined = (f" - {t[1:]}" if t.startswith("-") else f" + {t}" for t in rest)
        return first + "".join(joined), _SUM
    if isinstance(expr, sympy.Mul):
        return _product(expr)
    if isinstance(expr, sympy.Pow):
        return _power(expr)
    args = [text(arg) for arg in expr.args]
    if isinstance(expr, Where):
        x, y, *branches = args
        first = f"{y} {expr.mirrored} {x}" if expr.args[0].is_number else f"{x} {expr.symbol} {y}"
        return f"tl.where({', '.join([first, *branches])})", _ATOM
    name = type(expr).__name__
    assert FUNCTIONS[name].symbolic is type(expr), expr
    return f"{_BUILT_IN.get(name, name)}({', '.join(args)})", _ATOM


def _number(number: Expr) -> tuple[str, int]:
    value = float(number)
    # Triton makes a double of a constant outside f32's range, where torch rounds it to f32.
    if abs(value) < 2.0**-126:
        value = 0.0
    elif abs(value) >= 2.0**128:
        return ('float("inf")' if value > 0 else '-float("inf")'), _PRODUCT
    return repr(value), _SUM if value < 0 else _ATOM


def _product(expr: sympy.Mul) -> tuple[str, int]:
    coefficient, rest = expr.as_coeff_Mul()
    parts = rest.as_ordered_factors()
    factors = " * ".join(text(part, _ATOM) for part in parts)
    if coefficient == 1:
        return factors, _PRODUCT
    if coefficient == -1:
        return f"-{factors if len(parts) > 1 else text(rest, _PRODUCT)}", _SUM
    return f"{_number(coefficient)[0]} * {factors}", _PRODUCT if coefficient > 0 else _SUM


def _power(expr: sympy.Pow) -> tuple[str, int]:
    base, exponent = expr.as_base_exp()
    if not exponent.is_Integer:
        return f"tl.exp({_number(exponent)[0]} * tl.log({text(base)}))", _ATOM
    product = " * ".join([text(base, _ATOM)] * abs(int(exponent)))
    if exponent > 0:
        return product, _PRODUCT
    return f"1.0 / {f'({product})' if exponent < -1 else product}", _PRODUCT
