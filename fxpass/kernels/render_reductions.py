"""Renders the Triton kernels of class reductions from ``templates/reductions.py.jinja``.

In: :class:`fxpass.spec.reductions.Reductions` and the optional operands that are present. Out: a
:class:`fxpass.kernels.render.Kernel` for the outputs, for their gradient, or for both. The algebra
comes from :mod:`fxpass.spec.reductions`, whose functions get symbols in place of numbers::

    >>> entropy = Reductions(("pick", Moment(1, 1)), gradients=("x",))
    >>> lines = reductions(entropy).source.splitlines()
    >>> print([line.strip() for line in lines if "s11 =" in line][-1])
    s11 = decay * (s10 * shift + s11) + tl.sum(e * near, 0)

What a call does not ask for leaves no text, as in :mod:`fxpass.kernels.render`.
"""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass
from functools import cached_property

from sympy import Symbol

from fxpass.kernels import expression, render
from fxpass.kernels.reduction_text import (
    Sum,
    coefficients_of,
    gradient_name_of,
    log_name_of,
    name_of,
    normalised_of,
    slope_of,
    sums_of,
)
from fxpass.kernels.render import Kernel
from fxpass.spec.expression import Z, text
from fxpass.spec.reductions import (
    OF_PICKS,
    LogitSum,
    Moment,
    Output,
    Reductions,
    Terms,
    for_slopes,
)


