"""Renders the Triton kernels of class reductions from ``templates/reductions.py.jinja``.

In: :class:`fxpass.spec.reductions.Reductions` and the optional operands that are present. Out: a
:class:`fxpass.kernels.render.Kernel` for the outputs, for the gradient, or for both. The algebra
comes from :mod:`fxpass.spec.reductions`, whose functions get symbols in place of numbers::

    >>> entropy = Reductions(("pick", Moment(1, 1)), gradients=("x",))
    >>> lines = reductions(entropy, forward=True).source.splitlines()
    >>> print([line.strip() for line in lines if "s11 =" in line][-1])
    s11 = decay * (s10 * shift + s11) + tl.sum(e * near, 0)

What a call does not ask for leaves no text, as in :mod:`fxpass.kernels.render`.
"""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sympy import Symbol

from fxpass.kernels import expression, render
from fxpass.kernels.render import Kernel
from fxpass.spec.expression import Z, text
from fxpass.spec.reductions import (
    OF_PICKS,
    LogitSum,
    Moment,
    Output,
    Reductions,
    Terms,
    normalised,
    raw,
    shifted,
)

MAXIMA = ("max", "amax", "argmax")


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


@dataclass(frozen=True)
class Features:
    """What changes the text of a kernel.

    Attributes:
        spec: the outputs, the transform and the moments that are saved.
        forward, backward: whether the kernel computes the outputs, and the gradient.
        biased, scaled: whether there is a bias in f32, and a scale of the rows.
        several: whether a row may have another number of picks than one.
        given: whether each of the weights is ``[N, V]`` and not ``[V]``.
        whole_row, padded: as of :func:`fxpass.kernels.render.row`.
    """

    spec: Reductions
    forward: bool
    backward: bool
    biased: bool = False
    scaled: bool = False
    several: bool = False
    given: tuple[bool, ...] = ()
    whole_row: bool = False
    padded: bool = False

    # ------------------------------------------------------------ the logits

    @property
    def transformed(self) -> bool:
        return self.spec.transform != Z

    @cached_property
    def varying(self) -> bool:
        """Whether the slope of the transform differs from class to class."""
        return self.backward and not expression.unit_slope(self.spec.transform)[1].is_number

    @property
    def scale_gradient(self) -> bool:
        return self.backward and "scale" in self.spec.gradients

    @property
    def functions(self) -> str:
        """The source of each function that transforms a logit."""
        if not self.transformed:
            return ""
        sources = expression.functions(self.spec.transform, self.backward)
        return "".join(f"{source}\n\n\n" for source in sources)

    @property
    def title(self) -> str:
        of_backward = "the gradient of the logits in place"
        if not self.forward:
            return f"Reductions of rows of logits: {of_backward}"
        return "Reductions of rows of logits" + f", and {of_backward}" * self.backward

    @property
    def facts(self) -> str:
        """What the docstring of a generated module says."""
        said = {
            ", ".join(map(str, self.spec.outputs)): True,
            "several picks": self.several and bool(self.places_of_picks),
            f"logits {text(self.spec.transform)}": self.transformed,
            "a scale of each row": self.scaled,
            "a bias in f32": self.biased,
        }
        return textwrap.fill("; ".join(fact for fact, holds in said.items() if holds), 96)

    # ------------------------------------------------------------ forward

    @property
    def moments(self) -> tuple[Moment, ...]:
        return tuple(o for o in self.spec.outputs if isinstance(o, Moment))

    @cached_property
    def sums(self) -> list[Sum]:
        """The sums of the first pass; a sum comes after those that it is shifted with."""
        found = [_of_moment(moment) for moment in raw(self.moments)]
        for output in self.spec.outputs:
            if isinstance(output, LogitSum):
                weight = "" if output.weight is None else f"w{output.weight} * "
                name = _name(output)
                found.append(Sum(name, f"{weight}tl.where(inside, z, 0.0)", name))
        return found

    @property
    def sums_logarithms(self) -> bool:
        """Whether a term is an exponential times a power of y."""
        return any(m.a and m.b for m in self.moments)

    @property
    def sums_powers(self) -> bool:
        """Whether a term is a power of y."""
        return any(not m.a and m.b for m in self.moments)

    @property
    def sums_squares(self) -> bool:
        return any(not m.a and m.b > 1 for m in self.moments)

    @property
    def first_pass(self) -> bool:
        return self.forward or self.finds

    @property
    def finds(self) -> bool:
        """Whether the kernel looks for the largest logit and its class."""
        read = (*MAXIMA * self.forward, *("max", "amax", "peak") * self.backward)
        return not set(read).isdisjoint(self.spec.outputs)

    @property
    def shares(self) -> bool:
        """Whether equal maxima share a gradient."""
        return self.backward and "amax" in self.spec.outputs

    @property
    def indexed(self) -> bool:
        return "argmax" in self.spec.outputs

    @property
    def said_of_sums(self) -> str:
        if not self.forward:
            return "the largest logit"
        under = "sums over the classes under their maximum m"
        return under + (" and the largest logit" if self.finds else "")

    @cached_property
    def normalised(self) -> list[tuple[str, str]]:
        """The moments of the log-softmax, by name."""
        sums = {moment: Symbol(_name(moment)) for moment in raw(self.moments)}
        log, inverse = Symbol("log_s"), Symbol("inverse")
        moments = dict.fromkeys((*self.moments, *self.spec.saved))
        found = [
            (
                _log_name(m),
                expression.text(normalised(m, sums, log, lambda e: inverse ** (-e / log))),
            )
            for m in moments
        ]
        inverted = any(moment.a for moment in moments)
        return [("inverse", "1.0 / s10")] * inverted + found

    @property
    def places(self) -> list[tuple[Output, str]]:
        """The first row of each output."""
        found, rows, picked = [], 0, 0
        for output in self.spec.rows:
            k = {0: "", 1: "K"}.get(picked, f"{picked} * K")
            found.append((output, f"({rows} + {k})" if k and rows else k or f"{rows}"))
            several = self.several and output in OF_PICKS
            rows, picked = rows + (not several), picked + several
        return found

    @property
    def stored(self) -> list[tuple[str, str, bool]]:
        """The place and the value of each output, and whether it has a row for each pick."""
        values: dict[Output, str] = {
            "lse": "of_row",
            "pick": "z_c - m - log_s",
            "at": "z_c",
            "max": "highest",
            "amax": "highest",
            # nan if every logit is -inf
            "peak": 'tl.where(s10 == 0.0, float("nan"), -log_s)',
        }
        values |= {o: _log_name(o) for o in self.moments}
        values |= {o: _name(o) for o in self.spec.outputs if isinstance(o, LogitSum)}
        return [(place, values[output], output in OF_PICKS) for output, place in self.places]

    @property
    def saved(self) -> list[str]:
        return [_log_name(moment) for moment in self.spec.saved]

    # ------------------------------------------------------------ the gradient

    @property
    def loaded(self) -> list[tuple[str, int]]:
        """The moments that backward reads."""
        return [(_log_name(moment), i) for i, moment in enumerate(self.spec.saved)]

    @property
    def incoming(self) -> list[tuple[str, str, bool]]:
        """The incoming gradient of each output, as :attr:`stored`; of picks, their sum."""
        return [
            (_of_output(output), place, output in OF_PICKS)
            for output, place in self.places
            if not (self.several and output == "at")
        ]

    @cached_property
    def _terms(self) -> Terms:
        terms = Terms()
        sigmas = {moment: Symbol(_log_name(moment)) for moment in self.spec.saved}
        for output in self.spec.rows:
            grad = Symbol(_of_output(output))
            if isinstance(output, Moment):
                terms.add_moment(output, grad, sigmas)
            elif isinstance(output, LogitSum):
                terms.add(0, 0, output.weight, grad)
            elif output == "lse":
                terms.add(1, 0, None, grad)
            elif output in ("pick", "peak"):
                terms.add(1, 0, None, -grad)
        return terms

    @property
    def coefficients(self) -> list[tuple[str, str]]:
        return [
            (_coefficient(a, b, weight), expression.text(value))
            for (a, weight), polynomial in self._terms.coefficients.items()
            for b, value in polynomial.items()
        ]

    @property
    def of_softmax(self) -> bool:
        """Whether the gradient depends on the softmax or its logarithm."""
        return any(a or max(b) for (a, _), b in self._terms.coefficients.items())

    @property
    def of_logarithms(self) -> bool:
        return any(max(b) for b in self._terms.coefficients.values())

    @property
    def slope(self) -> str:
        """The gradient of a logit, but for what single classes add."""
        found, vector = [], False
        for (a, weight), polynomial in self._terms.coefficients.items():
            value = ""
            for b in range(max(polynomial), -1, -1):  # Horner's scheme
                value = f"l * ({value})" if " + " in value else f"l * {value}" if value else ""
                if b in polynomial:
                    coefficient = _coefficient(a, b, weight)
                    value = f"{coefficient} + {value}" if value else coefficient
            factors = ["p"] * a + [f"w{weight}"] * (weight is not None)
            vector |= bool(factors) or max(polynomial) > 0
            found.append(
                " * ".join([*factors, f"({value})" if factors and " " in value else value])
            )
        return " + ".join([*["tl.zeros((BLOCK_V,), tl.float32)"] * (not vector), *found])

    @property
    def places_of_picks(self) -> list[str]:
        return [place for output, place in self.places if output in OF_PICKS]

    @property
    def picked(self) -> str:
        """What the class that is picked adds to its gradient."""
        return self._added(*OF_PICKS)

    @property
    def first(self) -> str:
        """What the first of the largest logits adds to its gradient."""
        return self._added("max", "peak")

    def _added(self, *outputs: str) -> str:
        return " + ".join(_of_output(o) for o in outputs if o in self.spec.outputs)

    # ------------------------------------------------------------ weights

    @property
    def weights_of_sums(self) -> list[int]:
        return self.weights_read if self.forward else []

    @property
    def weights_of_slope(self) -> list[int]:
        return sorted({w for _, w in self._terms.coefficients if w is not None})

    @property
    def weights_read(self) -> list[int]:
        """The positions of the weights, whether a pass reads them or not."""
        weights = (o.weight for o in self.spec.outputs if not isinstance(o, str))
        return sorted({w for w in weights if w is not None})


