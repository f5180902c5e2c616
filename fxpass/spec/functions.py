"""The functions that a logit transform may use, each as a sympy class and as a torch function.

sympy simplifies its own functions: ``log(exp(z))`` becomes ``z``, and ``exp(z) * exp(1)`` becomes
``exp(z + 1)``. The results overflow at other values of ``z`` than the user's program. So every
function but tanh is a new class with a known derivative, which sympy does not simplify::

    >>> sympy.diff(FUNCTIONS["softplus"].symbolic(sympy.Symbol("z")))
    sigmoid(z)

A function with two branches is a :class:`Where`. Its derivative is that of the selected branch. So
the derivative at a boundary equals PyTorch's if the comparison is the one of PyTorch's backward.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import sympy
import torch
import torch.nn.functional as F
from sympy import Expr
from torch import Tensor


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
    symbol, mirrored = "", ""
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

    symbol, mirrored = "<", ">"
    holds = staticmethod(operator.lt)


class AtMost(Where):
    """``where(x<=y,a,b)``."""

    symbol, mirrored = "<=", ">="
    holds = staticmethod(operator.le)


def where(x: Any, comparison: str, y: Any, a: Any, b: Any) -> Expr:
    """``a`` where ``x`` compares with ``y``, else ``b``; the comparison is one of ``< <= > >=``."""
    cls: Any = Less if comparison in ("<", ">") else AtMost
    return cls(x, y, a, b) if comparison in ("<", "<=") else cls(y, x, a, b)


# ---------------------------------------------------------------- functions


def _unary(
    name: str, tensor: Callable[[Tensor], Tensor], slope: Callable[[Any], Any]
) -> LogitFunction:
    """A unary function with the given derivative; applied to a number, it is a number."""

    def evaluate(cls: Any, x: Any) -> Expr | None:
        if not x.is_number:
            return None
        return exact(tensor(torch.tensor(float(x), dtype=torch.float64, device="cpu")).item())

    def fdiff(self: Any, argindex: int = 1) -> Any:
        return slope(self.args[0])

    return LogitFunction(_symbolic(name, 1, evaluate, fdiff=fdiff), tensor)


def _bound(name: str, tensor: Callable[..., Tensor], slope: Callable[..., Any]) -> LogitFunction:
    """maximum or minimum; where the operands are equal, it has the slope of ``torch.clamp``."""

    def evaluate(cls: Any, x: Any, y: Any) -> Expr | None:
        return slope(x, y, x, y) if x.is_number and y.is_number else None

    def derivative(self: Any, s: Any) -> Any:
        x, y = self.args
        return slope(x, y, sympy.diff(x, s), sympy.diff(y, s))

    symbolic = _symbolic(name, 2, evaluate, _eval_derivative=derivative)
    return LogitFunction(symbolic, tensor, arity=2)


def _symbolic(name: str, nargs: int, evaluate: Callable[..., Any], **members: Any) -> Any:
    """A class of sympy functions."""
    members |= {"eval": classmethod(evaluate), "nargs": nargs, "__module__": __name__}
    return type(sympy.Function)(name, (sympy.Function,), members)


def call(name: str, *operands: Any) -> Expr:
    """The function ``name`` of :data:`FUNCTIONS`, applied to expressions."""
    return FUNCTIONS[name].symbolic(*operands)


# The comparison under which clamp passes a gradient: up to torch 2.13 also at the bound, later not.
# The version decides: a test by autograd would start its threads, after which no process can fork.
ABOVE, BELOW = (">", "<") if torch.__version__ >= "2.14.0a0" else (">=", "<=")

_TABLE = (
    _unary("exp", torch.exp, lambda x: call("exp", x)),
    _unary("expm1", torch.expm1, lambda x: call("exp", x)),
    _unary("exp2", torch.exp2, lambda x: exact(math.log(2)) * call("exp2", x)),
    _unary("log", torch.log, lambda x: 1 / x),
    _unary("log1p", torch.log1p, lambda x: 1 / (1 + x)),
    _unary("sqrt", torch.sqrt, lambda x: 1 / (2 * call("sqrt", x))),
    _unary("sigmoid", torch.sigmoid, lambda x: call("sigmoid", x) * (1 - call("sigmoid", x))),
    # log(1 + exp(x)) would overflow
    _unary("softplus", lambda x: F.logsigmoid(-x).neg_(), lambda x: call("sigmoid", x)),
    _unary("erf", torch.erf, lambda x: exact(2 / math.sqrt(math.pi)) * call("exp", -(x**2))),
    _unary("abs", torch.abs, lambda x: call("sign", x)),
    _unary("sign", torch.sign, lambda x: sympy.Integer(0)),
    _unary("sin", torch.sin, lambda x: call("cos", x)),
    _unary("cos", torch.cos, lambda x: -call("sin", x)),
    _unary("acos", torch.acos, lambda x: -1 / call("sqrt", 1 - x**2)),
    _unary("atan", torch.atan, lambda x: 1 / (1 + x**2)),
    _unary("sinh", torch.sinh, lambda x: call("cosh", x)),
    _unary("cosh", torch.cosh, lambda x: call("sinh", x)),
    _unary("asinh", torch.asinh, lambda x: 1 / call("sqrt", 1 + x**2)),
    _bound("maximum", torch.clamp_min, lambda x, y, a, b: where(x, ABOVE, y, a, b)),
    _bound("minimum", torch.clamp_max, lambda x, y, a, b: where(x, BELOW, y, a, b)),
)

# Functions by their names in text forms and in generated Triton.
FUNCTIONS: dict[str, LogitFunction] = {
    "tanh": LogitFunction(sympy.tanh, torch.tanh),
    **{function.symbolic.__name__: function for function in _TABLE},
}
