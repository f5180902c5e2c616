"""The function of a logit that a graph applies between the linear and the loss.

In: scalars, function names and tensors of the call. Out: a sympy expression in the symbol ``Z``
(the linear's raw output), its exact derivative, its value on tensors, and a text form that is
parsed back::

    >>> softcap = 30 * FUNCTIONS["tanh"].symbolic(Z / exact(30.0))
    >>> text(softcap)
    '30*tanh(z/30)'
    >>> parse('30*tanh(z/30)') == softcap
    True
    >>> text(derivative(softcap))
    '1-tanh(z/30)**2'

A constant is the exact rational of the double that the user wrote: sympy's Floats would lose digits
in arithmetic. The functions are those of :mod:`fxpass.formula.functions`. Beside z, expressions may
read the *operands* ``given0``, ``given1``, ...: the call's given values at the logit's class (a
mask of classes, a factor of each class)::

    >>> text(where(given(0), ">", 0, -sympy.oo, Z))
    'where(given0>0,-inf,z)'
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import sympy
import torch
from sympy import Expr

from fxpass.formula.functions import FUNCTIONS, Where, exact, where

# Not declared real: sympy would rewrite the user's sqrt(z**2) as abs(z).
Z = sympy.Symbol("z")


def given(position: int) -> sympy.Symbol:
    """The symbol of a given value of the call, at the class of the logit."""
    return sympy.Symbol(f"given{position}")


_SYMBOL = re.compile(r"z|given(0|[1-9][0-9]*)")


@functools.cache
def given_in(expr: Expr) -> tuple[int, ...]:
    """The positions of the given values that an expression reads, in order."""
    found = (_SYMBOL.fullmatch(symbol.name) for symbol in expr.free_symbols)  # type: ignore[attr-defined]
    return tuple(sorted(int(match[1]) for match in found if match and match[1]))


@functools.cache
def derivative(expr: Expr) -> Expr:
    """d expr / dz, exactly. It is 0 in a branch of slope 0 even if other factors overflow: autograd
    selects 0 there, too, and does not multiply by 0."""
    return _without_rounding(masked(sympy.diff(expr, Z)))


def _without_rounding(expr: Any) -> Any:
    """``expr`` with sigmoid(-x) in place of 1 - sigmoid(x), which rounds small values to 0."""
    sigmoid = FUNCTIONS["sigmoid"].symbolic
    if not expr.has(sigmoid):
        return expr
    if expr.args:
        expr = expr.func(*map(_without_rounding, expr.args))
    number, rest = expr.as_coeff_Add()
    for term in sympy.Add.make_args(rest):
        factor, function = term.as_coeff_Mul()
        if factor == -number and isinstance(function, sigmoid):
            (x,) = cast(Any, function).args
            return rest - term + number * sigmoid(-x)
    return expr


def masked(expr: Any) -> Any:
    """``expr``, with the factors of a :class:`Where` that has a zero branch inside its branches."""
    if not expr.has(Where):
        return expr
    expr = expr.func(*map(masked, expr.args))
    if not isinstance(expr, sympy.Mul):
        return expr
    for i, mask in enumerate(expr.args):
        if isinstance(mask, Where) and 0 in mask.args[2:]:
            x, y, *branches = mask.args
            number, rest = sympy.Mul(*expr.args[:i], *expr.args[i + 1 :]).as_coeff_Mul()
            return number * mask.func(x, y, *(masked(rest * branch) for branch in branches))
    return expr


# ---------------------------------------------------------------- text form


def text(expr: Expr) -> str:
    """One line without spaces, from which :func:`parse` makes the same expression.

    Raises ``ValueError`` for an expression that cannot be a logit transform.
    """
    return Printer().text(expr)


# The precedence of an operation.
SUM = 0
PRODUCT = 1
ATOM = 2


class Printer:
    """Prints expressions in their text form."""

    space = ""
    lowest = "-inf"
    names: Mapping[str, str] = {}

    def text(self, expr: Any, level: int = SUM) -> str:
        """The text, in parentheses if its precedence is lower than ``level``."""
        out, precedence = self.print_with_precedence(expr)
        return f"({out})" if precedence < level else out

    def print_with_precedence(self, expr: Any) -> tuple[str, int]:
        """The text and its precedence."""
        space = self.space
        if isinstance(expr, sympy.Symbol):
            return expr.name, ATOM
        if isinstance(expr, sympy.Rational):
            return self.print_number(expr)
        if isinstance(expr, sympy.Add):
            first, *rest = (self.text(term) for term in expr.as_ordered_terms())
            signed = (f"-{space}{t[1:]}" if t.startswith("-") else f"+{space}{t}" for t in rest)
            return first + "".join(f"{space}{term}" for term in signed), SUM
        if isinstance(expr, sympy.Mul):
            out = self.print_product(*expr.as_coeff_Mul())
            return out, SUM if out.startswith("-") else PRODUCT
        if isinstance(expr, sympy.Pow):
            return self.print_power(expr.base, expr.exp)
        name = type(expr).__name__
        lowest = isinstance(expr, Where) and sympy.S.NegativeInfinity
        args = [self.lowest if arg is lowest else self.text(arg) for arg in expr.args]
        if isinstance(expr, Where):
            name = "where"
            x, y, *branches = args
            x, y, symbol = (y, x, expr.mirrored) if expr.args[0].is_number else (x, y, expr.symbol)
            args = [f"{x}{space}{symbol}{space}{y}", *branches]
        elif name not in FUNCTIONS or FUNCTIONS[name].symbolic is not type(expr):
            raise ValueError(f"a logit transform may not contain {name}: {expr}")
        return f"{self.names.get(name, name)}({f',{space}'.join(args)})", ATOM

    def print_number(self, number: Any) -> tuple[str, int]:
        is_double = exact(float(number)) == number  # ValueError beyond the range of doubles
        out = repr(float(number)) if is_double and number.q != 1 else str(number)
        return out, ATOM if out.replace(".", "").isdigit() else SUM

    def print_product(self, number: Any, rest: Any) -> str:
        parts = sympy.Mul.make_args(rest)
        factors = "*".join(self.text(part, PRODUCT) for part in parts)
        if number == 1:
            return factors
        if len(parts) > 1 and any(isinstance(part, sympy.Add) for part in parts):
            factors = f"({factors})"  # else sympy distributes the number over the sum when parsed
        if number == -1:
            return f"-{factors}"
        if number == exact(float(number)):
            return f"{self.text(number)}*{factors}"
        top = {1: "", -1: "-"}.get(number.p, f"{number.p}*")
        return f"{top}{factors}/{number.q}"

    def print_power(self, base: Any, exponent: Any) -> tuple[str, int]:
        if not isinstance(exponent, sympy.Rational):
            raise ValueError(f"a logit transform may not have {exponent} as an exponent")
        return f"{self.text(base, ATOM)}**{self.text(exponent, ATOM)}", PRODUCT


# Limit of an integer's length. Products of a few doubles' exact rationals stay far below.
_MAX_BITS = 8192


def parse(source: str) -> Expr:
    """The expression of a text form: numbers, ``z``, operands, ``+ - * / **``, ``where`` and the
    names in ``FUNCTIONS``; ``ValueError`` for any other text, of which nothing is executed."""
    try:
        tree = ast.parse(source, mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:  # the last two: deep nesting
        raise ValueError(f"not a logit transform: {source!r}") from error
    expr = _expr_of(tree.body, source)
    text(expr)  # raises for infinities and roots of -1, which have no text form
    return expr


def _expr_of(node: ast.expr, source: str) -> Expr:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() as value) if value.bit_length() <= _MAX_BITS:
            return sympy.Integer(value)
        case ast.Constant(value=float() as value):
            return exact(value)
        case ast.Name(id=name) if _SYMBOL.fullmatch(name):
            return sympy.Symbol(name)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return sympy.S.NegativeInfinity  # in a text form only as a branch of a where
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_expr_of(operand, source)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_expr_of(left, source), _expr_of(right, source))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            if len(args) == FUNCTIONS[name].arity:
                return FUNCTIONS[name].symbolic(*(_expr_of(arg, source) for arg in args))
        case ast.Call(
            func=ast.Name(id="where"),
            args=[ast.Compare(left=left, ops=[op], comparators=[right]), *branches],
            keywords=[],
        ) if type(op) in _COMPARISONS and len(branches) == 2:
            x, y, a, b = (_expr_of(operand, source) for operand in (left, right, *branches))
            return where(x, _COMPARISONS[type(op)], y, a, b)
    raise ValueError(
        f"not a logit transform: {source!r} (allowed: numbers, z, given0, + - * / **, "
        f"{', '.join(FUNCTIONS)}, where(x<y,a,b))"
    )


def _power(base: Any, exponent: Any) -> Expr:
    if isinstance(base, sympy.Rational) and isinstance(exponent, sympy.Rational):
        bits = max(int(base.p).bit_length(), int(base.q).bit_length())
        if bits * abs(exponent) > _MAX_BITS:
            raise ValueError(f"not a logit transform: {base}**{exponent} is too large")
    return base**exponent


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.Pow: _power},
}

_COMPARISONS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


# ---------------------------------------------------------------- value on tensors


def evaluate(
    expr: Any, z: torch.Tensor, values: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """``expr`` of every element of ``z``, in the dtype of ``z``, which is not written to: ``z``
    itself for the expression ``Z``, otherwise a tensor of the same shape, new if ``expr`` reads z.
    ``values`` has the operands beside z by name, in the dtype of z; their shapes broadcast."""
    return z if expr == Z else _evaluate(expr, z, values or {}).expand_as(z)


def evaluate_rows(
    expr: Any, like: torch.Tensor, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """An expression of columns ``[N, 1]`` or ``[N, K]``, in the dtype of ``like``, on its device;
    ``[1, 1]`` for an expression of numbers alone."""
    value = _evaluate(expr, like, values)
    return value if value.dim() else value.reshape(1, 1)


def _evaluate(expr: Any, z: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The value of a part of an expression, which may have fewer elements than ``z``."""
    if isinstance(expr, sympy.Symbol):
        return z if expr == Z else values[expr.name]
    if expr.is_number:
        return _scalar(float(expr), z)
    if (square := _one_minus_square(expr)) is not None:
        factor, root = square
        y = _evaluate(root, z, values)
        out = 1 - y
        return out.mul_(1 + y if isinstance(root, sympy.Symbol) else y.add_(1)).mul_(factor)
    if isinstance(expr, sympy.Add):
        return _sum(expr, z, values)
    if isinstance(expr, sympy.Mul):
        number, product = expr.as_coeff_Mul()
        first, *factors = sorted(sympy.Mul.make_args(product), key=_is_symbol)
        out = _evaluate(first, z, values)
        is_new = not _is_symbol(first)
        numbers = [float(number)] * (number != 1)
        for other in (*(_evaluate(factor, z, values) for factor in factors), *numbers):
            out = out.mul_(other) if is_new and out.shape == z.shape else out * other
            is_new = True
        return out
    if isinstance(expr, sympy.Pow):
        base, exponent = expr.as_base_exp()
        return _evaluate(base, z, values).pow(float(exponent))
    parts = [float(a) if a.is_number else _evaluate(a, z, values) for a in expr.args]
    if not isinstance(expr, Where):
        return FUNCTIONS[type(expr).__name__].tensor(*parts)
    condition = expr.holds(*parts[:2])
    return torch.where(condition, *(_scalar(a, z) for a in parts[2:]))


