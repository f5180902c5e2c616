"""Parts of the logits on GPUs, and the products with their gradient, by the vendor's GEMMs.

In: the operands of a call. Out: a chunk of rows of their logits, or a slice of their classes, in
the dtype of x, in a buffer that all parts share; and from the gradient of each part those of x,
weight and bias. Between the two, :mod:`fxpass.kernels.reductions` launches a kernel::

    >>> x, weight = torch.randn(4, 8), torch.randn(10, 8)  # on a GPU
    >>> operands = Operands(x, weight, None, None, None, ())
    >>> part = LogitsSlice(slice(0, 2), slice(0, 10))
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


class LogitsSlice(NamedTuple):
    """Some rows and classes of the logits: all rows, or all classes."""

    rows: slice
    classes: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.classes.stop - self.classes.start

    def of(self, buffer: Tensor) -> Tensor:
        """Its place in a buffer that all parts share."""
        n, v = self.shape
        return buffer[:n, :v]


# ---------------------------------------------------------------- the logits


def chunks(operands: Operands, rows: int) -> list[LogitsSlice]:
    """Divides the rows, ``rows`` at a time."""
    n = len(operands.x)
    v = len(operands.weight)
    return [LogitsSlice(slice(i, min(i + rows, n)), slice(0, v)) for i in range(0, n, rows or 1)]


def slices(operands: Operands, classes: int) -> list[LogitsSlice]:
    """Divides the classes, ``classes`` at a time; none if there are no rows."""
    n = len(operands.x)
    v = len(operands.weight)
    starts = range(0, v if n else 0, classes)
    return [LogitsSlice(slice(0, n), slice(i, min(i + classes, v))) for i in starts]


def gemms_of(part: LogitsSlice, dtype: torch.dtype) -> list[slice]:
    """Divides the classes of a part: cuBLAS multiplies up to seven times as fast where sizes are
    multiples of 16 bytes, so the few classes beyond the last one have a GEMM of their own.

    Measured on an H200 with CUDA 13.0: 50,257 classes of 1024 rows in bf16 take 0.84 ms. One row
    stays whole: ``addmm`` of older releases of torch may read its f32 sum as 16 bits.
    """
    rows, classes = part
    end = classes.stop - part.shape[1] % (16 // dtype.itemsize)
    if rows.stop - rows.start == 1 or end in (classes.start, classes.stop):
        return [classes]
    return [slice(classes.start, end), slice(end, classes.stop)]


def logits_of(operands: Operands, part: LogitsSlice, buffer: Tensor) -> Tensor:
    """A part of the linear's output, in its place in the buffer."""
    rows, classes = part
    out = part.of(buffer)
    x = operands.x[rows]
    bias = operands.bias
    for some in gemms_of(part, x.dtype):
        z = out[:, some.start - classes.start : some.stop - classes.start]
        weight = operands.weight[some]
        of_some = None if bias is None or bias.dtype != x.dtype else bias[some]
        if not x.is_cuda:
            # CPUs multiply fp16 up to 100 times slower than f32; one rounding, as on a GPU
            of_some = None if of_some is None else of_some.float()
            z.copy_(F.linear(x.float(), weight.float(), of_some))
        elif of_some is None:
            torch.mm(x, weight.t(), out=z)
        else:
            torch.addmm(of_some, x, weight.t(), out=z)
    return out


@functools.cache
def load(kernel: Kernel) -> triton.JITFunction:
    """The kernel as a function that can be launched. The source is written to a file in Inductor's
    cache directory, named by its hash: tracebacks show its lines."""
    return getattr(PyCodeCache.load(kernel.source), kernel.name)


# ---------------------------------------------------------------- gradients


