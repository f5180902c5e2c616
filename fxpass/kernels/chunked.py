"""The fused loss on GPUs: GEMMs of the vendor library and one generated kernel per chunk of rows.

In: :class:`fxpass.spec.operands.Inputs` and a spec. Out: :class:`fxpass.spec.operands.Results`, as
from :func:`fxpass.aten.chunked.run`. A GEMM writes the logits of a chunk, in the dtype of x, to a
buffer that all chunks share. The kernel of :func:`fxpass.kernels.render.row` computes the row
losses and overwrites the logits with their gradient. Two GEMMs add its products to the f32
gradients of x and of the weight::

    >>> x, weight, target = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)  # on a GPU
    >>> inputs = Inputs(x, weight, None, target)
    >>> loss, _, x_grad, *_ = run(inputs, Spec(gradients=("x",)), rows=4096)
    >>> loss.shape, x_grad.shape
    (torch.Size([4]), torch.Size([4, 8]))

Nothing synchronises with the GPU, and the order of the sums is fixed. A CUDA graph can capture it
after a first run has compiled the kernel and tuned its blocks (:mod:`fxpass.kernels.tuning`).

In PyTorch 2.11 to 2.13 (``aten/src/ATen/native/cuda/Blas.cpp``), ``addmm`` with ``out_dtype`` and
``out`` equal to its first argument copies nothing. It calls ``cublasGemmEx`` with 16-bit operands,
an f32 result and ``beta``, so the GEMM accumulates each chunk into the f32 gradient. The GEMM reads
the view ``[:, :V]`` of the padded chunk through its leading dimension, without a copy. For every V,
rows start at multiples of 16 elements.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from fxpass.kernels import call, render, tuning
from fxpass.kernels.call import Candidate, Launch, Operands
from fxpass.kernels.render import Kernel
from fxpass.kernels.scaling import scale_coefficients
from fxpass.plan.devices import on_device
from fxpass.plan.plan import UPCAST_CLASSES, padded
from fxpass.spec import reduction_operands
from fxpass.spec.dtypes import gradient_dtype
from fxpass.spec.operands import Inputs, Results
from fxpass.spec.spec import Spec

# Chunks begin at multiples of the rows of a GEMM tile.
_CHUNK_MULTIPLE = 128


def run(inputs: Inputs, spec: Spec, rows: int) -> Results:
    """Losses and gradients of ``sum(row_scale * loss + lse_scale * lse)``, ``rows`` rows at a time.

    Args:
        inputs: x, weight, bias and logits in bf16, f16 or f32, with any strides; an f32 bias with
            16-bit operands is added in f32.
        spec: ``lse`` and ``gradients`` name the outputs.
        rows: rows of a chunk, at least 1; the scratch is one ``[rows, V]`` buffer in the dtype of
            x.

    Returns:
        loss and lse ``[N]`` in f32, and gradients in f32. The gradient of a bf16 weight is bf16 if
        there is one chunk.
    """
    with on_device(inputs.x.device):
        return _run(inputs, spec, rows)


def _run(inputs: Inputs, spec: Spec, rows: int) -> Results:
    x = inputs.x
    inputs, unscale = scale_coefficients(inputs, spec)
    loss = x.new_empty(x.shape[0], dtype=torch.float32)
    lse = torch.empty_like(loss) if spec.lse else None
    operands = Operands.of(inputs)
    (row,) = call.for_call(spec, operands, call.gpu_of(x.device))

    def launch(chosen: Candidate, part: slice, chunk: Tensor) -> None:
        _launch(chosen, inputs, spec, part, chunk, loss, lse)

    factor, in_place = render.gradient_factor(spec), call.read_in_place(spec, operands.logits)
    grads = over_chunks(inputs, spec.gradients, rows, factor, row, launch, in_place)
    if unscale.loss is not None:
        loss.mul_(unscale.loss)
    if unscale.gradients is not None:
        for grad in grads.values():
            grad.mul_(unscale.gradients)
    return Results(loss, lse, grads.get("x"), grads.get("weight"), grads.get("bias"))


def over_chunks(
    inputs: Inputs | reduction_operands.Operands,
    gradients: tuple[str, ...],
    rows: int,
    factor: float,
    row: Launch,
    launch: Callable[[Candidate, slice, Tensor], None],
    in_place: bool = False,
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, from a kernel that runs on each chunk of logits.

    Args:
        inputs: x, weight, bias, and the logits if they exist.
        gradients: the operands whose gradients are returned; if empty, the logits are only read.
        rows: rows of a chunk, at least 1.
        factor: of the gradients that the kernel writes.
        row: the kernel; its fastest candidate is chosen at the first chunk.
        launch: launches a candidate for some rows and their logits ``[rows, V]``. It is called
            more than once for the first chunk, with any logits, while candidates are timed.
        in_place: whether the given logits are read without a copy.

    Returns:
        f32 gradients; that of a bf16 weight is bf16 if there is one chunk.
    """
    x, weight = inputs.x, inputs.weight
    n, v = x.shape[0], weight.shape[0]
    shapes = {"x": x.shape, "weight": weight.shape, "bias": (v,)}
    # the first chunk overwrites the gradients of x and weight; the bias's starts at zero
    new = {name: x.new_empty if n and name != "bias" else x.new_zeros for name in gradients}
    parts = chunks(n, rows)
    # one chunk: the GEMM rounds the weight's gradient to its final dtype
    final = gradient_dtype(x.dtype) if len(parts) == 1 else torch.float32
    dtypes = {"x": torch.float32, "weight": final, "bias": torch.float32}
    grads = {name: new[name](shapes[name], dtype=dtypes[name]) for name in gradients}
    buffer = None if in_place else padded_buffer(x, max(map(_size, parts), default=0), v)
    chosen = row.candidates[0]
    if parts:
        # timed on the uninitialised buffer, before its first GEMM: it needs no memory, and the real
        # launch overwrites the outputs that the timing wrote
        first = _logits(inputs, parts[0], None) if buffer is None else buffer[: _size(parts[0])]
        chosen = best(
            row,
            x.device,
            first.dtype,
            tuple(first.shape),
            lambda candidate: launch(candidate, parts[0], first),
        )
    for part in parts:
        chunk = _logits(inputs, part, buffer)
        launch(chosen, part, chunk)
        if "bias" in grads:
            grads["bias"].add_(chunk.sum(0, dtype=torch.float32), alpha=factor)
        for classes in class_tiles(x, v):
            g = chunk[:, classes]
            if "x" in grads:
                product(grads["x"][part], g, weight[classes], factor, add=classes.start > 0)
            if "weight" in grads:
                product(grads["weight"][classes], g.t(), x[part], factor, add=part.start > 0)
    return grads


