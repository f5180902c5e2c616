"""A call in words for people; the text form of its spec is for programs.

In: a spec. Out: one line, in which z is a logit of the linear and p its softmax::

    >>> words(Reductions((), gradients=("x", "weight"), total=("pick",)))
    'log-probability of the label; gradients of x and weight with the loss'
    >>> words(Reductions((Moment(1, 1), "argmax")))
    'entropy, class of the largest logit; no gradients'
"""

from __future__ import annotations

from typing import Any

from fxpass.formula.expression import ATOM, PRODUCT, SUM, Printer, Z
from fxpass.formula.functions import exact
from fxpass.formula.outputs import Moment, Output
from fxpass.formula.reductions import Reductions

_NAMES = {
    "lse": "log-sum-exp",
    "pick": "log-probability of the label",
    "at": "logit of the label",
    "max": "largest logit",
    "argmax": "class of the largest logit",
}
_ENTROPY = Moment(1, 1)


def words(spec: Reductions, backward: bool = False) -> str:
    """The logit that is reduced, the outputs, and the gradients; ``backward``: of a call there."""
    of = "" if spec.transform == Z else f"of {_Words().text(spec.transform)}: "
    outputs = ", ".join(map(_output, dict.fromkeys((*spec.total, *spec.outputs))))
    *more, last = spec.gradients or ("",)
    names = f"{', '.join(more)} and {last}" if more else last
    where = "with the loss" if spec.total and not backward else "in backward"
    gradients = f"gradients of {names} {where}" if names else "no gradients"
    return f"{of}{outputs}; {gradients}"


def _output(output: Output) -> str:
    if output == _ENTROPY:
        return "entropy"
    if isinstance(output, Moment):
        given = [] if output.weight is None else [f"given{output.weight}"]
        powers = [("p", output.a), ("log(p)", output.b)]
        factors = [name if k == 1 else f"{name}**{k}" for name, k in powers if k]
        return f"sum of {'*'.join(given + factors) or '1'}"
    return _NAMES[output]


class _Words(Printer):
    """Prints expressions with rounded numbers: 1/0.9 is no double, and a long fraction."""

    def print_number(self, number: Any) -> tuple[str, int]:
        out = str(number) if number.is_Integer else repr(float(number))
        return out, SUM if out.startswith("-") else ATOM

    def print_product(self, number: Any, rest: Any) -> str:
        if number == exact(float(number)):
            return super().print_product(number, rest)
        if 1 / number == exact(float(1 / number)):
            sign = "-" * bool(number < 0)
            divisor = self.print_number(abs(1 / number))[0]
            return f"{sign}{self.text(rest, PRODUCT)}/{divisor}"
        return f"{self.print_number(number)[0]}*{self.text(rest, PRODUCT)}"
