"""Renders the Triton kernels of class reductions from ``templates/reductions.py.jinja``.

In: :class:`fxpass.formula.reductions.Reductions` and the optional operands that are present. Out:
:class:`Kernel`, a name and a whole Python module, for the outputs, for their gradient, or for both.
The algebra comes from the functions of :mod:`fxpass.formula.reductions`, here of symbols instead of
numbers::

    >>> entropy = Reductions(("pick", Moment(1, 1)), gradients=("x",))
    >>> lines = reductions_kernel(entropy).source.splitlines()
    >>> print([line.strip() for line in lines if "s11 =" in line][1])
    s11 = decay * (s10 * shift + s11) + tl.sum(tl.sum(e * near, 2), 0)

The template says what the kernel computes and what its parameters and variables are. Of an output
``moment(1,2,w0)``, s12_0 is the sum under the largest logit m, m12_0 the moment of the log-softmax,
d_m12_0 its incoming gradient. With y = z - m, e is exp(y), and ``near`` and ``away`` are y without
infinities and without the padding after the classes; ``shift`` and ``gap`` are the old maximum
minus the new maximum, decay = exp(shift).

The name of a kernel has a hash of the text: it is the same in every process, and specs with equal
text share a kernel. The module does not import triton, so it runs on any platform.
"""

from __future__ import annotations

import functools
import hashlib
import math
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

import sympy
from sympy import Symbol

from fxpass.formula.expression import Z, given_in
from fxpass.formula.outputs import LEAST_LOG, OF_PICKS, TOTAL, Moment, Output
from fxpass.formula.reductions import Reductions, normalised, raw_moments, shifted
from fxpass.formula.terms import Terms
from fxpass.kernels import expression
from fxpass.kernels.template import rendered
from fxpass.plan.parts import PADDING

# Most of a softmax over a vocabulary is below 6e-5, where fp16 loses precision, or below 6e-8, its
# smallest number. Gradients are stored multiplied by GAIN, in every dtype: a power of two changes
# no bits of bf16 and f32. The rest of fp16's range, a factor of 64, is for probabilities whose sum
# exceeds one and row coefficients up to 2. Slopes without a bound need all of the range, as in
# eager.
GAIN = 1024.0

# f32's lowest number, the initial maximum. -inf would give exp(-inf - -inf), which is nan.
LOWEST = "-3.4028234663852886e38"


class Kernel(NamedTuple):
    """A generated kernel: the function's name and the module that defines it."""

    name: str
    source: str


class OutputRows(NamedTuple):
    """The row of an output in ``[R, N]``, as text, and the mask of its picks."""

    output: Output
    row: str
    mask: str


class RawSum(NamedTuple):
    """A raw sum, as text: the variable, the term of one class, and the sum so far under the new
    maximum."""

    name: str
    term: str
    grown: str


class Features(NamedTuple):
    """The properties that change the text of a kernel, beside its formula.

    Attributes:
        biased, scaled: True with a bias in f32, and with a scale of the rows.
        several: True if a row may have more or fewer picks than one.
        given: for each given value, True if it is ``[N, V]`` and not ``[V]``.
        whole_row: True if one block has all classes, so that each logit is read once.
        ragged: True if the number of classes is no multiple of ``PADDING``: the columns up to the
            next multiple may be overwritten.
    """

    biased: bool = False
    scaled: bool = False
    several: bool = False
    given: tuple[bool, ...] = ()
    whole_row: bool = False
    ragged: bool = False


_NO_FEATURES = Features()


