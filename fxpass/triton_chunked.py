"""The fused loss on GPUs: GEMMs of the vendor library and one generated kernel per chunk of rows.

In: :class:`fxpass.aten.Inputs` and a spec. Out: :class:`fxpass.aten.Outputs`, as from
:func:`fxpass.aten.run`. Each chunk's logits are a GEMM in the dtype of x, written to one buffer
that all chunks share; the kernel of :mod:`fxpass.triton_source` turns them in place into row
losses and gradient; two more GEMMs add that to the f32 gradients of x and of the weight::

    >>> x, w, t = torch.randn(4, 8, device="cuda"), torch.randn(10, 8, device="cuda"), ...
    >>> loss, _, x_grad, *_ = run(Inputs(x, w, None, t), Spec(gradients=("x",)), rows=4096)

Nothing waits for the GPU, and nothing is added up in an order that varies.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch._inductor.codecache import PyCodeCache

from fxpass import triton_source
from fxpass.aten import Inputs, Outputs
from fxpass.spec import Spec
from fxpass.triton_source import Kernel
from fxpass.triton_units import in_units

# Classes that are up-cast at a time where low-precision operands cannot add to an f32 result.
_CLASSES_PER_TILE = 8192


def run(inputs: Inputs, spec: Spec, rows: int) -> Outputs:
    """Losses and gradients of ``sum(row_scale * loss + lse_scale * lse)``, ``rows`` rows at a time.

    Args:
        inputs: x, weight, bias and logits in bf16, f16 or f32, with any strides.
        spec: ``lse`` and ``gradients`` say which of them are computed.
        rows: at least 1; the scratch is one ``[rows, V]`` buffer in the dtype of x.

    Returns:
        loss and lse ``[N]`` and the unnormalised gradients, all f32.
    """
    with _on(inputs.x.device):
        return _run(inputs, spec, rows)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _run(inputs: Inputs, spec: Spec, rows: int) -> Outputs:
    x, weight = inputs.x, inputs.weight
    n, v = x.shape[0], weight.shape[0]
    inputs, units = in_units(inputs, spec)
    factor = triton_source.gradient_factor(spec)
    loss = x.new_empty(n, dtype=torch.float32)
    lse = torch.empty_like(loss) if spec.lse else None
    shapes = {"x": x.shape, "weight": weight.shape, "bias": (v,)}
    grads = {name: x.new_zeros(shapes[name], dtype=torch.float32) for name in spec.gradients}
    scales = (inputs.class_weight, inputs.row_scale, inputs.lse_scale)
    kernel = triton_source.generate(spec, *(scale is not None for scale in scales))
    buffer = None if _readable(inputs, spec) else _buffer(x, min(rows, n), v)
    for start in range(0, n, rows):
        part = slice(start, min(start + rows, n))
        chunk = _logits(inputs, part, buffer)
        _launch(kernel, inputs, spec, part, chunk, loss, lse)
        if "bias" in grads:
            grads["bias"].add_(chunk.sum(0, dtype=torch.float32), alpha=factor)
        for classes in _tiles(x, v):
            g = chunk[:, classes]
            if "x" in grads:
                _add_product(grads["x"][part], g, weight[classes], factor)
            if "weight" in grads:
                _add_product(grads["weight"][classes], g.t(), x[part], factor)
    if units.loss is not None:
        loss.mul_(units.loss)
    if units.gradients is not None:
        for grad in grads.values():
            grad.mul_(units.gradients)
    return Outputs(loss, lse, grads.get("x"), grads.get("weight"), grads.get("bias"))


# ---------------------------------------------------------------- the chunk of logits


def _readable(inputs: Inputs, spec: Spec) -> bool:
    """Whether the kernel may read the given logits where they are: it will not write to them."""
    return inputs.logits is not None and not spec.gradients and inputs.logits.stride(1) == 1


def _buffer(x: Tensor, rows: int, v: int) -> Tensor:
    """``[rows, v]``, each row at a multiple of 16 elements, as vector loads and GEMMs want it."""
    return x.new_empty((rows, -(-v // 16) * 16))[:, :v]


def _logits(inputs: Inputs, part: slice, buffer: Tensor | None) -> Tensor:
    """The linear's output for some rows, in the buffer where there is one."""
    if inputs.logits is not None:
        logits = inputs.logits[part]
        return logits if buffer is None else buffer[: len(logits)].copy_(logits)
    assert buffer is not None
    x, weight, bias = inputs.x[part], inputs.weight, inputs.bias
    out = buffer[: len(x)]
    if not x.is_cuda:
        # CPUs multiply fp16 up to a hundred times slower than f32; rounded once, as on a GPU
        bias = None if bias is None else bias.float()
        return out.copy_(F.linear(x.float(), weight.float(), bias))
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


# ---------------------------------------------------------------- the kernel


def _launch(
    kernel: Kernel,
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
    if inputs.class_weight is not None:
        arguments["class_weight"] = inputs.class_weight
    per_row = {"row_scale": inputs.row_scale, "lse_scale": inputs.lse_scale, "lse": lse}
    arguments |= {name: tensor[part] for name, tensor in per_row.items() if tensor is not None}
    load(kernel)[(rows,)](**arguments, **_launch_options(v, chunk.dtype))


@functools.cache
def load(kernel: Kernel) -> triton.JITFunction:
    """The kernel as a function that can be launched.

    Its source becomes a file in Inductor's cache directory, named by its hash: tracebacks show its
    lines, and whoever may not write there cannot change what runs.
    """
    return getattr(PyCodeCache.load(kernel.source), kernel.name)


def _launch_options(v: int, dtype: torch.dtype) -> dict[str, int]:
    """Blocks of up to 16 KiB of a row, 16 elements a thread: enough loads in flight, no spills."""
    block = min(1 << (v - 1).bit_length(), (1 << 14) // dtype.itemsize)
    return {"BLOCK_V": block, "num_warps": max(1, min(16, block // 512))}


# ---------------------------------------------------------------- gradients


def _mixed_gemm(x: Tensor) -> bool:
    """Whether products of two ``x.dtype`` operands can be added to an f32 result directly."""
    return x.dtype == torch.float32 or (x.is_cuda and torch.version.hip is None)


def _tiles(x: Tensor, v: int) -> Iterator[slice]:
    """All classes at once, or few enough that their f32 copies stay small."""
    step = v if _mixed_gemm(x) else _CLASSES_PER_TILE
    for start in range(0, v, step):
        yield slice(start, start + step)


def _add_product(out: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """``out += factor * a @ b`` with ``out`` f32, added up in f32."""
    if a.dtype != torch.float32 and _mixed_gemm(a):
        torch.addmm(out, a, b, out_dtype=torch.float32, alpha=factor, out=out)
    else:
        out.addmm_(a.float(), b.float(), alpha=factor)
