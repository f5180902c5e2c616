"""Renders the Triton kernels of class reductions from ``templates/reductions.py.jinja``.

In: :class:`fxpass.spec.reductions.Reductions` and the optional operands that are present. Out:
:class:`Kernel`, a name and a whole Python module, for the outputs, for their gradient, or for both.
The algebra comes from :mod:`fxpass.spec.reductions`, whose functions get symbols in place of
numbers::

    >>> entropy = Reductions(("pick", Moment(1, 1)), gradients=("x",))
    >>> lines = reductions(entropy).source.splitlines()
    >>> print([line.strip() for line in lines if "s11 =" in line][-1])
    s11 = decay * (s10 * shift + s11) + tl.sum(e * near, 0)

The template says what the kernel computes and what its parameters are. It reads :class:`Features`,
and what a call does not ask for leaves no text.

The name of a kernel is a hash of the text: it is the same in every process, and specs with the same
text share a kernel. The module does not import triton, so it runs on any platform.
"""

from __future__ import annotations

import functools
import hashlib
import math
import textwrap
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fxpass.kernels import expression
from fxpass.kernels.reduction_text import (
    Sum,
    coefficients_of,
    gradient_name_of,
    log_name_of,
    normalised_of,
    places_of,
    slope_of,
    sums_of,
    terms_of,
    value_of,
)
from fxpass.kernels.template import rendered
from fxpass.plan.plan import PADDING
from fxpass.spec.expression import Z, operands, text
from fxpass.spec.reductions import (
    LEAST_LOG,
    OF_PICKS,
    Moment,
    Output,
    Reductions,
    Terms,
    for_slopes,
)

# Most of a softmax over a vocabulary is below 6e-5, where fp16 loses precision, or below 6e-8, its
# smallest number. Gradients are stored multiplied by GAIN, in every dtype: a power of two changes
# no bits of bf16 and f32. The rest of fp16's range, a factor of 64, is for probabilities whose sum
# exceeds one, row coefficients up to 2, and slopes.
GAIN = 1024.0

# f32's lowest number, the initial maximum. -inf would give exp(-inf - -inf), which is nan.
LOWEST = "-3.4028234663852886e38"

