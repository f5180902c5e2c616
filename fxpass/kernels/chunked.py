"""Parts of the logits on GPUs, and the products with their gradient, by the vendor's GEMMs.

In: the operands of a call. Out: a chunk of rows of the logits, or a slice of their classes, in the
dtype of x, in a buffer that all parts share; and, from the gradient of each part, the gradients of
x, weight and bias. Between the two, :mod:`fxpass.kernels.reductions` launches a kernel::

    >>> x, weight = torch.randn(4, 8), torch.randn(10, 8)  # on a GPU
    >>> operands = Operands(x, weight, None, None, None, ())
    >>> part = LogitsPart(slice(0, 2), slice(0, 10))
    >>> logits = logits_of(operands, part, torch.empty(2, 16))
    >>> gradients = Gradients(operands, {"x": torch.float32}, factor=1.0)
    >>> gradients.add(part, logits)
    >>> gradients.found["x"].shape
    torch.Size([4, 8])

In PyTorch 2.11 to 2.13 (``aten/src/ATen/native/cuda/Blas.cpp``), ``addmm`` with ``out`` equal to
its first argument copies nothing: the GEMM of 16-bit operands accumulates each chunk into the
gradient, of 16 bits or with ``out_dtype`` of f32, and reads the view ``[:, :V]`` of the padded
chunk as it lies.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from fxpass.formula.dtypes import gradient_dtype
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import PRODUCTS
from fxpass.formula.reductions import Reductions
from fxpass.kernels.render import Kernel
from fxpass.plan.plan import UPCAST_CLASSES, Plan

# Bytes of the f32 tile of a weight's gradient that is rounded in a second pass.
_F32_BYTES = 32 << 20


class LogitsPart(NamedTuple):
    """Some rows and classes of the logits: all rows, or all classes."""

    rows: slice
    classes: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.classes.stop - self.classes.start

    def view_of(self, buffer: Tensor) -> Tensor:
        """The memory of this part in a buffer that all parts share."""
        n, v = self.shape
        return buffer[:n, :v]


# ---------------------------------------------------------------- the logits


def row_parts(operands: Operands, rows: int) -> list[LogitsPart]:
    """Chunks of ``rows`` rows; the last one may be smaller."""
    n = len(operands.x)
    v = len(operands.weight)
    return [LogitsPart(slice(i, min(i + rows, n)), slice(0, v)) for i in range(0, n, rows or 1)]


def class_parts(operands: Operands, classes: int) -> list[LogitsPart]:
    """Slices of ``classes`` classes; the last one may be smaller. None if there are no rows."""
    n = len(operands.x)
    v = len(operands.weight)
    starts = range(0, v if n else 0, classes)
    return [LogitsPart(slice(0, n), slice(i, min(i + classes, v))) for i in starts]


def aligned_classes(part: LogitsPart, dtype: torch.dtype) -> list[slice]:
    """Divides the classes of a part for two GEMMs: cuBLAS multiplies up to seven times as fast if
    sizes are multiples of 16 bytes, so the classes after the last multiple have their own GEMM.

    Measured on an H200 with CUDA 13.0: 50,257 classes of 1024 rows in bf16 take 0.84 ms. A single
    row is not divided: ``addmm`` of older releases of torch may read its f32 sum as 16 bits.
    """
    rows, classes = part
    end = classes.stop - part.shape[1] % (16 // dtype.itemsize)
    if rows.stop - rows.start == 1 or end in (classes.start, classes.stop):
        return [classes]
    return [slice(classes.start, end), slice(end, classes.stop)]


def logits_of(operands: Operands, part: LogitsPart, buffer: Tensor) -> Tensor:
    """A part of the linear's output, written to the buffer."""
    rows, classes = part
    out = part.view_of(buffer)
    x = operands.x[rows]
    bias = operands.bias
    for some in aligned_classes(part, x.dtype):
        z = out[:, some.start - classes.start : some.stop - classes.start]
        weight = operands.weight[some]
        gemm_bias = None if bias is None or bias.dtype != x.dtype else bias[some]
        if not x.is_cuda:
            # CPUs multiply fp16 up to 100 times slower than f32; one rounding, as on a GPU
            gemm_bias = None if gemm_bias is None else gemm_bias.float()
            z.copy_(F.linear(x.float(), weight.float(), gemm_bias))
        elif gemm_bias is None:
            torch.mm(x, weight.t(), out=z)
        else:
            torch.addmm(gemm_bias, x, weight.t(), out=z)
    return out


@functools.cache
def jit_function(kernel: Kernel) -> triton.JITFunction:
    """The kernel as a function that can be launched. The source is written to a file in Inductor's
    cache directory, named by its hash: tracebacks show its lines."""
    return getattr(PyCodeCache.load(kernel.source), kernel.name)


# ---------------------------------------------------------------- gradients