@functools.cache
def reductions(
    spec: Reductions,
    *,
    forward: bool = False,
    backward: bool = False,
    biased: bool = False,
    scaled: bool = False,
    several: bool = False,
    given: tuple[bool, ...] = (),
    whole_row: bool = False,
    padded: bool = False,
) -> Kernel:
    """The kernel for the outputs of rows of logits, for their gradient, or for both at once.

    The gradients have to be multiplied by :func:`gradient_factor`; the arguments are those of
    :class:`Features`.
    """
    stage = "" if forward and backward else "_forward" if forward else "_backward"
    features = Features(spec, forward, backward, biased, scaled, several, given, whole_row, padded)
    return render.rendered("reductions", f"class_reductions{stage}", f=features)


@functools.cache
def gradient_factor(spec: Reductions) -> float:
    """The factor for the kernels' gradients: the constant part of the slope, divided by GAIN."""
    factor, _ = expression.unit_slope(spec.transform)
    return float(factor) / render.GAIN


# ---------------------------------------------------------------- names


def _name(output: Moment | LogitSum) -> str:
    """The variable of a sum."""
    name = f"s{output.a}{output.b}" if isinstance(output, Moment) else "z_sum"
    return name if output.weight is None else f"{name}_{output.weight}"


def _log_name(moment: Moment) -> str:
    """The variable of a moment of the log-softmax."""
    return f"m{_name(moment)[1:]}"


def _of_output(output: Output) -> str:
    """The variable of an incoming gradient."""
    if isinstance(output, str):
        return f"d_{output}"
    return f"d_{_log_name(output) if isinstance(output, Moment) else _name(output)}"


def _coefficient(a: int, b: int, weight: int | None) -> str:
    return f"c{a}{b}" if weight is None else f"c{a}{b}_{weight}"


def _of_moment(moment: Moment) -> Sum:
    a, b, weight = moment.a, moment.b, moment.weight
    sums = {m: Symbol(_name(m)) for m in raw([moment])}
    counted = Moment(0, 0)
    if counted in sums:  # the classes before this block
        sums[counted] = Symbol("start")
    shift, decay = Symbol("shift" if a else "gap"), Symbol("decay")
    grown = expression.text(shifted(moment, sums, shift, lambda e: decay ** (e / shift)))
    if not a and b > 1:
        grown = f"tl.where(grows, {grown}, {_name(moment)})"
    factors = ["e"] * a + ["near" if a else "away"] * b + [f"w{weight}"] * (weight is not None)
    return Sum(_name(moment), " * ".join(factors), grown, moment == counted)
