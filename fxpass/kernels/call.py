"""Which Triton kernels class reductions launch on a GPU, and with which options.

In: a spec, the operands, whose data is not read, and a GPU. Out: a :class:`Launch` for each
kernel::

    >>> x, weight = torch.empty(8192, 64, device="meta"), torch.empty(128256, 64, device="meta")
    >>> operands = Operands(x.bfloat16(), weight.bfloat16(), None, None, x[:, 0].long(), ())
    >>> spec = Reductions((), gradients=("x",), total=("pick",))
    >>> (row,) = for_reductions(spec, operands, ASSUMED)
    >>> row.stage, row.options
    ('reductions', {'BLOCK_V': 8192, 'num_warps': 16})

:func:`for_reductions` is pure. The launcher :mod:`fxpass.kernels.reductions` launches what it
returns, and ``explain`` lists it. It does not depend on the number of rows: with rows left out, or
in another batch, the same kernels run. The module does not import triton, so a call can be listed
on any platform.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fxpass.kernels import render
from fxpass.kernels.render import Kernel
from fxpass.plan.devices import implementation_for, properties_of, target_of
from fxpass.plan.plan import padded
from fxpass.spec import expression
from fxpass.spec.operands import Operands
from fxpass.spec.reductions import Reductions


class Gpu(NamedTuple):
    """What the choice of kernels reads of a GPU: its name for people, and the architecture as
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
    """The GPU that a listing is made for: the device, else the current GPU, or :data:`ASSUMED` if
    it does not run the kernels."""
    if not torch.cuda.is_available():
        return ASSUMED
    if device.type != "cuda" or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    runs, _ = implementation_for(device, torch.float32)
    return gpu_of(device) if runs == "triton" else ASSUMED


class Candidate(NamedTuple):
    """One way to launch: a kernel with sizes of blocks, in capitals, and options of a launch."""

    kernel: Kernel
    items: tuple[tuple[str, int], ...]

    @property
    def options(self) -> dict[str, int]:
        return dict(self.items)


class Launch(NamedTuple):
    """One kernel of a run, of the stage ``reductions`` or ``reductions_backward``, for a GPU: its
    candidates, of which :mod:`fxpass.kernels.tuning` chooses one, and the default, the first."""

    stage: str
    gpu: Gpu
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        return self.candidates[0].kernel.name

    @property
    def source(self) -> str:
        return self.candidates[0].kernel.source

    @property
    def options(self) -> dict[str, int]:
        return self.candidates[0].options


def adds_bias(operands: Operands) -> bool:
    """Whether the kernel adds the bias, because the GEMM would round it to the narrower dtype of
    the logits. Given logits include it."""
    bias = operands.bias
    return bias is not None and operands.logits is None and bias.dtype != operands.x.dtype


def for_reductions(
    spec: Reductions, operands: Operands, gpu: Gpu, forward: bool = True
) -> tuple[Launch, ...]:
    """The kernels of one run of class reductions: of forward, with the gradient of a total, or of
    backward. None for f64, for gradients of given values, and the largest logits: ATen computes
    these."""
    if operands.x.dtype == torch.float64 or spec.trains_weights or spec.top:
        return ()
    v = operands.weight.shape[0]

    def candidate(block: int, warps: int) -> Candidate:
        kernel = render.reductions(
            spec,
            forward,
            biased=adds_bias(operands),
            scaled=operands.scale is not None,
            several=operands.picks is not None and operands.many != 1,
            given=tuple(w.dim() == 2 for w in operands.given),
            whole_row=block >= v,
            ragged=padded(v) != v,
            apart=operands.logits is not None,
        )
        return Candidate(kernel, (("BLOCK_V", block), ("num_warps", warps)))

    sliced = not forward and spec.in_slices
    found = blocks(v, operands.x.dtype, gpu.target, spec, sliced)
    stage = "reductions" if forward else "reductions_backward"
    return (Launch(stage, gpu, tuple(candidate(*sizes) for sizes in found)),)


def launches(spec: Reductions, operands: Operands, gpu: Gpu) -> tuple[Launch, ...]:
    """The kernels of one call of class reductions, in order, where every output that is named has a
    gradient in all rows; the GPU need not exist. In fewer rows, backward also launches the first
    kernel of ``spec.of_backward``."""
    found = for_reductions(spec, operands, gpu)
    if spec.gradients and not spec.total:
        reduced = spec.of_backward
        found += for_reductions(reduced, operands.read_by(reduced), gpu, forward=False)
    return found


# ---------------------------------------------------------------- sizes of blocks

# Bytes of a block of a row, in the default configuration.
_BLOCK_BYTES = 1 << 14
# Other candidates, (bytes of a block, warps): more work per thread, or smaller programs. The large
# one spills 8 bytes on sm_120. A slice may have a few hundred classes only.
_LARGE, _OTHERS, _SMALL = (1 << 14, 8), ((1 << 13, 8), (1 << 12, 4)), (1 << 10, 1)
# Elements of the largest row that fits, with its exponentials, into the registers of 1024 threads.
_LARGEST_ROW = 1 << 14


def blocks(
    v: int, dtype: torch.dtype, target: str, spec: Reductions, sliced: bool = False
) -> list[tuple[int, int]]:
    """The classes of a block and the warps of each candidate, none of which spills registers.

    The default has blocks of up to 16 KiB of a row and 16 elements per thread: enough loads in
    flight. A thread of another candidate has more logits only where each has few other values: no
    weights, no functions, no gradient of a scale. ``sliced``: a launch may have some of the
    classes.

    >>> blocks(128256, torch.bfloat16, "sm_90", Reductions(("pick",)))
    [(8192, 16), (8192, 8), (4096, 8), (2048, 4)]
    """
    light = not (spec.weights or spec.sums or "scale" in spec.gradients)
    light = light and spec.transform == expression.Z
    whole = 1 << (v - 1).bit_length()
    block = min(whole, _BLOCK_BYTES // dtype.itemsize)
    default = block, max(1, min(16, block // 512))
    if spec.operands or spec.late:
        return [default]  # others spill on sm_80
    large = [_LARGE] * (not sliced and not target.startswith("sm_12"))
    sizes = (*large, *_OTHERS, *[_SMALL] * sliced)
    others = [(size // dtype.itemsize, warps) for size, warps in sizes]
    others = [(size, warps) for size, warps in others if size <= whole]
    if light and block < whole <= _LARGEST_ROW:
        others.append((whole, 16 if target.startswith("gfx") else 32))
    return [default, *(one for one in others if light or one[0] <= 16 * 32 * one[1])]
