"""Which Triton kernels class reductions launch on a GPU, and with which options.

In: a spec, the operands, whose data is not read, and a GPU. Out: a :class:`Launch` for each
kernel::

    >>> x, weight = torch.empty(8192, 64, device="meta"), torch.empty(128256, 64, device="meta")
    >>> operands = Operands(x.bfloat16(), weight.bfloat16(), None, None, x[:, 0].long(), ())
    >>> spec = Reductions((), gradients=("x",), total=("pick",))
    >>> (row,) = for_reductions(spec, operands, ASSUMED)
    >>> row.options
    {'BLOCK_V': 16384, 'LANES': 512, 'VECTOR': 8, 'num_warps': 16}

:func:`for_reductions` is pure: :mod:`fxpass.kernels.reductions` launches its result; ``explain``
lists it. The result does not depend on the number of rows: with rows left out, or in another batch,
the same kernels run. The module does not import triton, so every platform can list a call.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from fxpass.formula import expression
from fxpass.formula.operands import Operands
from fxpass.formula.reductions import Reductions
from fxpass.kernels import render
from fxpass.kernels.render import Features, Kernel
from fxpass.plan.devices import implementation_for, properties_of, target_of
from fxpass.plan.parts import padded


class Gpu(NamedTuple):
    """The facts of a GPU that choose kernels: its name for people, and the architecture as
    compilers name it: ``sm_90``, ``gfx942``; ``cpu`` for Triton's interpreter."""

    name: str
    target: str

    def __str__(self) -> str:
        return f"{self.target} ({self.name})"


# The GPU of a listing on a machine without one.
ASSUMED = Gpu("an H200, assumed", "sm_90")


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; the interpreter for a CPU."""
    if device.type != "cuda":
        return Gpu("Triton's interpreter", "cpu")
    return Gpu(properties_of(device).name, target_of(device))


def gpu_for_listing(device: torch.device) -> Gpu:
    """The GPU of a listing: the device, else the current GPU; :data:`ASSUMED` if that does not run
    the kernels."""
    if not torch.cuda.is_available():
        return ASSUMED
    if device.type != "cuda" or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    runs, _ = implementation_for(device, torch.float32)
    return gpu_of(device) if runs == "triton" else ASSUMED


class Launch(NamedTuple):
    """One kernel of a run for a GPU, with sizes of blocks, in capitals, and options of a launch."""

    gpu: Gpu
    kernel: Kernel
    items: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def source(self) -> str:
        return self.kernel.source

    @property
    def options(self) -> dict[str, int]:
        return dict(self.items)


def adds_bias(operands: Operands) -> bool:
    """Tells if the kernel adds the bias, because the GEMM would round it to the logits' narrower
    dtype."""
    bias = operands.bias
    return bias is not None and bias.dtype != operands.x.dtype


def for_reductions(
    spec: Reductions, operands: Operands, gpu: Gpu, forward: bool = True
) -> tuple[Launch, ...]:
    """The kernel of one run of class reductions: of forward, with the gradient of a total, or of
    backward. No kernel for f64, which ATen computes."""
    if operands.x.dtype == torch.float64:
        return ()
    picks = operands.picks
    features = Features(
        biased=adds_bias(operands),
        scaled=operands.scale is not None,
        several=picks is not None and operands.pick_count != 1,
        given=tuple(w.dim() == 2 for w in operands.given),
        ragged=padded(v := len(operands.weight)) != v,
    )
    return (_launch(spec, forward, features, v, operands.x.dtype, gpu),)


@functools.lru_cache(maxsize=1024)
def _launch(
    spec: Reductions,
    forward: bool,
    features: Features,
    v: int,
    dtype: torch.dtype,
    gpu: Gpu,
) -> Launch:
    # A kernel compares transformed logits of several passes, which have to have the same bits. But
    # a compiler may fuse a product and a sum, with one rounding, in one pass only.
    products = features.scaled or spec.transform != expression.Z
    exact = (("enable_fp_fusion", False),) * (spec.rounds_logits and products)
    vector = 16 // dtype.itemsize  # elements that a thread loads at once
    block, warps = block_of(v, dtype, spec, sliced=not forward)
    kernel = render.reductions_kernel(spec, forward, features._replace(whole_row=block >= v))
    lanes = min(warps * (64 if gpu.target.startswith("gfx") else 32), block // vector)
    sizes = {"BLOCK_V": block, "LANES": lanes, "VECTOR": vector}
    read = ((k, size) for k, size in sizes.items() if f"    {k}: tl.constexpr" in kernel.source)
    return Launch(gpu, kernel, (*read, ("num_warps", warps), *exact))


def launches(spec: Reductions, operands: Operands, gpu: Gpu) -> tuple[Launch, ...]:
    """The kernels of one call of class reductions, in order; the GPU need not exist."""
    found = for_reductions(spec, operands, gpu)
    if spec.gradients and not spec.total:
        found += for_reductions(spec.of_backward, operands, gpu, forward=False)
    return found


# ---------------------------------------------------------------- sizes of blocks

# Bytes of a block of a row, and warps. A thread has 32 logits of a long row if few values are
# computed from it. On an H200 a training step's kernel takes 0.64 ms for 4096 x 128256 logits in
# bf16 with these, and 0.71 to 0.76 with others.
_BLOCK = (1 << 14, 16)
_LONG = (1 << 15, 16)
_LONG_ROW = 1 << 14  # elements, above


def block_of(v: int, dtype: torch.dtype, spec: Reductions, sliced: bool = False) -> tuple[int, int]:
    """The classes of a block, and the warps; no kernel spills registers.

    A thread has more than 16 logits only if no other values are loaded or computed for each logit:
    no weights and no transform. ``sliced``: a launch may have only some of the classes.

    >>> block_of(128256, torch.bfloat16, Reductions(("pick",)))
    (16384, 16)
    """
    light = not spec.weight_positions and spec.transform == expression.Z
    whole = 1 << (v - 1).bit_length()
    size, warps = _LONG if light and not sliced and whole > _LONG_ROW else _BLOCK
    block = min(whole, size // dtype.itemsize)
    return block, max(1, min(warps, block // 512))
