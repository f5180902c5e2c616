"""Generates the Triton kernels of the ``chunked`` strategy for one spec.

In: a spec, and the optional operands that are present. Out: :class:`Kernel`, a name and a whole
Python module. Features that the spec does not use leave no text in it::

    >>> kernel = generate(Spec(label_smoothing=0.1), weighted=False)
    >>> "smooth" in kernel.source, "class_weight" in kernel.source, "ignore_index" in kernel.source
    (True, False, True)

:mod:`fxpass.kernels.row` generates the body of the kernel. The gradients have to be multiplied by
:func:`gradient_factor`. None of these modules imports triton, so they run on any platform.
"""

from __future__ import annotations

import functools
import hashlib
import textwrap
from dataclasses import dataclass

from fxpass.kernels import expression, row
from fxpass.kernels.row import GAIN, Features
from fxpass.spec.expression import text
from fxpass.spec.spec import Spec


@dataclass(frozen=True)
class Kernel:
    """A generated kernel: the function's name and the module that defines it."""

    name: str
    source: str


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

    The kernel's parameters:

        logits: ``[rows, V]`` bf16, f16 or f32, contiguous in V; the linear's output, overwritten
            with its gradient if the spec names gradients.
        target: class indices ``[rows]`` or class probabilities ``[rows, V]``, contiguous in V;
            absent for ``target=none``.
        bias: ``[V]`` f32, if ``biased``: added to the logits in f32.
        class_weight: ``[V]`` f32, if ``weighted``.
        row_scale: ``[rows]`` f32, if ``row_scaled`` and the spec names gradients.
        lse_scale: ``[rows]`` f32, if ``lse_scaled`` and the spec names gradients; row_scale has to
            be 0 for ignored rows then.
        loss: ``[rows]`` f32, written.
        lse: ``[rows]`` f32, written, if the spec asks for it.
        stride, target_stride: elements from row to row; the latter for probabilities only.
        V, BLOCK_V: the classes, and the classes of a block (a power of two); with ``whole_row`` one
            block has all classes, and each logit is read once. With ``padded`` the kernel may
            overwrite the columns from V to the next multiple of 16.

    The name is a hash of the text: it is the same in every process, and specs with the same text
    share a kernel.
    """
    f = Features.of(spec, weighted, row_scaled, lse_scaled, whole_row, padded, biased)
    what = "Log-sum-exp" if f.target == "none" else "Cross-entropy"
    what += " of rows of logits" + (", and its gradient in place" if f.gradient else "")
    # A chunk may start at any row, and one compiled kernel serves all chunks.
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
        row.body(f),
    )


@functools.cache
def gradient_factor(spec: Spec) -> float:
    """The factor for the kernel's gradients: the constant part of the slope, divided by GAIN."""
    factor, _ = expression.unit_slope(spec.transform)
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
    """A module with one kernel, named by a prefix and the hash of the module's text.

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
    kernel = "\n".join([*head, *row.indent(body)])
    module = f"{docstring}\n\n{imports}\n\n\n" + "\n\n\n".join([*functions, kernel]) + "\n"
    name = f"{prefix}_{hashlib.sha256(module.encode()).hexdigest()[:8]}"
    return Kernel(name, module.replace(placeholder, name))


def transforms(f: Features) -> list[str]:
    """The source of each function that transforms a logit."""
    return expression.functions(f.logits, slope=f.gradient) if f.transformed else []


def docstring(what: str, f: Features) -> str:
    """The docstring of a generated module: the kernel's purpose and features."""
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
        facts.append(f"logits {text(f.logits)}")
    if f.lse:
        facts.append("log-sum-exp of every row")
    if f.lse_scaled:
        facts.append("gradient of the log-sum-exp")
    return f'"""{what}. Generated by fxpass.\n\n{textwrap.fill("; ".join(facts), 96)}.\n"""'