@functools.cache
def reductions_kernel(
    spec: Reductions, forward: bool = True, features: Features = _NO_FEATURES
) -> Kernel:
    """The kernel for the outputs of rows of logits, with a total's gradient; or for the gradient of
    outputs. Gradients have to be multiplied by :func:`gradient_factor`."""
    backward = not forward or bool(spec.total)
    module = rendered(
        GAIN=gain(spec),
        LOWEST=LOWEST,
        LEAST_LOG=LEAST_LOG,
        PADDING=PADDING,
        LOG2_E=math.log2(math.e),
        **_of_logits(spec, features, backward),
        **_of_sums(spec, features),
        **_of_gradient(spec, features, forward),
        f=features,
        spec=spec,
        forward=forward,
        backward=backward,
        name="kernel_NAME",
        sliced=not forward,
        gain=f"{gain(spec)} * " if backward else "",
    )
    name = "class_reductions" if forward else "class_reductions_backward"
    name = f"{name}_{hashlib.sha256(module.encode()).hexdigest()[:8]}"
    return Kernel(name, module.replace("kernel_NAME", name))


@functools.cache
def gain(spec: Reductions) -> float:
    """The factor of gradients as they are stored: GAIN, or 1 if slopes have no bound."""
    slope = expression.unit_slope(spec.transform)[1]
    return 1.0 if expression.upper_bound(slope).has(Z) else GAIN


@functools.cache
def gradient_factor(spec: Reductions) -> float:
    """The factor for the kernels' gradients: the slope's constant part, divided by the gain."""
    factor, _ = expression.unit_slope(spec.transform)
    return float(factor) / gain(spec)


# ---------------------------------------------------------------- what the template reads


def _of_logits(spec: Reductions, f: Features, backward: bool) -> dict[str, Any]:
    """The text of the docstring, the transform of a logit, and the given values at its class."""
    transformed = spec.transform != Z
    with_slope = backward and not expression.unit_slope(spec.transform)[1].is_number
    unread = ("gradients", "detached", "unrounded", "memory_mb", "accumulate")
    facts = [word for word in spec.text().split(" ") if word.partition("=")[0] not in unread]
    facts += [name for name in ("biased", "scaled", "several") if getattr(f, name)]
    functions = expression.transform_functions(spec.transform) if transformed else []
    return {
        "facts": textwrap.fill(", ".join(facts), 96),
        "functions": "\n\n".join([expression.LIBRARY, *(f"{text}\n" for text in functions), ""]),
        "transformed": transformed,
        "transform": functools.partial(_arguments, spec.transform),
        "with_slope": with_slope,
        "masks": with_slope and spec.masks_logits,
        "of_classes": ["z", "inside", *(f"w{i}" for i in spec.given_positions)],
        "positions": spec.given_positions,
    }


def _arguments(expr: Any, z: str = "z", given: str = "w{}") -> str:
    """The arguments of an expression's function: variables of the kernel, or other texts; ``given``
    has a hole for the position of a given value."""
    return ", ".join([z, *(given.format(i) for i in given_in(expr))])


def sums_of(outputs: Iterable[Output]) -> list[RawSum]:
    """The raw sums that these outputs need, except the number of classes. A sum comes after those
    that its shift reads.

    >>> for name, term, grown in sums_of([Moment(1, 1)]):
    ...     print(f"{name} = {grown} + sum({term})")
    s10 = decay * s10 + sum(e)
    s11 = decay * (s10 * shift + s11) + sum(e * near)
    """
    found = []
    sums = {moment: Symbol(_name(moment, kind="s")) for moment in raw_moments(list(outputs))}
    count = sums[Moment(0, 0)] = Symbol("s00")  # of the classes in the blocks before
    for moment in sums:
        a = moment.a
        b = moment.b
        weight = moment.weight
        shift = Symbol("shift" if a else "gap")
        grown = expression.text(shifted(moment, sums, shift, Symbol("decay")))
        if not a and b > 1:
            grown = f"tl.where(grows, {grown}, {sums[moment]})"
        factors = ["e"] * a + ["near" if a else "away"] * b + [f"w{weight}"] * (weight is not None)
        found.append(RawSum(str(sums[moment]), " * ".join(factors), grown))
    return [entry for entry in found if entry.name != str(count)]


_VALUES = {"lse": "of_row", "pick": "z_c - m - log_s", "at": "z_c", "max": "highest"}


