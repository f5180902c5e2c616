"""Prints a logit transform and its slope as Triton functions.

In: the expression that a graph applies to one logit. Out: the source of ``transform`` and of
``transform_and_slope``, in f32 arithmetic, and of the functions they call::

    >>> print(transform_functions(expression.parse("z*z/2"))[-1])
    @triton.jit
    def transform_and_slope(z):
        return 0.5 * (z * z), z
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sympy
from sympy import Expr

from fxpass.formula import expression
from fxpass.formula.expression import ATOM, PRODUCT, SUM, Printer, Z, given_in
from fxpass.formula.functions import Where


def unit_slope(logits: Expr) -> tuple[Expr, Expr]:
    """The derivative, :func:`factored`.

    The constant is applied in f32 after the GEMMs; in an fp16 gradient it would over- or underflow.
    """
    return factored(expression.derivative(logits))


def factored(expr: Any) -> tuple[Any, Any]:
    """An expression as a constant times an expression whose largest coefficient is one."""
    if expr.is_number:
        return expr, sympy.Integer(1)
    factor, rest = expr.as_coeff_Mul()
    if isinstance(rest, sympy.Add):
        terms = [factored(term) for term in rest.args]
        largest = max(abs(coefficient) for coefficient, _ in terms)
        return factor * largest, sympy.Add(*(c / largest * term for c, term in terms))
    if isinstance(rest, Where):
        x, y, *branches = rest.args
        units = [factored(branch) for branch in branches]
        largest = max(abs(coefficient) for coefficient, _ in units)
        return factor * largest, rest.func(x, y, *(c / largest * unit for c, unit in units))
    if isinstance(rest, sympy.Mul):
        units = [factored(part) if isinstance(part, Where) else (1, part) for part in rest.args]
        coefficients, parts = zip(*units, strict=True)
        return sympy.Mul(factor, *coefficients), sympy.Mul(*parts)
    return factor, rest


# Functions whose absolute value is at most 1.
_AT_MOST_ONE = ("tanh", "sigmoid", "sign")


def upper_bound(expr: Any) -> Expr:
    """An upper bound of the absolute value, from numbers and upper bounds of given values; z stands
    for a factor without a bound.

    >>> [upper_bound(expression.parse(e)) for e in ("given0*(1-tanh(z/30)**2)", "2*exp(z)")]
    [2*given0, 2*z]
    """
    if expr.is_number:
        return abs(expr)
    if expr.is_Symbol:
        return expr
    if isinstance(expr, Where):
        return sympy.Add(*map(upper_bound, expr.args[2:]))
    if isinstance(expr, sympy.Add | sympy.Mul):
        return expr.func(*map(upper_bound, expr.args))
    if isinstance(expr, sympy.Pow):
        return upper_bound(expr.base) ** expr.exp if expr.exp > 0 else Z
    return sympy.Integer(1) if type(expr).__name__ in _AT_MOST_ONE else Z


# The source of all functions that a transform may call beside those of ``tl``. The module is read,
# not imported, because it imports triton.
LIBRARY = "".join(
    Path(__file__).with_name("functions.py").read_text(encoding="utf-8").partition("@")[1:]
)


def transform_functions(logits: Expr) -> list[str]:
    """The source of ``transform``; and of ``transform_and_slope``, which returns both, unless the
    unit slope is a constant. ``logits``: the transformed logit."""
    unit = unit_slope(logits)[1]
    functions = [function_source("transform", logits)]
    if not unit.is_number:
        functions.append(function_source("transform_and_slope", logits, unit))
    return functions


def _parameters(expr: Expr) -> list[str]:
    """The parameters of an expression's function."""
    return ["z", *(f"given{i}" for i in given_in(expr))]


def function_source(name: str, *values: Expr) -> str:
    """The source of a function that returns the values of expressions; the parameters are those of
    the first one. Common subexpressions are computed once."""
    # The base of an integer power is printed several times; as an extra value it gets a variable.
    powers = [p for value in values for p in value.atoms(sympy.Pow) if p.exp.is_Integer]
    bases = sorted({p.base for p in powers if not p.base.is_Atom}, key=sympy.default_sort_key)
    variables = sympy.numbered_symbols("u")
    shared, results = sympy.cse([*values, *bases], symbols=variables)
    lines = [f"{symbol} = {text(value)}" for symbol, value in shared]
    lines.append(f"return {', '.join(text(result) for result in list(results)[: len(values)])}")
    define = f"def {name}({', '.join(_parameters(values[0]))}):"
    return "\n".join(["@triton.jit", define, *(f"    {line}" for line in lines)])


# The functions of :mod:`fxpass.formula.functions` that ``tl`` has.
_BUILT_IN = ("where", "exp", "log", "abs")


class _Triton(Printer):
    """Prints expressions of f32 numbers in Triton."""

    space = " "
    lowest = '-float("inf")'
    names = {name: f"tl.{name}" for name in _BUILT_IN} | {"sqrt": "tl.sqrt_rn"}

    def print_with_precedence(self, expr: Any) -> tuple[str, int]:
        return self.print_number(expr) if expr.is_number else super().print_with_precedence(expr)

    def print_number(self, number: Any) -> tuple[str, int]:
        value = float(number)
        # Triton makes a double of a constant outside f32's range, where torch rounds it to f32.
        if abs(value) < 2.0**-126:
            value = 0.0
        elif abs(value) >= 2.0**128:
            return ('float("inf")' if value > 0 else self.lowest), PRODUCT
        return repr(value), SUM if value < 0 else ATOM

    def print_product(self, number: Any, rest: Any) -> str:
        parts = rest.as_ordered_factors()
        factors = " * ".join(self.text(part, ATOM) for part in parts)
        if number == -1:
            return f"-{factors if len(parts) > 1 else self.text(rest, PRODUCT)}"
        return factors if number == 1 else f"{self.text(number)} * {factors}"

    def print_power(self, base: Any, exponent: Any) -> tuple[str, int]:
        if not exponent.is_Integer:
            return f"tl.exp({self.text(exponent)} * tl.log({self.text(base)}))", ATOM
        product = " * ".join([self.text(base, ATOM)] * abs(int(exponent)))
        if exponent > 0:
            return product, PRODUCT
        return f"1.0 / {f'({product})' if exponent < -1 else product}", PRODUCT


text = _Triton().text