_CONSTANTS = {"GAIN": GAIN, "LOWEST": LOWEST, "LEAST_LOG": LEAST_LOG, "PADDING": PADDING}
_CONSTANTS["LOG2_E"] = math.log2(math.e)
_NAME = "kernel_NAME"


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: the function's name and the module that defines it."""

    name: str
    source: str


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
        whole_row: whether one block has all classes, so that each logit is read once.
        ragged: whether the number of classes is no multiple of ``PADDING``.
        apart: whether the logits are given: they are not written to, nor is what lies behind them.
    """

    spec: Reductions
    forward: bool
    biased: bool = False
    scaled: bool = False
    several: bool = False
    given: tuple[bool, ...] = ()
    whole_row: bool = False
    ragged: bool = False
    apart: bool = False

    @property
    def padded(self) -> bool:
        """Whether the columns from V to the next multiple of ``PADDING`` may be overwritten."""
        return self.ragged and not self.apart

    @property
    def backward(self) -> bool:
        """Whether the kernel computes a gradient."""
        return not self.forward or bool(self.spec.total and self.spec.gradients)

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
    def hits(self) -> list[int]:
        """The picks that the transform compares classes with."""
        return [i for kind, i in operands(self.spec.transform) if kind == "hit"]

    @property
    def weights_of_transform(self) -> list[int]:
        """The positions of the given values that the transform reads."""
        return [i for kind, i in operands(self.spec.transform) if kind == "given"]

    def transform(self, logit: str, given: str = "w{}", hit: str = "h{}") -> str:
        """The arguments of the transform: a logit and what is read beside it, as text of its
        position."""
        text = {"given": given, "hit": hit}
        read = (text[kind].format(i) for kind, i in operands(self.spec.transform))
        return ", ".join((logit, *read))

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
        of_backward = "the gradient of the logits" + " in place" * (not self.apart)
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
    def sliced(self) -> bool:
        """Whether a launch may have some of the classes."""
        return not self.forward and in_slices(self.spec)

    @property
    def first_pass(self) -> bool:
        return not self.sliced

    @property
    def finds(self) -> bool:
        """Whether the kernel looks for the largest logit and its class."""
        found = not {"max", "amax", "argmax"}.isdisjoint(self.spec.outputs)
        return found if self.forward else self.first_pass

    @property
    def shares(self) -> bool:
        """Whether equal maxima share a gradient."""
        return not self.forward and "amax" in self.spec.outputs

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

    @property
    def stored(self) -> list[tuple[str, str, bool]]:
        """The place and the value of each output, and whether it has a row for each pick."""
        places = places_of(self.spec.rows, self.several)
        return [(place, value_of(o), self.several and o in OF_PICKS) for o, place in places]

    @property
    def picks(self) -> bool:
        """Whether there are classes that are picked."""
        return not set(OF_PICKS).isdisjoint(self.read)

    @property
    def saved(self) -> list[str]:
        """The moments that forward writes and backward reads."""
        return [log_name_of(moment) for moment in self.spec.saved]

    # ------------------------------------------------------------ the gradient

    @property
    def gain(self) -> str:
        """The factor of incoming gradients: none for a total without gradients."""
        return f"{GAIN} * " if self.backward else ""

    @property
    def incoming(self) -> list[tuple[str, str, bool]]:
        """The incoming gradient of each output, as :attr:`stored`."""
        places = places_of(self.differentiated, self.several)
        return [(gradient_name_of(o), place, self.several and o in OF_PICKS) for o, place in places]

    @property
    def total(self) -> list[tuple[str, str, bool]]:
        """The weight and the value of each output of the total, and whether they are vectors."""
        values = {o: value_of(o) for o in self.spec.total}
        return [
            (gradient_name_of(o), f"({v})" if " " in v else v, self.several and o in OF_PICKS)
            for o, v in values.items()
        ]

    @property
    def sigmas(self) -> tuple[Moment, ...]:
        """The moments that the gradients read."""
        return for_slopes(self.spec.total) if self.forward and self.backward else self.spec.saved

    @cached_property
    def _terms(self) -> Terms:
        return terms_of(self.differentiated, self.sigmas, self.several)

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
        return [place for o, place in places_of(self.differentiated, self.several) if o in OF_PICKS]

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
        return self._weights_of_outputs if self.forward else []

    @property
    def weights_of_slope(self) -> list[int]:
        return sorted({w for _, w in self._terms.coefficients if w is not None})

    @property
    def _weights_of_outputs(self) -> list[int]:
        weights = (o.weight for o in self.read if not isinstance(o, str))
        return sorted({w for w in weights if w is not None})

    @property
    def weights_read(self) -> list[int]:
        """The positions of the given values, whether a pass reads them or not."""
        return sorted({*self._weights_of_outputs, *self.weights_of_transform})


@functools.cache
def reductions(spec: Reductions, forward: bool = True, **present: Any) -> Kernel:
    """The kernel for the outputs of rows of logits, with a total's gradient; or for the gradient of
    outputs. Gradients have to be multiplied by :func:`gradient_factor`; the arguments are those of
    :class:`Features`."""
    module = rendered(f=Features(spec, forward, **present), name=_NAME, **_CONSTANTS)
    name = "class_reductions" if forward else "class_reductions_backward"
    name = f"{name}_{hashlib.sha256(module.encode()).hexdigest()[:8]}"
    return Kernel(name, module.replace(_NAME, name))


def in_slices(spec: Reductions) -> bool:
    """Whether the gradient of outputs can be computed for some of the classes at a time: it needs
    the lse and other sums of a row, which forward has saved, but not its largest logit."""
    return {"max", "amax", "peak"}.isdisjoint(spec.outputs)


@functools.cache
def gradient_factor(spec: Reductions) -> float:
    """The factor for the kernels' gradients: the constant part of the slope, divided by GAIN."""
    factor, _ = expression.unit_slope(spec.transform)
    return float(factor) / GAIN