def _is_symbol(expr: Any) -> bool:
    """Tells if the value of an expression is an operand's tensor, which may not be written to."""
    return isinstance(expr, sympy.Symbol)


def _sum(expr: Any, z: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A sum; one pass multiplies a term by its number and adds it."""
    number, rest = expr.as_coeff_Add()
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(rest)]
    (factor, first), *others = sorted(terms, key=lambda term: _is_symbol(term[1]))
    out = _evaluate(first, z, values)
    is_new = not _is_symbol(first)
    if number != 0:
        place = out if is_new and out.shape == z.shape else None
        out = torch.add(_scalar(float(number), z), out, alpha=float(factor), out=place)
        is_new = True
    elif factor != 1:
        out = out.mul_(float(factor)) if is_new and out.shape == z.shape else out * float(factor)
        is_new = True
    for factor, term in others:
        add = out.add_ if is_new and out.shape == z.shape else out.add
        out = add(_evaluate(term, z, values), alpha=float(factor))
        is_new = True
    return out


def _one_minus_square(expr: Any) -> tuple[float, Any] | None:
    """``c`` and ``y`` of ``c - c*y**2``, the slope of a tanh y. Where y is nearly 1, y**2 has
    a rounding error as large as the result; (1 - y) * (1 + y) has none."""
    number, rest = expr.as_coeff_Add()
    factor, power = (-rest).as_coeff_Mul()
    if number != factor or not isinstance(power, sympy.Pow) or power.exp != 2:
        return None
    return float(number), power.base


def _scalar(operand: torch.Tensor | float, z: torch.Tensor) -> torch.Tensor:
    """A tensor unchanged, a number as a tensor of the dtype of ``z``."""
    if isinstance(operand, torch.Tensor):
        return operand
    return torch.full((), operand, dtype=z.dtype, device=z.device)
