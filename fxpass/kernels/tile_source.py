"""Generates the Triton kernels of the ``tiled`` strategy for one spec.

In: a spec, the optional operands that are present, and the features of the GEMM. Out:
:class:`fxpass.kernels.source.Kernel`, a name and a whole Python module. Features that the spec does
not use leave no text in it::

    >>> kernel = forward(Spec(), weighted=False, gemm=Gemm())
    >>> "bias" in kernel.source, "smooth" in kernel.source, "ignore_index" in kernel.source
    (False, False, True)

``forward`` accumulates partial sums over the logits, tile by tile, ``merge`` combines the splits of
a row, ``backward`` writes the gradient of some classes' logits. :mod:`fxpass.kernels.tile_body`
generates their bodies. Neither module imports triton.
"""

from __future__ import annotations

import dataclasses
import functools

from fxpass.kernels import source, tile_body
from fxpass.kernels.row import Features
from fxpass.kernels.source import Kernel
from fxpass.kernels.tile_body import Gemm
from fxpass.spec.spec import Spec

# Sizes that change from batch to batch, and vectors that may start at any address; one compiled
# kernel serves all of them. (A kernel that a CUDA graph records must have been loaded before.)
_DYNAMIC = ("N", "splits", "per_split", "class_blocks")
_UNALIGNED = ("row_scale", "lse_scale", "lse", "lse_rest", "loss")
_CONSTEXPR = ("BLOCK_N", "BLOCK_V", "BLOCK_D", "GROUP_N", "SPLITS")


@functools.cache
def forward(spec: Spec, weighted: bool, gemm: Gemm) -> Kernel:
    """Partial sums over the logits of each row.

    The kernel's parameters:

        x, weight: ``[N, D]`` and ``[V, D]`` bf16, f16 or f32, contiguous in D; tensor descriptors
            of blocks ``[BLOCK_N, BLOCK_D]`` and ``[BLOCK_V, BLOCK_D]`` if ``gemm.described``.
        bias: ``[V]``, if ``gemm.biased``.
        target: class indices ``[N]`` or class probabilities ``[N, V]``, contiguous in V.
        class_weight: ``[V]`` f32, if ``weighted`` and the loss sums over all classes.
        maxima, sums, picks, dots, masses: ``[N, splits]`` f32, written: the largest logit z, the
            sum of exp(z - largest), the target's logit, sum(q * (z - largest)) and sum(q).
        x_stride, weight_stride, target_stride: elements from row to row.
        per_split: classes of a split, a multiple of BLOCK_V.
        N, D, V, BLOCK_N, BLOCK_V, BLOCK_D, GROUP_N: sizes.

    The grid is one axis of ``cdiv(N, BLOCK_N) * splits`` programs.
    """
    f = _forward_features(spec, weighted)
    parameters = [
        *tile_body.operands(gemm),
        *["bias"] * gemm.biased,
        *_target(f),
        *["class_weight"] * (f.weighted and f.dense),
        *tile_body.partials(f),
        *["N", "D", "V", "splits", "per_split", "BLOCK_N", "BLOCK_V", "BLOCK_D", "GROUP_N"],
    ]
    what = "Sums over the logits of tiles of rows and classes"
    return _kernel("forward", what, f, parameters, tile_body.forward(f, gemm))


@functools.cache
def merge(spec: Spec, weighted: bool) -> Kernel:
    """Losses and log-sum-exps of the partial sums.

    The kernel's parameters are ``loss``, ``lse`` and ``lse_rest`` (the rounding error of the lse),
    ``[N]`` f32, written; the partial sums, target, class_weight ``[V]``, V, splits and per_split of
    :func:`forward`; and SPLITS, splits rounded up to a power of two. The grid is N programs.
    """
    f = _forward_features(spec, weighted)
    needs_target = f.indices and (f.ignore_index is not None or f.weighted or f.sharded)
    needs_v = f.indices and bool(f.smoothing) and not (f.sharded and f.weighted)
    sizes = ["V"] * needs_v + ["splits"]
    sizes += ["per_split"] * (f.dense and not tile_body.varies(f)) + ["SPLITS"]
    parameters = [
        *tile_body.partials(f),
        *["target"] * needs_target,
        *["class_weight"] * (f.weighted and f.indices),
        "loss",
        "lse",
        "lse_rest",
        *sizes,
    ]
    what = "Losses from partial sums"
    return _kernel("merge", what, f, parameters, tile_body.merge(f))


