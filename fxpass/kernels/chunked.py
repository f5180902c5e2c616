"""The fused loss on GPUs: GEMMs of the vendor library and one generated kernel per chunk of rows.

In: :class:`fxpass.aten.common.Inputs` and a spec. Out: :class:`fxpass.aten.common.Results`, as from
:func:`fxpass.aten.common.run`. Each chunk's logits are a GEMM in the dtype of x, written to one
buffer that all chunks share; the kernel of :mod:`fxpass.kernels.source` turns them in place into
row losses and gradient; two more GEMMs add that to the f32 gradients of x and of the weight::

    >>> x, weight, target = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)  # on a GPU
    >>> inputs = Inputs(x, weight, None, target)
    >>> loss, _, x_grad, *_ = run(inputs, Spec(gradients=("x",)), rows=4096)
    >>> loss.shape, x_grad.shape
    (torch.Size([4]), torch.Size([4, 8]))

Nothing waits for the GPU, and nothing is added up in an order that varies. So a CUDA graph can
record it, once a first run has compiled the kernel and chosen its blocks
(:mod:`fxpass.kernels.tuning`).

The GEMMs, as PyTorch 2.11 to 2.13 has them (``aten/src/ATen/native/cuda/Blas.cpp``): ``addmm`` with
``out_dtype`` takes an ``out`` that is also what it adds to, and copies nothing then; it is
``cublasGemmEx`` with 16-bit operands, an f32 result and ``beta``, so each chunk is added to the f32
gradient inside the GEMM. The views ``[:, :V]`` of the padded chunk are leading dimensions to it, no
copies: whatever V is, rows start at multiples of 16 elements, for loads and GEMMs alike.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from fxpass.aten.common import Inputs, Results
from fxpass.kernels import source as triton_source
from fxpass.kernels import tuning
from fxpass.kernels.row import ROW_MULTIPLE
from fxpass.kernels.scaling import scale_coefficients
from fxpass.kernels.source import Kernel
from fxpass.plan.devices import gradient_dtype, on_device
from fxpass.spec.spec import Spec

# Classes that are up-cast at a time where low-precision operands cannot add to an f32 result.
_CLASSES_PER_TILE = 8192
# Chunks begin at multiples of this: what the GEMMs' own tiles have in rows.
_CHUNK_MULTIPLE = 128


def run(inputs: Inputs, spec: Spec, rows: int) -> Results:
    """Losses and gradients of ``sum(row_scale * loss + lse_scale * lse)``, ``rows`` rows at a time.

    Args:
        inputs: x, weight, bias and logits in bf16, f16 or f32, with any strides; a bias may be
            f32 beside narrower operands, and is then added in f32.
        spec: ``lse`` and ``gradients`` say which of them are computed.
        rows: at least 1, and no chunk has more; the scratch is one ``[rows, V]`` buffer in the
            dtype of x.

    Returns:
        loss and lse ``[N]`` in f32, and the gradients: those of bf16 weights in bf16 where one
            chunk is all, else f32.
    """
    with on_device(inputs.x.device):
        return _run(inputs, spec, rows)


def _run(inputs: Inputs, spec: Spec, rows: int) -> Results:
    x, weight = inputs.x, inputs.weight
    n, v = x.shape[0], weight.shape[0]
    inputs, unscale = scale_coefficients(inputs, spec)
    factor = triton_source.gradient_factor(spec)
    loss = x.new_empty(n, dtype=torch.float32)
    lse = torch.empty_like(loss) if spec.lse else None
    shapes = {"x": x.shape, "weight": weight.shape, "bias": (v,)}
    # the first chunk overwrites what is large
    new = {name: x.new_empty if n and name != "bias" else x.new_zeros for name in spec.gradients}
    parts = chunks(n, rows)
    # straight from the GEMM where nothing is added to it
    final = gradient_dtype(x.dtype) if len(parts) == 1 else torch.float32
    dtypes = {"x": torch.float32, "weight": final, "bias": torch.float32}
    grads = {name: new[name](shapes[name], dtype=dtypes[name]) for name in spec.gradients}
    buffer = (
        None if _readable(inputs, spec) else padded_buffer(x, max(map(_size, parts), default=0), v)
    )
    options = _options(inputs, spec, parts[0], buffer, loss, lse) if parts else {}
    for part in parts:
        chunk = _logits(inputs, part, buffer)
        _launch(options, inputs, spec, part, chunk, loss, lse)
        if "bias" in grads:
            grads["bias"].add_(chunk.sum(0, dtype=torch.float32), alpha=factor)
        for classes in class_tiles(x, v):
            g = chunk[:, classes]
            if "x" in grads:
                product(grads["x"][part], g, weight[classes], factor, add=classes.start > 0)
            if "weight" in grads:
                product(grads["weight"][classes], g.t(), x[part], factor, add=part.start > 0)
    if unscale.loss is not None:
        loss.mul_(unscale.loss)
    if unscale.gradients is not None:
        for grad in grads.values():
            grad.mul_(unscale.gradients)
    return Results(loss, lse, grads.get("x"), grads.get("weight"), grads.get("bias"))


# ---------------------------------------------------------------- the chunk of logits


def chunks(n: int, rows: int) -> list[slice]:
    """``n`` rows in as few chunks of at most ``rows`` as there can be, none of them a small rest.

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