def gradient_dtypes(
    operands: Operands, spec: Reductions, plan: Plan, parts: list[LogitsPart], sliced: bool
) -> dict[str, torch.dtype]:
    """The dtypes of the gradients of x, weight and bias that ``spec`` names, in its order.

    A gradient to which several GEMMs add is f32, and so is the bias's; but the weight's has the
    weight's dtype if the plan is ``rounded``. A gradient from one GEMM is rounded once: with chunks
    of rows x's, and with one chunk the weight's, to the operand's dtype, but f32 for fp16; with
    ``sliced`` classes the weight's and the bias's, to their operands' dtypes. Unrounded gradients
    are f32.
    """
    x = operands.x
    weight = operands.weight
    bias = operands.bias
    once: dict[str, torch.dtype] = {}
    if len(parts) == 1 or plan.rounded:
        once["weight"] = gradient_dtype(x.dtype)
    if all(len(product_classes(part, x)) == 1 for part in parts):
        once["x"] = gradient_dtype(x.dtype)
    if sliced:
        once = {"weight": weight.dtype, "bias": weight.dtype if bias is None else bias.dtype}
    once = {name: dtype for name, dtype in once.items() if name not in spec.unrounded}
    return {k: once.get(k, torch.float32) for k in PRODUCTS if k in spec.gradients}


class Gradients:
    """The gradients of x, weight and bias, from the gradients of the parts of the logits, in order.

    Args:
        operands: of the call.
        dtypes: the dtypes of the gradients that are computed, by name, see :func:`gradient_dtypes`.
        factor: multiplies all gradients that :meth:`add` gets.
        unscale: another factor, 0-dim f32, of the gradients that a slice completes: the weight's
            and the bias's; None is 1.

    Attributes:
        found: the gradients by name.
    """

    def __init__(
        self,
        operands: Operands,
        dtypes: Mapping[str, torch.dtype],
        factor: float,
        unscale: Tensor | None = None,
    ):
        x = operands.x
        weight = operands.weight
        self._x = x
        self._weight = weight
        self._factor = factor
        self._unscale = unscale
        shapes = {"x": x.shape, "weight": weight.shape, "bias": weight.shape[:1]}
        # the first part overwrites the gradients, if there is one
        new = x.new_empty if len(x) else x.new_zeros
        self.found = {k: new(shapes[k], dtype=dtype) for k, dtype in dtypes.items()}

    def add(self, part: LogitsPart, g: Tensor) -> None:
        """Adds the products with the gradient ``g`` of a part of the logits, times the factors."""
        rows, classes = part
        if (bias := self.found.get("bias")) is not None:
            total = g.sum(0, dtype=torch.float32).mul_(self._factor)
            if self._unscale is not None:
                total.mul_(self._unscale)
            (bias.add_ if rows.start else bias[classes].copy_)(total)
        x = self.found.get("x")
        weight = self.found.get("weight")
        for some in product_classes(part, g):
            g_some = g[:, some.start - classes.start : some.stop - classes.start]
            if x is not None:  # the first classes overwrite
                write_product(x[rows], g_some, self._weight[some], self._factor, some.start > 0)
            if weight is not None and self._unscale is not None:
                self._write_unscaled(weight[some], g_some.t(), self._unscale)
            elif weight is not None:
                add = rows.start > 0
                write_product(weight[some], g_some.t(), self._x[rows], self._factor, add)

    def _write_unscaled(self, out: Tensor, g: Tensor, unscale: Tensor) -> None:
        """``out = factor * unscale * g @ x``, rounded once to the dtype of ``out``. The alpha of a
        GEMM cannot be a tensor on the device, so each f32 tile is multiplied in a second pass."""
        step = max(1, _F32_BYTES // (4 * max(1, out.shape[1])))
        for start in range(0, len(out), step):
            some = slice(start, start + step)
            tile = torch.empty_like(out[some], dtype=torch.float32)
            write_product(tile, g[some], self._x, self._factor, add=False)
            out[some] = tile.mul_(unscale)


def product_classes(part: LogitsPart, g: Tensor) -> list[slice]:
    """Divides the classes of a part for products with its gradient, which is like ``g``: into fewer
    classes at a time where the gradient is copied to f32."""
    if mixed_gemm(g):
        return aligned_classes(part, g.dtype)
    first = part.classes.start
    last = part.classes.stop
    starts = range(first, last, UPCAST_CLASSES)
    return [slice(i, min(i + UPCAST_CLASSES, last)) for i in starts]


def mixed_gemm(x: Tensor) -> bool:
    """Tells if a GEMM of two operands like x can add to an f32 result."""
    if x.dtype == torch.float32:
        return True
    if not x.is_cuda:
        return False
    if torch.version.hip:  # rocBLAS and hipBLASLt can, Composable Kernel cannot
        return torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Ck
    if x.dtype == torch.float16:  # torch refuses an f32 result while fp16 accumulation is allowed
        return not torch.backends.cuda.matmul.allow_fp16_accumulation
    return torch.cuda.get_device_capability(x.device) >= (8, 0)


def write_product(out: Tensor, a: Tensor, b: Tensor, factor: float, add: bool) -> None:
    """``out = factor * a @ b``, or ``out +=``, accumulated in f32. ``out`` is f32, or has the dtype
    of ``a``; then the sum is rounded once."""
    beta = int(add)  # 0: the old values, which may be nan, are not read
    if out.dtype != torch.float32:
        if out.is_cuda:
            torch.addmm(out, a, b, beta=beta, alpha=factor, out=out)
        else:
            old = out.float()
            out.copy_(old.addmm_(a.float(), b.float(), beta=beta, alpha=factor))
    elif a.dtype != torch.float32 and mixed_gemm(a):
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=factor, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=beta, alpha=factor)
