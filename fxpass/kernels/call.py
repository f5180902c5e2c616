"""Which Triton kernels class reductions launch on a GPU, and with which options.

In: a spec, the operands without their data, and a GPU. Out: a :class:`Launch` for each kernel::

    >>> x, weight = Operand((8192, 4096), torch.bfloat16), Operand((128256, 4096), torch.bfloat16)
    >>> spec = Reductions((), gradients=("x",), total=("pick",))
    >>> (row,) = for_reductions(spec, OfReductions(x, weight, picks=1), ASSUMED)
    >>> row.stage, row.options["BLOCK_V"]
    ('reductions', 8192)

:func:`for_reductions` is pure. The launcher :mod:`fxpass.kernels.reductions` launches what it
returns, and ``explain`` lists it. It does not depend on the number of rows: with rows left out, or
in another batch, the same kernels run. The module does not import triton, so a call can be listed
on any platform.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fxpass.kernels import render, row_config
from fxpass.kernels.render import Kernel
from fxpass.plan.devices import implementation_for, properties_of, target_of
from fxpass.plan.plan import padded
from fxpass.spec.operands import Operands
from fxpass.spec.reductions import Reductions


class Gpu(NamedTuple):
    """What the choice of kernels and options reads of a GPU.

    Attributes:
        name: for people.
        target: the architecture as compilers name it: ``sm_90``, ``gfx942``; ``cpu`` for Triton's
            interpreter.
    """

    name: str
    target: str

    def __str__(self) -> str:
        return f"{self.target} ({self.name})"


# The GPU of a listing on a machine without one.
ASSUMED = Gpu("an H200, assumed", "sm_90")
INTERPRETER = Gpu("Triton's interpreter", "cpu")


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; the interpreter for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    return Gpu(properties_of(device).name, target_of(device))


def gpu_for_listing(device: torch.device) -> Gpu:
    """The GPU that a listing is made for: the device, or the current GPU for a device that is none,
    or :data:`ASSUMED` if no GPU of this machine runs the kernels."""
    if not torch.cuda.is_available():
        return ASSUMED
    if device.type != "cuda" or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    runs, _ = implementation_for(device, torch.float32)
    return gpu_of(device) if runs == "triton" else ASSUMED


class Operand(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class OfReductions(NamedTuple):
    """The operands of reductions: whether there is a scale, the number of picks of a row (None
    without picks), for each of the given weights whether it is ``[N, V]``, and whether there are
    given logits."""

    x: Operand
    weight: Operand
    bias: Operand | None = None
    scaled: bool = False
    picks: int | None = None
    given: tuple[bool, ...] = ()
    logits: bool = False

    @property
    def adds_bias(self) -> bool:
        """Whether the kernel adds the bias, because the GEMM would round it to the narrower dtype
        of the logits. Given logits include it."""
        return self.bias is not None and not self.logits and self.bias.dtype != self.x.dtype

    @staticmethod
    def of(operands: Operands) -> OfReductions:
        x, weight, bias = (
            None if t is None else Operand(tuple(t.shape), t.dtype)
            for t in (operands.x, operands.weight, operands.bias)
        )
        assert x is not None
        assert weight is not None
        picks = None if operands.picks is None else operands.classes().shape[1]
        given = tuple(w.dim() == 2 for w in operands.given)
        scaled, logits = operands.scale is not None, operands.logits is not None
        return OfReductions(x, weight, bias, scaled, picks, given, logits)


class Candidate(NamedTuple):
    """One way to launch: a kernel with sizes of blocks, in capitals, and options of a launch."""

    kernel: Kernel
    items: tuple[tuple[str, int], ...]

    @property
    def options(self) -> dict[str, int]:
        return dict(self.items)


class Launch(NamedTuple):
    """One kernel of a run.

    Attributes:
        stage: ``reductions`` or ``reductions_backward``.
        gpu: the GPU that it is for.
        candidates: the default first; :mod:`fxpass.kernels.tuning` chooses one of them.
    """

    stage: str
    gpu: Gpu
    candidates: tuple[Candidate, ...]

    @property
    def kernel(self) -> Kernel:
        """The default candidate's kernel."""
        return self.candidates[0].kernel

    @property
    def name(self) -> str:
        return self.kernel.name

    @property
    def source(self) -> str:
        return self.kernel.source

    @property
    def options(self) -> dict[str, int]:
        """The default candidate's options."""
        return self.candidates[0].options


def for_reductions(
    spec: Reductions,
    operands: OfReductions,
    gpu: Gpu,
    forward: bool = True,
) -> tuple[Launch, ...]:
    """The kernels of one run of class reductions: of forward, with the gradient of a total, or of
    backward. None for f64, and for gradients of weights of moments: ATen computes these."""
    if operands.x.dtype == torch.float64 or spec.trains_weights:
        return ()
    v = operands.weight.shape[0]
    flags = {
        "biased": operands.adds_bias,
        "scaled": operands.scaled,
        "several": operands.picks not in (None, 1),
        "given": operands.given,
        "ragged": padded(v) != v,
        "apart": operands.logits,
    }

    def candidate(options: dict[str, int]) -> Candidate:
        whole_row = options["BLOCK_V"] >= v
        kernel = render.reductions(spec, forward, whole_row=whole_row, **flags)
        return Candidate(kernel, tuple(options.items()))

    sliced = not forward and render.in_slices(spec)
    candidates = row_config.row_candidates(v, operands.x.dtype, gpu.target, spec, sliced)
    stage = "reductions" if forward else "reductions_backward"
    return (Launch(stage, gpu, tuple(map(candidate, candidates))),)


def launches(spec: Reductions, operands: OfReductions, gpu: Gpu) -> tuple[Launch, ...]:
    """The kernels of one call of class reductions, in order, where every output that is named has a
    gradient; the GPU need not exist."""
    found = for_reductions(spec, operands, gpu)
    if spec.gradients and not spec.total:
        found += for_reductions(spec, operands, gpu, forward=False)
    return found
