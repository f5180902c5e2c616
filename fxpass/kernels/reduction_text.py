"""Prints the sums, moments and slopes of class reductions as expressions of Triton variables.

In: outputs of :mod:`fxpass.spec.reductions`, whose algebra gets symbols in place of numbers. Out:
names of variables and text::

    >>> entropy = Moment(1, 1)
    >>> for one in sums_of([entropy]):
    ...     print(f"{one.name}: {one.grown} + sum({one.term})")
    s10: decay * s10 + sum(e)
    s11: decay * (s10 * shift + s11) + sum(e * near)
    >>> normalised_of([entropy])
    [('inverse', '1.0 / s10'), ('m11', 'inverse * (-log_s * s10 + s11)')]

The variables: e = exp(y) for y = z - m, ``near`` and ``away`` are y without infinities and without
what lies behind the classes, l and p are log-softmax and softmax, w0, w1, ... weights. Under a new
maximum, ``shift`` and ``gap`` are the old one minus the new one, and decay = exp(shift).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sympy import Symbol

from fxpass.kernels import expression
from fxpass.spec.reductions import (
    OF_PICKS,
    LogitSum,
    Moment,
    Output,
    Terms,
    normalised,
    raw,
    shifted,
)


class Sum(NamedTuple):
    """A sum over the classes.

    Attributes:
        name: of the variable.
        term: of one class.
        grown: the sum so far, under the new maximum.
        counted: whether it is the number of classes, which needs no sum.
    """

    name: str
    term: str
    grown: str
    counted: bool = False


def sums_of(outputs: Iterable[Output]) -> list[Sum]:
    """The sums that these outputs need; a sum comes after those that it is shifted with."""
    outputs = list(outputs)
    found = [_of_moment(moment) for moment in raw(outputs)]
    for output in outputs:
        if isinstance(output, LogitSum):
            weight = "" if output.weight is None else f"w{output.weight} * "
            name = name_of(output)
            found.append(Sum(name, f"{weight}tl.where(inside, z, 0.0)", name))
    return found


def _of_moment(moment: Moment) -> Sum:
    a, b, weight = moment.a, moment.b, moment.weight
    sums = {m: Symbol(name_of(m)) for m in raw([moment])}
    counted = Moment(0, 0)
    if counted in sums:  # the classes before this block
        sums[counted] = Symbol("start")
    shift, decay = Symbol("shift" if a else "gap"), Symbol("decay")
    grown = expression.text(shifted(moment, sums, shift, lambda e: decay ** (e / shift)))
    if not a and b > 1:
        grown = f"tl.where(grows, {grown}, {name_of(moment)})"
    factors = ["e"] * a + ["near" if a else "away"] * b + [f"w{weight}"] * (weight is not None)
    return Sum(name_of(moment), " * ".join(factors), grown, moment == counted)


def normalised_of(moments: Iterable[Moment]) -> list[tuple[str, str]]:
    """The moments of the log-softmax, from the sums; the first line is what they share."""
    moments = list(moments)
    sums = {moment: Symbol(name_of(moment)) for moment in raw(moments)}
    log, inverse = Symbol("log_s"), Symbol("inverse")
    found = [
        (
            log_name_of(moment),
            expression.text(normalised(moment, sums, log, lambda e: inverse ** (-e / log))),
        )
        for moment in moments
    ]
    inverted = any(moment.a for moment in moments)
    return [("inverse", "1.0 / s10")] * inverted + found


def coefficients_of(terms: Terms) -> list[tuple[str, str]]:
    """The coefficients of a slope, whose values are expressions."""
    return [
        (_coefficient(a, b, weight), expression.text(value))
        for (a, weight), polynomial in terms.coefficients.items()
        for b, value in polynomial.items()
    ]


def slope_of(terms: Terms) -> str:
    """The slope of a logit, from its coefficients; a block of zeros if there are none."""
    found, vector = [], False
    for (a, weight), polynomial in terms.coefficients.items():
        value = ""
        for b in range(max(polynomial), -1, -1):  # Horner's scheme
            value = f"l * ({value})" if " + " in value else f"l * {value}" if value else ""
            if b in polynomial:
                coefficient = _coefficient(a, b, weight)
                value = f"{coefficient} + {value}" if value else coefficient
        factors = ["p"] * a + [f"w{weight}"] * (weight is not None)
        vector |= bool(factors) or max(polynomial) > 0
        found.append(" * ".join([*factors, f"({value})" if factors and " " in value else value]))
    return " + ".join([*["tl.zeros((BLOCK_V,), tl.float32)"] * (not vector), *found])


def terms_of(outputs: Iterable[Output], moments: Iterable[Moment], several: bool) -> Terms:
    """The slope of some outputs with incoming gradients, which reads these moments; ``several``:
    a row may have another number of picks than one."""
    terms = Terms()
    sigmas = {moment: Symbol(log_name_of(moment)) for moment in moments}
    for output in outputs:
        grad = Symbol(gradient_name_of(output))
        if isinstance(output, Moment):
            terms.add_moment(output, grad, sigmas)
        elif isinstance(output, LogitSum):
            terms.add(0, 0, output.weight, grad)
        elif output == "lse":
            terms.add(1, 0, None, grad)
        elif output in ("pick", "peak"):
            of_picks = several and output == "pick"
            terms.add(1, 0, None, -Symbol(f"{grad}_sum") if of_picks else -grad)
    return terms


# ---------------------------------------------------------------- outputs

_VALUES = {
    "lse": "of_row",
    "pick": "z_c - m - log_s",
    "at": "z_c",
    "max": "highest",
    "amax": "highest",
    # nan if every logit is -inf
    "peak": 'tl.where(s10 == 0.0, float("nan"), -log_s)',
}


def value_of(output: Output) -> str:
    """An output of a row, from its sums."""
    if isinstance(output, str):
        return _VALUES[output]
    return log_name_of(output) if isinstance(output, Moment) else name_of(output)


def places_of(outputs: Iterable[Output], several: bool) -> list[tuple[Output, str]]:
    """The first row of each output; ``several``: a pick has K rows."""
    found, rows, picked = [], 0, 0
    for output in outputs:
        k = {0: "", 1: "K"}.get(picked, f"{picked} * K")
        found.append((output, f"({rows} + {k})" if k and rows else k or f"{rows}"))
        many = several and output in OF_PICKS
        rows, picked = rows + (not many), picked + many
    return found


# ---------------------------------------------------------------- names


def name_of(output: Moment | LogitSum) -> str:
    """The variable of a sum."""
    name = f"s{output.a}{output.b}" if isinstance(output, Moment) else "z_sum"
    return name if output.weight is None else f"{name}_{output.weight}"


def log_name_of(moment: Moment) -> str:
    """The variable of a moment of the log-softmax."""
    return f"m{name_of(moment)[1:]}"


def gradient_name_of(output: Output) -> str:
    """The variable of an incoming gradient."""
    if isinstance(output, str):
        return f"d_{output}"
    return f"d_{log_name_of(output) if isinstance(output, Moment) else name_of(output)}"


def _coefficient(a: int, b: int, weight: int | None) -> str:
    return f"c{a}{b}" if weight is None else f"c{a}{b}_{weight}"
