"""The Triton kernels of a fused loss, as source text specialised to one spec.

In: a spec, and whether class weights and row scales are present. Out: :class:`Kernel`, a name and
a whole Python module. What a spec does not ask for leaves no text behind::

    >>> kernel = generate(Spec(label_smoothing=0.1), weighted=False)
    >>> "smooth" in kernel.source, "class_weight" in kernel.source, "ignore_index" in kernel.source
    (True, False, True)

One program works on one row of logits. The first pass takes the running maximum and the sums that
the loss needs; the second, where gradients are asked for, overwrites the logits with their
gradient. With z, q and Q as in :mod:`fxpass.aten`, the text computes

    loss = Q * log(sum(exp(z - m))) - sum(q * (z - m))      m = max(z)
    gradient = GAIN * row_scale * (Q * softmax(z) - q) * unit slope

and :func:`gradient_factor` says what such a gradient has to be multiplied by. Neither this module
nor :mod:`fxpass.triton_expression` imports triton: the sources can be read on any platform.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from sympy import Expr

from fxpass import expression, triton_expression
from fxpass.expression import Z
from fxpass.spec import Spec

# fp16 holds nothing below 6e-8 and little below 6e-5, while most of a softmax over a vocabulary is
# smaller than that. Gradients are stored this many times larger, in every dtype; a power of two
# costs bf16 and f32 nothing. The rest of fp16's range, a factor of 64, is left to probabilities
# that sum to more than one, to row coefficients up to 2 and to slopes.
GAIN = 1024.0


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: the function's name and the module that defines it."""

    name: str
    source: str


def kernels_of(spec: Spec, weighted: bool) -> tuple[Kernel, ...]:
    """The kernels that one fused loss runs, in order.

    Args:
        spec: as the operator gets it. For the reduction ``none`` with gradients, forward and
            backward have a kernel each; otherwise one kernel does both.
        weighted: whether there are class weights.
    """
    if spec.reduction == "none" and spec.gradients:
        forward = dataclasses.replace(spec, gradients=())
        return generate(forward, weighted), generate(spec, weighted, row_scaled=True)
    return (generate(spec, weighted),)


@functools.cache
def generate(spec: Spec, weighted: bool, row_scaled: bool = False) -> Kernel:
    """The kernel for one spec.

    The function it defines takes, by name:

        logits: ``[rows, V]`` bf16, f16 or f32, contiguous in V; the linear's output, which is
            overwritten with its gradient where the spec asks for any.
        target: class indices ``[rows]`` or class probabilities ``[rows, V]``, contiguous in V.
        class_weight: ``[V]`` f32, if ``weighted``.
        row_scale: ``[rows]`` f32, if ``row_scaled`` and the spec asks for gradients.
        loss: ``[rows]`` f32, written.
        stride, target_stride: elements from row to row; the latter for probabilities only.
        V, BLOCK_V: the classes, and how many a program holds at a time (a power of two).

    The name is a hash of the text, so it is the same in every process, and specs that differ in
    nothing the kernel sees share one.
    """
    features = _Features.of(spec, weighted, row_scaled)
    body = _module(features)
    name = f"linear_cross_entropy_{hashlib.sha256(body.encode()).hexdigest()[:8]}"
    return Kernel(name, body.replace(_NAME, name))


@functools.cache
def gradient_factor(spec: Spec) -> float:
    """What the kernel's gradients have to be multiplied by: GAIN and constant slopes undone."""
    factor, _ = triton_expression.unit_slope(spec.logits)
    return float(factor) / GAIN


class _Features(NamedTuple):
    """What shapes the text."""

    indices: bool
    ignore_index: int
    smoothing: float
    weighted: bool
    row_scaled: bool
    gradient: bool
    logits: Expr

    @staticmethod
    def of(spec: Spec, weighted: bool, row_scaled: bool) -> _Features:
        gradient = bool(spec.gradients)
        return _Features(
            indices=spec.target == "indices",
            ignore_index=spec.ignore_index,
            smoothing=spec.label_smoothing,
            weighted=weighted,
            row_scaled=row_scaled and gradient,
            gradient=gradient,
            logits=spec.logits,
        )

    @property
    def dense(self) -> bool:
        """Whether q has more than one entry, so that sum(q * z) runs over the whole row."""
        return not self.indices or bool(self.smoothing)

    @property
    def transformed(self) -> bool:
        return self.logits != Z


# ---------------------------------------------------------------- the module

