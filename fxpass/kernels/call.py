"""Which Triton kernels a fused loss launches on a GPU, and with which options.

In: a spec, the operands without their data, and a GPU. Out: a :class:`Launch` for each kernel, in
order::

    >>> x, weight = Operand((8192, 4096), torch.bfloat16), Operand((128256, 4096), torch.bfloat16)
    >>> (row,) = for_call(Spec(gradients=("x",)), Operands(x, weight), ASSUMED)
    >>> row.stage, row.options["BLOCK_V"]
    ('row', 8192)
    >>> [one.stage for one in for_call(Spec(strategy="tiled"), Operands(x, weight), ASSUMED)]
    ['forward', 'merge']

:func:`for_call` is pure. The launchers :mod:`fxpass.kernels.chunked` and
:mod:`fxpass.kernels.tiled` launch what it returns, and ``explain`` lists it. It does not depend on
the number of rows: with ignored rows left out, or in another batch, the same kernels run. The
module does not import triton, so a call can be listed on any platform.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fxpass.kernels import render, render_reductions, row_config, tile_config
from fxpass.kernels.render import Gemm, Kernel
from fxpass.plan.devices import implementation_for, precision, properties_of, target_of
from fxpass.plan.plan import padded
from fxpass.spec import reduction_operands
from fxpass.spec.operands import Inputs
from fxpass.spec.reductions import Reductions
from fxpass.spec.spec import Spec


class Gpu(NamedTuple):
    """What the choice of kernels and options reads of a GPU, and of torch's settings for it.

    Attributes:
        name: for people.
        target: the architecture as compilers name it: ``sm_90``, ``gfx942``; ``cpu`` for Triton's
            interpreter.
        processors: the number of streaming multiprocessors or compute units.
        precision: of products of f32 operands, see :func:`fxpass.plan.devices.precision`.
    """

    name: str
    target: str
    processors: int
    precision: str = "ieee"

    def __str__(self) -> str:
        return f"{self.target} ({self.name})"


# The GPU of a listing on a machine without one.
ASSUMED = Gpu("an H200, assumed", "sm_90", 132)
INTERPRETER = Gpu("Triton's interpreter", "cpu", 4)


def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; the interpreter for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    properties = properties_of(device)
    target, processors = target_of(device), properties.multi_processor_count
    return Gpu(properties.name, target, processors, precision(torch.float32, target))


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
    """A tensor without its data.

    Attributes:
        shape, dtype: as of the tensor.
        strides: in elements; empty for a contiguous tensor.
        aligned: whether the first element's address is a multiple of 16 bytes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] = ()
    aligned: bool = True


class Operands(NamedTuple):
    """The operands of one run; ``weighted``, ``row_scaled`` and ``lse_scaled`` say whether there
    are class weights, and incoming gradients of the row losses and of the lse. None is absent."""

    x: Operand
    weight: Operand
    bias: Operand | None = None
    logits: Operand | None = None
    weighted: bool = False
    row_scaled: bool = False
    lse_scaled: bool = False

    @staticmethod
    def of(inputs: Inputs) -> Operands:
        x, weight, bias, logits = (
            None if t is None else Operand(tuple(t.shape), t.dtype, t.stride(), aligned(t))
            for t in (inputs.x, inputs.weight, inputs.bias, inputs.logits)
        )
        assert x is not None
        assert weight is not None
        scales = (inputs.class_weight, inputs.row_scale, inputs.lse_scale)
        return Operands(x, weight, bias, logits, *(scale is not None for scale in scales))


class OfReductions(NamedTuple):
    """The operands of reductions: whether there is a scale, the number of picks of a row (None
    without picks), and for each of the given weights whether it is ``[N, V]``."""

    x: Operand
    weight: Operand
    bias: Operand | None = None
    scaled: bool = False
    picks: int | None = None
    given: tuple[bool, ...] = ()

    @staticmethod
    def of(operands: reduction_operands.Operands) -> OfReductions:
        x, weight, bias = (
            None if t is None else Operand(tuple(t.shape), t.dtype, t.stride(), aligned(t))
            for t in (operands.x, operands.weight, operands.bias)
        )
        assert x is not None
        assert weight is not None
        picks = None if operands.picks is None else operands.classes().shape[1]
        given = tuple(w.dim() == 2 for w in operands.given)
        return OfReductions(x, weight, bias, operands.scale is not None, picks, given)


