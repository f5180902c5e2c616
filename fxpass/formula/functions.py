"""The functions that a logit transform may use, each as a sympy class and as a torch function.

sympy simplifies its own functions: ``log(exp(z))`` becomes ``z``, and ``exp(z) * exp(1)`` becomes
``exp(z + 1)``. The results overflow at other values of ``z`` than the user's program. And to learn
if ``tanh(exp(z / 3e4))`` is real, sympy makes a polynomial of ``exp(z / 2**60)``. So every function
is a new class with a given derivative, which sympy does not simplify::

    >>> sympy.diff(FUNCTIONS["tanh"].symbolic(sympy.Symbol("z")))
    1 - tanh(z)**2

A function with two branches is a :class:`Where`. Its derivative is the selected branch's. So the
derivative at a boundary equals PyTorch's if PyTorch's backward makes the same comparison.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
import torch
from sympy import Expr
from torch import Tensor

from fxpass.releases.torch_2_13 import ABOVE, BELOW


def exact(value: float) -> Expr:
    """The rational that equals the double ``value``; ``ValueError`` for inf and nan."""
    if not math.isfinite(value):
        raise ValueError(f"a logit transform needs finite constants, got {value}")
    fraction = Fraction(value)
    return sympy.Rational(fraction.numerator, fraction.denominator)


class LogitFunction(NamedTuple):
    """One function of an expression: its sympy class and its torch equivalent, which returns a new
    tensor. The second operand of a binary function may be a float."""

    symbolic: Any
    tensor: Callable[..., Tensor]
    arity: int = 1


# ---------------------------------------------------------------- branches


class Where(sympy.Function):
    """``a`` where the subclass's comparison of ``x`` with ``y`` holds, else (and for nan) ``b``."""

    nargs = 4
    symbol = ""
    mirrored = ""
    holds: Callable[[Any, Any], Any]  # the comparison, on numbers or tensors

    @classmethod
    def eval(cls, *args: Any) -> Any:
        x, y, a, b = args
        if a == b:
            return a
        if x.is_number and y.is_number:
            return a if cls.holds(float(x), float(y)) else b
        return None

    def _eval_derivative(self, s: Any) -> Expr:
        x, y, a, b = self.args
        return self.func(x, y, sympy.diff(a, s), sympy.diff(b, s))


class Less(Where):
    """``where(x<y,a,b)``."""

    symbol = "<"
    mirrored = ">"
    holds = staticmethod(operator.lt)


class AtMost(Where):
    """``where(x<=y,a,b)``."""

    symbol = "<="
    mirrored = ">="
    holds = staticmethod(operator.le)


def where(x: Any, comparison: str, y: Any, a: Any, b: Any) -> Expr:
    """``a`` where ``x`` compares with ``y``, else ``b``; the comparison is one of ``< <= > >=``."""
    cls: Any = Less if comparison in ("<", ">") else AtMost
    return cls(x, y, a, b) if comparison in ("<", "<=") else cls(y, x, a, b)


# ---------------------------------------------------------------- functions


def new_function(
    name: str, tensor: Callable[..., Tensor], slope: Callable[..., Any], arity: int = 1
) -> LogitFunction:
    """A function with a derivative: ``slope(x)``, or ``slope(x, y, dx, dy)`` of two operands. The
    function of numbers is a number."""

    def evaluate(cls: Any, *args: Any) -> Expr | None:
        if not all(x.is_number for x in args):
            return None
        if not all(x.is_real for x in args):
            raise ValueError(f"{name} of a number that is not real")
        numbers = (torch.tensor(float(x), dtype=torch.float64, device="cpu") for x in args)
        return exact(tensor(*numbers).item())

    def derivative(self: Any, s: Any) -> Any:
        inner = [sympy.diff(x, s) for x in self.args]
        return slope(*self.args) * inner[0] if arity == 1 else slope(*self.args, *inner)

    members = {"eval": classmethod(evaluate), "_eval_derivative": derivative, "nargs": arity}
    members["__module__"] = __name__
    return LogitFunction(type(sympy.Function)(name, (sympy.Function,), members), tensor, arity)


def call(name: str, *operands: Any) -> Expr:
    """The function ``name`` of :data:`FUNCTIONS`, applied to expressions."""
    return FUNCTIONS[name].symbolic(*operands)


_TABLE = (
    new_function("exp", torch.exp, lambda x: call("exp", x)),
    new_function("log", torch.log, lambda x: 1 / x),
    new_function("sqrt", torch.sqrt, lambda x: 1 / (2 * call("sqrt", x))),
    new_function("sigmoid", torch.sigmoid, lambda x: call("sigmoid", x) * (1 - call("sigmoid", x))),
    new_function("tanh", torch.tanh, lambda x: 1 - call("tanh", x) ** 2),
    new_function("abs", torch.abs, lambda x: call("sign", x)),
    new_function("sign", torch.sign, lambda x: sympy.Integer(0)),
    new_function("maximum", torch.clamp_min, lambda x, y, a, b: where(x, ABOVE, y, a, b), 2),
    new_function("minimum", torch.clamp_max, lambda x, y, a, b: where(x, BELOW, y, a, b), 2),
)

# Functions by their names in text forms and in generated Triton.
FUNCTIONS: dict[str, LogitFunction] = {function.symbolic.__name__: function for function in _TABLE}