def _of_sums(spec: Reductions, f: Features) -> dict[str, Any]:
    """The sums of the first pass, and the outputs."""
    read = (*spec.outputs, *spec.total)
    sums = {m: Symbol(_name(m, kind="s")) for m in raw_moments(read)}
    log = Symbol("log_s")
    inverse = Symbol("inverse")

    def value(output: Output) -> str:
        return _name(output) if isinstance(output, Moment) else _VALUES[output]

    return {
        "sums": sums_of(read),
        "normalised": [
            (_name(m), expression.text(normalised(m, sums, log, inverse)))
            for m in sums
            if m != TOTAL
        ],
        "stored": [(o.row, value(o.output), o.mask) for o in _output_rows(spec.rows, f.several)],
        "saved": [value(output) for output in spec.saved],
    }


def _of_gradient(spec: Reductions, f: Features, forward: bool) -> dict[str, Any]:
    """The incoming gradients, which are the weights of a total, and the gradient of a logit."""
    outputs = spec.total or (() if forward else spec.rows)
    names = {o: _name(o) for o in (*outputs, *spec.slope_moments)}
    terms = Terms()
    sigmas = {o: Symbol(name) for o, name in names.items()}
    for output in outputs if spec.gradients else ():
        of_picks = "_sum" if f.several and output in OF_PICKS else ""
        terms.add_output(output, Symbol(f"d_{names[output]}{of_picks}"), sigmas)
    rows = _output_rows(outputs, f.several)

    return {
        "incoming": [(f"d_{names[o.output]}", o.row, o.mask) for o in rows],
        "coefficients": [
            (_name(Moment(a, b, weight), kind="c"), expression.text(value))
            for (a, weight), polynomial in terms.coefficients.items()
            for b, value in polynomial.items()
        ],
        "slope": _slope(terms),
        "places_of_picks": [o.row.replace("k", "i") for o in rows if o.output in OF_PICKS],
        "picked": " + ".join(f"d_{output}" for output in OF_PICKS if output in outputs),
    }


def _slope(terms: Terms) -> str:
    """The slope of a logit, from its coefficients; always a block, also of a constant."""
    log = Symbol("l")
    softmax = Symbol("p")
    found = []
    for (a, weight), polynomial in terms.coefficients.items():
        powers = ((_name(Moment(a, b, weight), kind="c"), log**b) for b in polynomial)
        sums = sympy.Add(*(Symbol(name) * power for name, power in powers))
        w = 1 if weight is None else Symbol(f"w{weight}")
        found.append(softmax**a * w * sympy.horner(sums, wrt=log))
    slope = expression.text(sympy.Add(*found))
    vector = any(a or w is not None or max(b) for (a, w), b in terms.coefficients.items())
    return slope if vector else f"tl.zeros((BLOCK_V,), tl.float32) + {slope}"


def _output_rows(outputs: Iterable[Output], several: bool) -> list[OutputRows]:
    """The rows of outputs in their order; ``several``: a pick has K rows."""
    found = []
    rows = 0
    picked = 0
    for output in outputs:
        has_k_rows = several and output in OF_PICKS
        terms = [str(rows)] if rows or not picked else []
        if picked:
            terms.append("K" if picked == 1 else f"{picked} * K")
        if has_k_rows:
            terms.append("k")
        row = " + ".join(terms)
        mask = ", mask=k < K" if has_k_rows else ""
        found.append(OutputRows(output, f"({row})" if " " in row else row, mask))
        rows += not has_k_rows
        picked += has_k_rows
    return found


# ---------------------------------------------------------------- names


def _name(output: Output, kind: str = "m") -> str:
    """The variable of an output; of a moment's raw sum if ``kind`` is s, of a coefficient if c."""
    if isinstance(output, Moment):
        weight = "" if output.weight is None else f"_{output.weight}"
        return f"{kind}{output.a}{output.b}{weight}"
    return output