def aligned(tensor: Tensor) -> bool:
    """Whether a tensor's first element lies at a multiple of 16 bytes."""
    return tensor.data_ptr() % 16 == 0


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
        stage: ``row`` of ``chunked``; ``forward``, ``merge``, ``mass`` and ``backward`` of
            ``tiled``; ``reductions`` and ``reductions_backward``.
        gpu: the GPU that it is for.
        candidates: the default first; :mod:`fxpass.kernels.tuning` chooses one of them.
        described: whether x and weight are tensor descriptors of blocks ``[BLOCK_N, BLOCK_D]`` and
            ``[BLOCK_V, BLOCK_D]``.
    """

    stage: str
    gpu: Gpu
    candidates: tuple[Candidate, ...]
    described: bool = False

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


def for_call(spec: Spec, operands: Operands, gpu: Gpu) -> tuple[Launch, ...]:
    """The kernels of one run: of forward, with the gradients that ``spec`` names, or of backward.

    Args:
        spec: with gradients if the run computes them; its strategy decides the kernels.
        operands: x ``[N, D]``, weight ``[V, D]``, bias ``[V]``, logits ``[N, V]``.
        gpu: the device, which need not exist.
    """
    if operands.x.dtype == torch.float64:
        return ()  # these kernels compute in f32
    return (_tiled if spec.strategy == "tiled" else _chunked)(spec, operands, gpu)


# ---------------------------------------------------------------- chunked


def _chunked(spec: Spec, operands: Operands, gpu: Gpu) -> tuple[Launch, ...]:
    x, bias, logits = operands.x, operands.bias, operands.logits
    v = operands.weight.shape[0]
    wide_bias = adds_bias(x, bias, logits)
    scratch_columns = padded(v) != v and not read_in_place(spec, logits)
    # the scales of rows say which rows are ignored where the lse has a gradient
    row_scaled = operands.row_scaled or operands.lse_scaled
    flags = (operands.weighted, row_scaled, operands.lse_scaled)

    def candidate(options: dict[str, int]) -> Candidate:
        whole_row = options["BLOCK_V"] >= v
        kernel = render.row(spec, *flags, whole_row, scratch_columns, wide_bias)
        return Candidate(kernel, tuple(options.items()))

    candidates = row_config.row_candidates(v, x.dtype, gpu.target, spec)
    return (Launch("row", gpu, tuple(map(candidate, candidates))),)


def adds_bias(
    x: Operand | Tensor, bias: Operand | Tensor | None, logits: Operand | Tensor | None
) -> bool:
    """Whether the kernel adds the bias, because the GEMM would round it to the narrower dtype of
    the logits. Given logits include it."""
    return bias is not None and logits is None and bias.dtype != x.dtype


def read_in_place(spec: Spec, logits: Operand | None) -> bool:
    """Whether the kernel can read the given logits without a copy, because it only reads them."""
    if logits is None or spec.gradients:
        return False
    return not logits.strides or logits.strides[1] == 1


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
        "biased": adds_bias(operands.x, operands.bias, None),
        "scaled": operands.scaled,
        "several": operands.picks not in (None, 1),
        "given": operands.given,
        "padded": padded(v) != v,
    }

    def candidate(options: dict[str, int]) -> Candidate:
        whole_row = options["BLOCK_V"] >= v
        kernel = render_reductions.reductions(spec, forward, whole_row=whole_row, **flags)
        return Candidate(kernel, tuple(options.items()))

    candidates = row_config.reduction_candidates(v, operands.x.dtype, gpu.target, spec)
    stage = "reductions" if forward else "reductions_backward"
    return (Launch(stage, gpu, tuple(map(candidate, candidates))),)


# ---------------------------------------------------------------- tiled


def _tiled(spec: Spec, operands: Operands, gpu: Gpu) -> tuple[Launch, ...]:
    # the interpreter multiplies bf16 wrongly, so it gets f32 operands
    dtype = torch.float32 if gpu.target == "cpu" else operands.x.dtype
    configs = tile_config.configs_for(gpu.target, dtype, spec)
    described = tile_config.has_descriptors(gpu.target)
    described = described and _describable(operands.x, dtype, copied=True)
    described = described and _describable(operands.weight, dtype, copied=False)
    gemm = Gemm(
        biased=operands.bias is not None,
        precision=gpu.precision if dtype == torch.float32 else "",
        described=described,
        warp_specialized=described and tile_config.specializes_warps(gpu.target),
    )
    weighted = operands.weighted

    def tiles(stage: str, kernel: Kernel) -> Launch:
        candidates = (Candidate(kernel, tuple(config._asdict().items())) for config in configs)
        return Launch(stage, gpu, tuple(candidates), described)

    def rows(stage: str, kernel: Kernel, options: dict[str, int]) -> Launch:
        return Launch(stage, gpu, (Candidate(kernel, tuple(options.items())),))

    if not spec.gradients:
        merged = {"SPLITS": tile_config.most_splits(gpu.processors), "num_warps": 1}
        return (
            tiles("forward", render.forward(spec, weighted, gemm)),
            rows("merge", render.merge(spec, weighted), merged),
        )
    summed = []
    if spec.target == "probabilities":
        options = row_config.row_options(operands.weight.shape[0], torch.float32)
        summed = [rows("mass", render.mass(spec, weighted), options)]
    # for fp16, scaling adds the scales of rows to those of the lse
    row_scaled = operands.row_scaled or (operands.lse_scaled and operands.x.dtype == torch.float16)
    flags = (weighted, row_scaled, operands.lse_scaled)
    return (*summed, tiles("backward", render.backward(spec, *flags, gemm)))


def _describable(matrix: Operand, dtype: torch.dtype, copied: bool) -> bool:
    """Whether a tensor descriptor can describe a matrix: rows start at multiples of 16 bytes.

    A matrix that is not contiguous in its rows is copied first; with ``copied``, any matrix that is
    not contiguous and aligned."""
    width = matrix.shape[1]
    stride, inner = matrix.strides or (width, 1)
    if copied or inner != 1:
        stride, start = width, True
    else:
        start = matrix.aligned
    return start and stride * dtype.itemsize % 16 == 0 and stride >= width > 0