def dtypes_of(
    operands: Operands, spec: Reductions, plan: Plan, parts: list[LogitsSlice], sliced: bool
) -> dict[str, torch.dtype]:
    """The dtypes of the gradients of x, weight and bias that ``spec`` names, in its order.

    What several GEMMs add to is f32, and so is a bias's, but the weight's has its dtype where the
    plan says so. What one GEMM computes is rounded once: from chunks of rows x's, and with one
    chunk the weight's, to the dtype of the operand, but f32 for fp16; from ``sliced`` classes the
    weight's and the bias's, to the dtypes of their operands. Unrounded gradients are f32.
    """
    x = operands.x
    weight = operands.weight
    bias = operands.bias
    once: dict[str, torch.dtype] = {}
    if len(parts) == 1 or plan.rounded:
        once["weight"] = gradient_dtype(x.dtype)
    if all(len(gemms(part, x)) == 1 for part in parts):
        once["x"] = gradient_dtype(x.dtype)
    if sliced:
        once = {"weight": weight.dtype, "bias": weight.dtype if bias is None else bias.dtype}
    names = (name for name in PRODUCTS if name in spec.gradients)
    wide = torch.float32
    return {k: wide if k in spec.unrounded else once.get(k, wide) for k in names}


class Gradients:
    """The gradients of x, weight and bias, from the gradients of the parts of the logits, in order.

    Args:
        operands: of the call.
        dtypes: of the gradients that are computed, by name, see :func:`dtypes_of`.
        factor: of the gradients that :meth:`add` gets.
        unscale: another factor, 0-dim f32, of what is complete after a slice; None is 1.

    Attributes:
        found: by name.
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

    def add(self, part: LogitsSlice, g: Tensor) -> None:
        """Adds the gradient of a part of the logits; ``g`` is to be multiplied by the factors."""
        rows, classes = part
        if (bias := self.found.get("bias")) is not None:
            total = g.sum(0, dtype=torch.float32).mul_(self._factor)
            if self._unscale is not None:
                total.mul_(self._unscale)
            (bias.add_ if rows.start else bias[classes].copy_)(total)
        x = self.found.get("x")
        weight = self.found.get("weight")
        for place in gemms(part, g):
            few = g[:, place.start - classes.start : place.stop - classes.start]
            if x is not None:  # the first classes overwrite
                product(x[rows], few, self._weight[place], self._factor, add=place.start > 0)
            if weight is not None and self._unscale is not None:
                self._write_unscaled(weight[place], few.t(), self._unscale)
            elif weight is not None:
                product(weight[place], few.t(), self._x[rows], self._factor, rows.start > 0)

    def _write_unscaled(self, out: Tensor, g: Tensor, unscale: Tensor) -> None:
        """``out = factor * unscale * g @ x``, rounded once to the dtype of ``out``. The alpha of a
        GEMM cannot be a tensor on the device: this takes an f32 tile and a pass over it."""
        step = max(1, _F32_BYTES // (4 * max(1, out.shape[1])))
        for start in range(0, len(out), step):
            some = slice(start, start + step)
            exact = torch.empty_like(out[some], dtype=torch.float32)
            product(exact, g[some], self._x, self._factor, add=False)
            out[some] = exact.mul_(unscale)


def gemms(part: LogitsSlice, g: Tensor) -> list[slice]:
    """The classes of each product with the gradient of a part, of the dtype and device of ``g``:
    fewer at a time where they are copied to f32."""
    if mixed_gemm(g):
        return gemms_of(part, g.dtype)
    first = part.classes.start
    last = part.classes.stop
    starts = range(first, last, UPCAST_CLASSES)
    return [slice(i, min(i + UPCAST_CLASSES, last)) for i in starts]


def mixed_gemm(x: Tensor) -> bool:
    """Whether a GEMM of two ``x.dtype`` operands can add to an f32 result."""
    if x.dtype == torch.float32:
        return True
    if not x.is_cuda:
        return False
    if torch.version.hip:  # rocBLAS and hipBLASLt can, Composable Kernel cannot
        return torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Ck
    if x.dtype == torch.float16:  # torch refuses an f32 result while fp16 accumulation is allowed
        return not torch.backends.cuda.matmul.allow_fp16_accumulation
    return torch.cuda.get_device_capability(x.device) >= (8, 0)


def product(out: Tensor, a: Tensor, b: Tensor, factor: float, add: bool) -> None:
    """``out = factor * a @ b``, or ``out +=``, accumulated in f32: ``out`` is f32, or has the dtype
    of ``a``, to which the sum is rounded once."""
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