@functools.cache
def backward(
    spec: Spec,
    weighted: bool,
    row_scaled: bool,
    lse_scaled: bool,
    gemm: Gemm,
) -> Kernel:
    """The gradient of some classes' logits.

    The kernel's parameters are x, weight, bias, target and class_weight of :func:`forward`, with
    their strides and sizes, and:

        row_scale, lse_scale: ``[N]`` f32, if ``row_scaled`` and ``lse_scaled``.
        lse, lse_rest: ``[N]`` f32, as forward wrote them.
        row_mass: ``[N]`` f32, sum(q) of each row, for probabilities.
        class_mass: ``[1]`` f32, the sum of the class weights, for smoothed class indices.
        g: ``[N, classes]`` bf16, f16 or f32, contiguous in the classes, written: GAIN times the
            gradient, without the constant part of the slope, as in :mod:`fxpass.kernels.row`.
        first, class_blocks: the first class of g, and its number of blocks of classes.

    The grid is one axis of ``cdiv(N, BLOCK_N) * class_blocks`` programs.
    """
    spec = dataclasses.replace(spec, gradients=spec.gradients or ("x",))
    f = _features(spec, weighted, row_scaled, lse_scaled)
    parameters = [
        *tile_body.operands(gemm),
        *["bias"] * gemm.biased,
        *_target(f),
        *["class_weight"] * f.weighted,
        *["class_mass"] * (f.weighted and f.indices and bool(f.smoothing)),
        *["row_mass"] * f.probabilities,
        *["row_scale"] * f.row_scaled,
        *["lse_scale"] * f.lse_scaled,
        "lse",
        "lse_rest",
        "g",
        "g_stride",
        *["first", "class_blocks", "N", "D", "V", "BLOCK_N", "BLOCK_V", "BLOCK_D", "GROUP_N"],
    ]
    what = "Gradients of tiles of logits"
    return _kernel("backward", what, f, parameters, tile_body.backward(f, gemm))


@functools.cache
def mass(spec: Spec, weighted: bool) -> Kernel:
    """The sum of each row's target distribution, for class probabilities.

    The kernel's parameters are ``row_mass`` ``[N]`` f32, written, and target, target_stride,
    class_weight, V and BLOCK_V of :func:`forward`. The grid is N programs.
    """
    f = _forward_features(spec, weighted)
    parameters = [*_target(f), *["class_weight"] * f.weighted, "row_mass", "V", "BLOCK_V"]
    what = "Sums of target distributions"
    return _kernel("mass", what, f, parameters, tile_body.mass(f))


# ---------------------------------------------------------------- the module


def _features(
    spec: Spec, weighted: bool, row_scaled: bool = False, lse_scaled: bool = False
) -> Features:
    # forward always writes the lse, ignored rows included: backward needs it
    f = Features.of(spec, weighted, row_scaled, lse_scaled, whole_row=False, padded=False)
    return f._replace(lse=not f.gradient)


def _forward_features(spec: Spec, weighted: bool) -> Features:
    return _features(dataclasses.replace(spec, gradients=()), weighted)


def _target(f: Features) -> list[str]:
    return ["target"] * (f.target != "none") + ["target_stride"] * f.probabilities


def _kernel(stage: str, what: str, f: Features, parameters: list[str], body: list[str]) -> Kernel:
    transforms = source.transforms(f) if stage in ("forward", "backward") else []
    dynamic = [name for name in parameters if name in _DYNAMIC]
    per_row = [*["target"] * f.indices, *_UNALIGNED]
    unaligned = [name for name in parameters if name in per_row]
    return source.assemble(
        f"linear_cross_entropy_{stage}",
        source.docstring(what, f),
        transforms,
        f"do_not_specialize={_names(dynamic)}, do_not_specialize_on_alignment={_names(unaligned)}",
        [f"{name}{': tl.constexpr' * (name in _CONSTEXPR)}" for name in parameters],
        body,
    )


def _names(parameters: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in parameters) + "]"