# ---------------------------------------------------------------- the chunk of logits


def chunks(n: int, rows: int) -> list[slice]:
    """Divides ``n`` rows into the fewest chunks of at most ``rows`` rows, of about equal size.

    >>> chunks(4100, 4096)
    [slice(0, 2176, None), slice(2176, 4100, None)]
    """
    if not n:
        return []
    fewest = -(-n // rows)
    even = -(-n // fewest)
    rows = min(rows, -(-even // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)
    return [slice(start, min(start + rows, n)) for start in range(0, n, rows)]


def _size(part: slice) -> int:
    return part.stop - part.start


def padded_buffer(x: Tensor, rows: int, v: int) -> Tensor:
    """An empty buffer ``[rows, v]`` in the dtype of x; rows start at multiples of
    ``plan.PADDING`` elements, for vector loads and GEMMs."""
    return x.new_empty((rows, padded(v)))[:, :v]


def _logits(
    inputs: Inputs | reduction_operands.Operands, part: slice, buffer: Tensor | None
) -> Tensor:
    """The linear's output for some rows, written to the buffer if there is one."""
    if inputs.logits is not None:
        logits = inputs.logits[part]
        return logits if buffer is None else buffer[: len(logits)].copy_(logits)
    assert buffer is not None
    x, weight = inputs.x[part], inputs.weight
    bias = inputs.bias if _wide_bias(inputs) is None else None
    out = buffer[: len(x)]
    if not x.is_cuda:
        # CPUs multiply fp16 up to 100 times slower than f32; one rounding, as on a GPU
        bias = None if bias is None else bias.float()
        return out.copy_(F.linear(x.float(), weight.float(), bias))
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


# ---------------------------------------------------------------- the kernel


def best(
    launch: Launch,
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    run: Callable[[Candidate], object],
) -> Candidate:
    """The fastest candidate, from :mod:`fxpass.kernels.tuning`; ``run`` launches a candidate."""
    by_options = {candidate.items: candidate for candidate in launch.candidates}
    options = tuning.best(
        load(launch.kernel),
        device,
        dtype,
        sizes,
        [candidate.options for candidate in launch.candidates],
        lambda options: run(by_options[tuple(options.items())]),
    )
    return by_options[tuple(options.items())]


def _wide_bias(inputs: Inputs | reduction_operands.Operands) -> Tensor | None:
    """The bias that the kernel adds; None if the GEMM adds it or the given logits include it."""
    if inputs.bias is None or not call.adds_bias(inputs.x, inputs.bias, inputs.logits):
        return None
    return inputs.bias.contiguous()


def _launch(
    chosen: Candidate,
    inputs: Inputs,
    spec: Spec,
    part: slice,
    chunk: Tensor,
    loss: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes ``loss[part]`` and ``lse[part]``, and overwrites ``chunk`` with its gradient if the
    spec has gradients."""
    rows, v = chunk.shape
    arguments: dict[str, Tensor | int] = {
        "logits": chunk,
        "loss": loss[part],
        "stride": chunk.stride(0),
        "V": v,
    }
    if inputs.target is not None:
        target = inputs.target[part]
        target = target if target.stride(-1) == 1 else target.contiguous()
        arguments["target"] = target
        if spec.target == "probabilities":
            arguments["target_stride"] = target.stride(0)
    if (bias := _wide_bias(inputs)) is not None:
        arguments["bias"] = bias
    if inputs.class_weight is not None:
        arguments["class_weight"] = inputs.class_weight
    per_row = {"row_scale": inputs.row_scale, "lse_scale": inputs.lse_scale, "lse": lse}
    arguments |= {name: tensor[part] for name, tensor in per_row.items() if tensor is not None}
    load(chosen.kernel)[(rows,)](**arguments, **chosen.options)


@functools.cache
def load(kernel: Kernel) -> triton.JITFunction:
    """The kernel as a function that can be launched.

    The source is written to a file in Inductor's cache directory, named by its hash. Tracebacks
    show its lines, and only users with write access to the cache can change the code.
    """
    return getattr(PyCodeCache.load(kernel.source), kernel.name)


# ---------------------------------------------------------------- gradients


def _mixed_gemm(x: Tensor) -> bool:
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


def class_tiles(x: Tensor, v: int) -> Iterator[slice]:
    """One slice of all classes, or slices of ``UPCAST_CLASSES`` where f32 copies are needed."""
    step = v if _mixed_gemm(x) else UPCAST_CLASSES
    for start in range(0, v, step):
        yield slice(start, start + step)


def product(out: Tensor, a: Tensor, b: Tensor, factor: float, add: bool) -> None:
    """``out = factor * a @ b``, or ``out +=``, accumulated in f32.

    ``out`` is f32; without ``add`` it may have the dtype of ``a``."""
    beta = int(add)  # 0: the old values, which may be nan, are not read
    if out.dtype != torch.float32:
        assert not add, "each addition would round to 16 bits"
        if out.is_cuda:
            torch.addmm(out, a, b, beta=0, alpha=factor, out=out)
        else:
            out.copy_((a.float() @ b.float()).mul_(factor))
    elif a.dtype != torch.float32 and _mixed_gemm(a):
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=factor, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=beta, alpha=factor)
