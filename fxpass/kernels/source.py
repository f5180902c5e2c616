"""The Triton kernels of a fused loss, as source text specialised to one spec.

In: a spec, and which of class weights and the two scales of a row are present. Out:
:class:`Kernel`, a name and a whole Python module. What is not asked for leaves no text behind::

    >>> kernel = generate(Spec(label_smoothing=0.1), weighted=False)
    >>> "smooth" in kernel.source, "class_weight" in kernel.source, "ignore_index" in kernel.source
    (True, False, True)

What a program does with its row of logits is in :mod:`fxpass.kernels.row`, and by what its
gradients have to be multiplied, :func:`gradient_factor` says. None of these modules imports triton:
the sources can be read on any platform.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import textwrap
from dataclasses import dataclass

from fxpass.kernels import expression as triton_expression
from fxpass.kernels import row as triton_row
from fxpass.kernels.row import GAIN, Features
from fxpass.spec import expression
from fxpass.spec.spec import Spec


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: the function's name and the module that defines it."""

    name: str
    source: str


def kernels_of(
    spec: Spec,
    weighted: bool,
    whole_row: bool = False,
    padded: bool = False,
    biased: bool = False,
) -> tuple[Kernel, ...]:
    """The kernels that one fused loss runs, in order.

    Args:
        spec: as the operator gets it. Where backward computes the gradients, it has a kernel of its
            own (for the case that every output gets a gradient); else one kernel does both.
        weighted: whether there are class weights.
        whole_row, padded, biased: :func:`generate`; by default as for many classes, a multiple of
            16, and no bias in f32.
    """
    if spec.gradients_in_backward and spec.gradients:
        forward = dataclasses.replace(spec, gradients=())
        backward = dataclasses.replace(spec, lse=False)
        return (
            generate(forward, weighted, False, False, whole_row, padded, biased),
            generate(backward, weighted, True, spec.lse, whole_row, padded, biased),
        )
    return (generate(spec, weighted, False, False, whole_row, padded, biased),)


@functools.cache
def generate(
    spec: Spec,
    weighted: bool,
    row_scaled: bool = False,
    lse_scaled: bool = False,
    whole_row: bool = False,
    padded: bool = False,
    biased: bool = False,
) -> Kernel:
    """The kernel for one spec.

    The function it defines takes, by name:

        logits: ``[rows, V]`` bf16, f16 or f32, contiguous in V; the linear's output, which is
            overwritten with its gradient where the spec asks for any.
        target: class indices ``[rows]`` or class probabilities ``[rows, V]``, contiguous in V; not
            there for ``target=none``.
        bias: ``[V]`` f32, if ``biased``: added to the logits in f32.
        class_weight: ``[V]`` f32, if ``weighted``.
        row_scale: ``[rows]`` f32, if ``row_scaled`` and the spec asks for gradients.
        lse_scale: ``[rows]`` f32, if ``lse_scaled`` and the spec asks for gradients; row_scale has
            to be 0 then where a row is ignored.
        loss: ``[rows]`` f32, written.
        lse: ``[rows]`` f32, written, if the spec asks for it.
        stride, target_stride: elements from row to row; the latter for probabilities only.
        V, BLOCK_V: the classes, and how many a program holds at a time (a power of two); with
            ``whole_row`` all of them, and then each logit is read once. With ``padded`` the
            columns from V to the next multiple of 16 are scratch.

    The name is a hash of the text, so it is the same in every process, and specs that differ in
    nothing the kernel sees share one.
    """
    f = Features.of(spec, weighted, row_scaled, lse_scaled, whole_row, padded, biased)
    what = "Log-sum-exp" if f.target == "none" else "Cross-entropy"
    what += " of rows of logits" + (", and its gradient in place" if f.gradient else "")
    # A chunk may start at any row, and one compiled kernel has to serve all of them.
    per_row = [
        *["row_scale"] * f.row_scaled,
        *["lse_scale"] * f.lse_scaled,
        "loss",
        *["lse"] * f.lse,
    ]
    unaligned = ", ".join(f'"{name}"' for name in ["target"] * f.indices + per_row)
    parameters = [
        "logits",
        *["bias"] * f.biased,
        *["target"] * (f.target != "none"),
        *["class_weight"] * f.weighted,
        *per_row,
        "stride",
        *["target_stride"] * f.probabilities,
        "V",
        "BLOCK_V: tl.constexpr",
    ]
    return assemble(
        "linear_cross_entropy",
        docstring(what, f),
        transforms(f),
        f"do_not_specialize_on_alignment=[{unaligned}]",
        parameters,
        triton_row.body(f),
    )


@functools.cache
def gradient_factor(spec: Spec) -> float:
    """What the kernel's gradients have to be multiplied by: GAIN and constant slopes undone."""
    factor, _ = triton_expression.unit_slope(spec.transform)
    return float(factor) / GAIN


# ---------------------------------------------------------------- the module


def assemble(
    prefix: str,
    docstring: str,
    functions: list[str],
    jit: str,
    parameters: list[str],
    body: list[str],
) -> Kernel:
    """A module with one kernel, which is named by a prefix and the hash of the module's text.

    Args:
        prefix: of the name.
        docstring: the module's.
        functions: the source of each function that the kernel calls.
        jit: the arguments of ``triton.jit``.
        parameters, body: the kernel's.
    """
    placeholder = "linear_cross_entropy_NAME"
    head = [f"@triton.jit({jit})", f"def {placeholder}(", *(f"    {p}," for p in parameters), "):"]
    imports = "import triton\nimport triton.language as tl"
    kernel = "\n".join([*head, *triton_row.indent(body)])
    text = f"{docstring}\n\n{imports}\n\n\n" + "\n\n\n".join([*functions, kernel]) + "\n"
    name = f"{prefix}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return Kernel(name, text.replace(placeholder, name))


def transforms(f: Features) -> list[str]:
    """The source of each function that transforms a logit."""
    return triton_expression.functions(f.logits, slope=f.gradient) if f.transformed else []


def docstring(what: str, f: Features) -> str:
    """The docstring of a module: what its kernel computes, and for which features."""
    facts = ["no target" if f.target == "none" else f"class {f.target}"]
    if f.indices and f.ignore_index is not None:
        facts.append(f"ignore_index {f.ignore_index}")
    if f.sharded:
        facts.append(f"a shard of {f.shard_of} classes")
    if f.smoothing:
        facts.append(f"label smoothing {f.smoothing!r}")
    if f.weighted:
        facts.append("class weights")
    if f.biased:
        facts.append("a bias in f32")
    if f.transformed:
        facts.append(f"logits {expression.text(f.logits)}")
    if f.lse:
        facts.append("log-sum-exp of every row")
    if f.lse_scaled:
        facts.append("gradient of the log-sum-exp")
    return f'"""{what}. Generated by fxpass.\n\n{textwrap.fill("; ".join(facts), 96)}.\n"""'