_NAME = "linear_cross_entropy_NAME"


def _module(f: _Features) -> str:
    parts = [
        _docstring(f),
        "import triton\nimport triton.language as tl",
        *_functions(f),
        _kernel(f),
    ]
    return "\n\n".join(parts[:2]) + "\n\n\n" + "\n\n\n".join(parts[2:]) + "\n"


def _functions(f: _Features) -> list[str]:
    if not f.transformed:
        return []
    return triton_expression.functions(f.logits, slope=f.gradient)


def _docstring(f: _Features) -> str:
    facts = ["class indices" if f.indices else "class probabilities"]
    if f.indices:
        facts.append(f"ignore_index {f.ignore_index}")
    if f.smoothing:
        facts.append(f"label smoothing {f.smoothing!r}")
    if f.weighted:
        facts.append("class weights")
    if f.transformed:
        facts.append(f"logits {expression.text(f.logits)}")
    what = "Cross-entropy of rows of logits" + (", and its gradient in place" if f.gradient else "")
    return f'"""{what}. Generated by fxpass.\n\n{textwrap.fill("; ".join(facts), 96)}.\n"""'


def _kernel(f: _Features) -> str:
    # A chunk may start at any row, and one compiled kernel has to serve all of them.
    unaligned = ["target"] * f.indices + ["row_scale"] * f.row_scaled + ["loss"]
    parameters = [
        "logits",
        "target",
        *["class_weight"] * f.weighted,
        *["row_scale"] * f.row_scaled,
        "loss",
        "stride",
        *["target_stride"] * (not f.indices),
        "V",
        "BLOCK_V: tl.constexpr",
    ]
    names = ", ".join(f'"{name}"' for name in unaligned)
    head = [
        f"@triton.jit(do_not_specialize_on_alignment=[{names}])",
        f"def {_NAME}(",
        *(f"    {parameter}," for parameter in parameters),
        "):",
    ]
    body = [
        "row = tl.program_id(0).to(tl.int64)",
        "logits += row * stride",
        *(_target_of_row(f) if f.indices else ["target += row * target_stride"]),
        *_first_pass(f),
        *_loss(f),
        *(_second_pass(f) if f.gradient else []),
    ]
    return "\n".join([*head, *_indent(body)])


def _target_of_row(f: _Features) -> list[str]:
    zeros = [
        "for start in range(0, V, BLOCK_V):",
        "    cols = start + tl.arange(0, BLOCK_V)",
        "    tl.store(logits + cols, 0.0, mask=cols < V)",
    ]
    z_t = "tl.load(logits + t).to(tl.float32)"
    return [
        "t = tl.load(target + row).to(tl.int64)",
        f"if t == {f.ignore_index}:  # ignore_index",
        "    tl.store(loss + row, 0.0)",
        *(_indent(zeros) if f.gradient else []),
        "    return",
        "t = t.to(tl.int32)",
        # The reductions of the first pass are barriers: no warp overwrites this logit in the
        # second pass before every warp has read it here.
        f"z_t = transform({z_t})" if f.transformed else f"z_t = {z_t}",
    ]


def _first_pass(f: _Features) -> list[str]:
    dot = _dot(f)
    zeros = ["s", *["dot"] * f.dense, *["mass"] * any("mass" in line for line in dot)]
    q = "q" if not f.indices else "w" if f.weighted else "1"
    sums = "s = sum(exp(z - m))" + f", dot = sum({q} * (z - m))" * f.dense
    return [
        "",
        f"# m = max(z), {sums}; while they grow, m is the maximum so far",
        # not -inf: exp(-inf - -inf) is nan
        "lowest = tl.full((), -3.4028234663852886e38, tl.float32)",
        "m = lowest",
        *(f"{name} = tl.full((), 0.0, tl.float32)" for name in zeros),
        "for start in range(0, V, BLOCK_V):",
        *_indent(
            [
                *_block_of_logits(f, slope=False),
                "higher = tl.maximum(m, tl.max(z, 0))",
                "s = s * tl.exp(m - higher) + tl.sum(tl.exp(z - higher), 0)",
                *dot,
                "m = higher",
            ]
        ),
    ]