def _readable(inputs: Inputs, spec: Spec) -> bool:
    """Whether the kernel may read the given logits where they are: it will not write to them."""
    return inputs.logits is not None and not spec.gradients and inputs.logits.stride(1) == 1


def padded_buffer(x: Tensor, rows: int, v: int) -> Tensor:
    """``[rows, v]``, each row at a multiple of 16 elements, as vector loads and GEMMs want it."""
    return x.new_empty((rows, -(-v // ROW_MULTIPLE) * ROW_MULTIPLE))[:, :v]


def _logits(inputs: Inputs, part: slice, buffer: Tensor | None) -> Tensor:
    """The linear's output for some rows, in the buffer where there is one."""
    if inputs.logits is not None:
        logits = inputs.logits[part]
        return logits if buffer is None else buffer[: len(logits)].copy_(logits)
    assert buffer is not None
    x, weight = inputs.x[part], inputs.weight
    bias = inputs.bias if _wide_bias(inputs) is None else None
    out = buffer[: len(x)]
    if not x.is_cuda:
        # CPUs multiply fp16 up to a hundred times slower than f32; rounded once, as on a GPU
        bias = None if bias is None else bias.float()
        return out.copy_(F.linear(x.float(), weight.float(), bias))
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


# ---------------------------------------------------------------- the kernel


def _options(
    inputs: Inputs,
    spec: Spec,
    part: slice,
    buffer: Tensor | None,
    loss: Tensor,
    lse: Tensor | None,
) -> Mapping[str, int]:
    """The launch options that are fastest for the first chunk, and then hold for all of them.

    They are tried on whatever the buffer holds before its first GEMM, so that nothing more has to
    be allocated; the losses that this leaves are overwritten when the chunk's turn comes.
    """
    chunk = _logits(inputs, part, None) if buffer is None else buffer[: _size(part)]
    return tuning.best(
        load(_kernel(inputs, spec)),
        chunk.device,
        chunk.dtype,
        tuple(chunk.shape),
        _candidates(chunk.shape[1], chunk.dtype),
        lambda options: _launch(options, inputs, spec, part, chunk, loss, lse),
    )


def _kernel(inputs: Inputs, spec: Spec, whole_row: bool = False) -> Kernel:
    scales = (inputs.class_weight, inputs.row_scale, inputs.lse_scale)
    present = (scale is not None for scale in scales)
    padded = inputs.weight.shape[0] % ROW_MULTIPLE != 0 and not _readable(inputs, spec)
    return triton_source.generate(spec, *present, whole_row, padded, _wide_bias(inputs) is not None)


def _wide_bias(inputs: Inputs) -> Tensor | None:
    """The bias that the kernel adds: one that is wider than the logits, to whose dtype the GEMM
    would round the sum. Given logits hold theirs already."""
    bias = inputs.bias
    if bias is None or inputs.logits is not None or bias.dtype == inputs.x.dtype:
        return None
    return bias.contiguous()


def _launch(
    options: Mapping[str, int],
    inputs: Inputs,
    spec: Spec,
    part: slice,
    chunk: Tensor,
    loss: Tensor,
    lse: Tensor | None,
) -> None:
    """Writes ``loss[part]`` and ``lse[part]``; ``chunk`` becomes its gradient, if it has one."""
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
    kernel = _kernel(inputs, spec, whole_row=options["BLOCK_V"] >= v)
    load(kernel)[(rows,)](**arguments, **options)


@functools.cache
def load(kernel: Kernel) -> triton.JITFunction:
    """The kernel as a function that can be launched.

    Its source becomes a file in Inductor's cache directory, named by its hash: tracebacks show its
    lines, and whoever may not write there cannot change what runs.
    """
    return getattr(PyCodeCache.load(kernel.source), kernel.name)


# Bytes of a row that one block holds at a time.
_BLOCK_BYTES = 1 << 14


def row_options(v: int, dtype: torch.dtype) -> dict[str, int]:
    """Blocks of up to 16 KiB of a row, 16 elements a thread: enough loads in flight, no spills."""
    block = min(1 << (v - 1).bit_length(), _BLOCK_BYTES // dtype.itemsize)
    return {"BLOCK_V": block, "num_warps": max(1, min(16, block // 512))}


# Other blocks, and their warps: more work for a thread, or smaller programs.
_BLOCKS = ((_BLOCK_BYTES, 8), (_BLOCK_BYTES // 2, 8), (_BLOCK_BYTES // 4, 4))
# Bytes of a row that 1024 threads hold in registers beside its exponentials.
_LARGEST_ROW = 1 << 16


def _candidates(v: int, dtype: torch.dtype) -> list[dict[str, int]]:
    """The default and a few other launch options, a whole row where that is more than it takes."""
    default = row_options(v, dtype)
    whole = 1 << (v - 1).bit_length()
    blocks = [(size // dtype.itemsize, warps) for size, warps in _BLOCKS]
    others = [(block, warps) for block, warps in blocks if block <= whole]
    if default["BLOCK_V"] < whole <= _LARGEST_ROW // dtype.itemsize:
        others.append((whole, 16 if torch.version.hip else 32))
    return [default, *({"BLOCK_V": block, "num_warps": warps} for block, warps in others)]


# ---------------------------------------------------------------- gradients


def _mixed_gemm(x: Tensor) -> bool:
    """Whether products of two ``x.dtype`` operands can be added to an f32 result directly."""
    if x.dtype == torch.float32:
        return True
    if not x.is_cuda:
        return False
    if torch.version.hip:  # rocBLAS and hipBLASLt can, Composable Kernel cannot
        return torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Ck
    if x.dtype == torch.float16:  # refused while fp16 sums are allowed
        return not torch.backends.cuda.matmul.allow_fp16_accumulation
    return torch.cuda.get_device_capability(x.device) >= (8, 0)


def class_tiles(x: Tensor, v: int) -> Iterator[slice]:
    """All classes at once, or few enough that their f32 copies stay small."""
    step = v if _mixed_gemm(x) else _CLASSES_PER_TILE
    for start in range(0, v, step):
        yield slice(start, start + step)


def product(out: Tensor, a: Tensor, b: Tensor, factor: float, add: bool) -> None:
    """``out = factor * a @ b``, or ``out +=``, with the sum taken in f32 and ``out`` f32, or as
    ``a`` where nothing is added."""
    beta = int(add)  # 0: what is there is not read, nan or not
    if out.dtype != torch.float32:
        assert not add, "16 bits would be rounded with each sum"
        if out.is_cuda:
            torch.addmm(out, a, b, beta=0, alpha=factor, out=out)
        else:
            out.copy_((a.float() @ b.float()).mul_(factor))
    elif a.dtype != torch.float32 and _mixed_gemm(a):
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, alpha=factor, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=beta, alpha=factor)