@dataclass(frozen=True)
class Features:
    """What changes the text of a kernel.

    Attributes:
        spec: the outputs, the transform and the moments that are saved.
        forward: whether the kernel computes the outputs, and a total with its gradient; otherwise
            it computes the gradient of outputs.
        biased, scaled: whether there is a bias in f32, and a scale of the rows.
        several: whether a row may have another number of picks than one.
        given: whether each of the weights is ``[N, V]`` and not ``[V]``.
        whole_row, padded: as of :func:`fxpass.kernels.render.row`.
    """

    spec: Reductions
    forward: bool
    biased: bool = False
    scaled: bool = False
    several: bool = False
    given: tuple[bool, ...] = ()
    whole_row: bool = False
    padded: bool = False

    @property
    def backward(self) -> bool:
        """Whether the kernel computes a gradient."""
        return not self.forward or bool(self.spec.total)

    @property
    def read(self) -> tuple[Output, ...]:
        """The outputs, those of the total too."""
        return tuple(dict.fromkeys((*self.spec.outputs, *self.spec.total)))

    @property
    def differentiated(self) -> tuple[Output, ...]:
        """The outputs with incoming gradients, in their order; those of a total are its weights."""
        return self.spec.total or self.spec.rows

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
            ", ".join(map(str, self.spec.outputs)): bool(self.spec.outputs),
            f"total of {', '.join(map(str, self.spec.total))}": bool(self.spec.total),
            "several picks": self.several and bool(self.places_of_picks),
            f"logits {text(self.spec.transform)}": self.transformed,
            "a scale of each row": self.scaled,
            "a bias in f32": self.biased,
        }
        return textwrap.fill("; ".join(fact for fact, holds in said.items() if holds), 96)

    # ------------------------------------------------------------ forward

    @property
    def moments(self) -> tuple[Moment, ...]:
        return tuple(o for o in self.read if isinstance(o, Moment))

    @cached_property
    def sums(self) -> list[Sum]:
        """The sums of the first pass."""
        return sums_of(self.read)

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
        found = ("max", "amax", "argmax") if self.forward else ("max", "amax", "peak")
        return not set(found).isdisjoint(self.spec.outputs)

    @property
    def shares(self) -> bool:
        """Whether equal maxima share a gradient."""
        return not self.forward and "amax" in self.spec.outputs

    @property
    def indexed(self) -> bool:
        return "argmax" in self.spec.outputs

    @property
    def said_of_sums(self) -> str:
        if not self.forward:
            return "the largest logit"
        under = "sums over the classes under their maximum m"
        return under + (" and the largest logit" if self.finds else "")

    @property
    def normalised(self) -> list[tuple[str, str]]:
        """The moments of the log-softmax, by name."""
        return normalised_of(dict.fromkeys((*self.moments, *self.sigmas)))

    def _places(self, outputs: tuple[Output, ...]) -> list[tuple[Output, str]]:
        """The first row of each output."""
        found, rows, picked = [], 0, 0
        for output in outputs:
            k = {0: "", 1: "K"}.get(picked, f"{picked} * K")
            found.append((output, f"({rows} + {k})" if k and rows else k or f"{rows}"))
            several = self.several and output in OF_PICKS
            rows, picked = rows + (not several), picked + several
        return found

    @property
    def _values(self) -> dict[Output, str]:
        values: dict[Output, str] = {
            "lse": "of_row",
            "pick": "z_c - m - log_s",
            "at": "z_c",
            "max": "highest",
            "amax": "highest",
            # nan if every logit is -inf
            "peak": 'tl.where(s10 == 0.0, float("nan"), -log_s)',
        }
        values |= {o: log_name_of(o) for o in self.moments}
        return values | {o: name_of(o) for o in self.read if isinstance(o, LogitSum)}

    @property
    def stored(self) -> list[tuple[str, str, bool]]:
        """The place and the value of each output, and whether it has a row for each pick."""
        places = self._places(self.spec.rows)
        return [(place, self._values[o], self.several and o in OF_PICKS) for o, place in places]

    @property
    def picks(self) -> bool:
        """Whether there are classes that are picked."""
        return not set(OF_PICKS).isdisjoint(self.read)

    @property
    def saved(self) -> list[str]:
        return [log_name_of(moment) for moment in self.spec.saved]

    # ------------------------------------------------------------ the gradient

    @property
    def loaded(self) -> list[tuple[str, int]]:
        """The moments that backward reads."""
        return [(log_name_of(moment), i) for i, moment in enumerate(self.spec.saved)]

    @property
    def incoming(self) -> list[tuple[str, str, bool]]:
        """The incoming gradient of each output, as :attr:`stored`."""
        places = self._places(self.differentiated)
        return [(gradient_name_of(o), place, self.several and o in OF_PICKS) for o, place in places]

    @property
    def total(self) -> list[tuple[str, str, bool]]:
        """The weight and the value of each output of the total, and whether they are vectors."""
        values = {o: f"({v})" if " " in v else v for o, v in self._values.items()}
        return [
            (gradient_name_of(o), values[o], self.several and o in OF_PICKS)
            for o in self.spec.total
        ]

    @property
    def sigmas(self) -> tuple[Moment, ...]:
        """The moments that the gradients read."""
        return for_slopes(self.spec.total) if self.spec.total else self.spec.saved

    @cached_property
    def _terms(self) -> Terms:
        terms = Terms()
        sigmas = {moment: Symbol(log_name_of(moment)) for moment in self.sigmas}
        for output in self.differentiated:
            grad = Symbol(gradient_name_of(output))
            if isinstance(output, Moment):
                terms.add_moment(output, grad, sigmas)
            elif isinstance(output, LogitSum):
                terms.add(0, 0, output.weight, grad)
            elif output == "lse":
                terms.add(1, 0, None, grad)
            elif output in ("pick", "peak"):
                several = self.several and output == "pick"
                terms.add(1, 0, None, -Symbol(f"{grad}_sum") if several else -grad)
        return terms

    @property
    def coefficients(self) -> list[tuple[str, str]]:
        return coefficients_of(self._terms)

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
        return slope_of(self._terms)

    @property
    def places_of_picks(self) -> list[str]:
        """The rows of incoming gradients of picks."""
        return [place for o, place in self._places(self.differentiated) if o in OF_PICKS]

    @property
    def picked(self) -> str:
        """What the class that is picked adds to its gradient."""
        return self._added(*OF_PICKS)

    @property
    def first(self) -> str:
        """What the first of the largest logits adds to its gradient."""
        return self._added("max", "peak")

    def _added(self, *outputs: str) -> str:
        return " + ".join(gradient_name_of(o) for o in outputs if o in self.differentiated)

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
        weights = (o.weight for o in self.read if not isinstance(o, str))
        return sorted({w for w in weights if w is not None})


@functools.cache
def reductions(
    spec: Reductions,
    forward: bool = True,
    *,
    biased: bool = False,
    scaled: bool = False,
    several: bool = False,
    given: tuple[bool, ...] = (),
    whole_row: bool = False,
    padded: bool = False,
) -> Kernel:
    """The kernel for the outputs of rows of logits, with a total's gradient; or for the gradient of
    outputs. Gradients have to be multiplied by :func:`gradient_factor`; the arguments are those of
    :class:`Features`."""
    features = Features(spec, forward, biased, scaled, several, given, whole_row, padded)
    name = "class_reductions" if forward else "class_reductions_backward"
    return render.rendered("reductions", name, f=features)


@functools.cache
def gradient_factor(spec: Reductions) -> float:
    """The factor for the kernels' gradients: the constant part of the slope, divided by GAIN."""
    factor, _ = expression.unit_slope(spec.transform)
    return float(factor) / render.GAIN