def _dot(f: _Features) -> list[str]:
    """One block's part of sum(q * (z - m)), where q has more than one entry, and of sum(q)."""
    if not f.dense:
        return []
    # Clamped: from the first m it may overflow to -inf, and no mass times that is nan.
    shift = "shift = tl.maximum(m - higher, lowest)"
    if f.indices and not f.weighted:
        # every class weighs 1, so the classes before this block weigh `start`
        return [shift, "dot += start * shift + tl.sum(tl.where(inside, z - higher, 0.0), 0)"]
    q = "w" if f.indices else "q"
    return [
        shift,
        *_row_of_targets(f),
        f"dot += mass * shift + tl.sum({q} * tl.where(inside, z - higher, 0.0), 0)",
        f"mass += tl.sum({q}, 0)",
    ]


def _block_of_logits(f: _Features, slope: bool) -> list[str]:
    out = ["cols = start + tl.arange(0, BLOCK_V)", "inside = cols < V"]
    if not f.transformed:
        load = 'tl.load(logits + cols, mask=inside, other=-float("inf"))'
        return [*out, f"z = {load}.to(tl.float32)"]
    called = "z, slope = transform_and_slope(raw)" if slope else "z = transform(raw)"
    return [
        *out,
        "raw = tl.load(logits + cols, mask=inside, other=0.0).to(tl.float32)",
        called,
        'z = tl.where(inside, z, -float("inf"))',
    ]


def _row_of_targets(f: _Features) -> list[str]:
    """One block of class weights ``w`` or of the target distribution ``q``; 0 outside."""
    weights = "tl.load(class_weight + cols, mask=inside, other=0.0)"
    if f.indices:
        return [f"w = {weights}"]
    out = ["q = tl.load(target + cols, mask=inside, other=0.0).to(tl.float32)"]
    if f.smoothing:
        out.append(f"q = tl.where(inside, {1 - f.smoothing!r} * q + {f.smoothing!r} / V, 0.0)")
    if f.weighted:
        out.append(f"q *= {weights}")
    return out


def _loss(f: _Features) -> list[str]:
    if not f.indices:
        return ["tl.store(loss + row, mass * tl.log(s) - dot)"]
    out = []
    sharp = [repr(1 - f.smoothing)] * bool(f.smoothing)
    sharp += ["tl.load(class_weight + t)"] * f.weighted
    if sharp:
        out.append(f"sharp = {' * '.join(sharp)}")
    if f.smoothing:
        out.append(f"smooth = {f.smoothing!r} / V")
    if f.smoothing and f.weighted:
        out.append("mass = sharp + smooth * mass")
    loss = f"{_times(_mass(f))}tl.log(s) - {_times(_sharp(f))}(z_t - m)"
    loss += " - smooth * dot" * bool(f.smoothing)
    return [*out, f"tl.store(loss + row, {loss})"]


def _second_pass(f: _Features) -> list[str]:
    g = ["g = share * tl.exp(z - m)"]
    if not f.indices:
        g = [*_row_of_targets(f), f"{g[0]} - unit * q"]
    elif f.smoothing and f.weighted:
        g = [*_row_of_targets(f), f"{g[0]} - smooth * w"]
    elif f.smoothing:
        g = [f"{g[0]} - smooth"]
    if f.indices:
        g[-1] += f" - tl.where(cols == t, {_times(_sharp(f))}unit, 0.0)"
    varying = not triton_expression.unit_slope(f.logits)[1].is_number
    row_scale = " * tl.load(row_scale + row)" * f.row_scaled
    return [
        "",
        "# the logits become their gradient; fp16 would lose what is below 6e-8, hence the unit",
        f"unit = {GAIN!r}{row_scale}",
        f"share = {_times(_mass(f))}unit / s",
        *["smooth *= unit"] * (f.indices and bool(f.smoothing)),
        "for start in range(0, V, BLOCK_V):",
        *_indent(
            [
                *_block_of_logits(f, slope=varying),
                *g,
                *["g *= slope"] * varying,
                "tl.store(logits + cols, g, mask=inside)",
            ]
        ),
    ]


def _mass(f: _Features) -> str:
    """Q = sum(q), as a name; empty where it is one."""
    if not f.indices:
        return "mass"
    if f.weighted:
        return "mass" if f.smoothing else "sharp"
    return ""


def _sharp(f: _Features) -> str:
    """What q has at the target class beyond smoothing, as a name; empty where it is one."""
    return "sharp" if f.smoothing or f.weighted else ""


def _times(name: str) -> str:
    return f"{name} * " if name else ""


def _indent(lines: list[str]) -> list[str]:
    return [f"    {line}" if line else "" for line in lines]
