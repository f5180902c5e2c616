"""Products of the ATen implementation, in the dtype that the device multiplies fastest.

In: operands. Out: products in the dtype of the operands, and sums of products in the dtype of the
output; parts of tensors.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fxpass.plan.devices import multiplied_in

# Elements that are up-cast and added at a time: few enough to stay in the caches.
_ADDED_AT_A_TIME = 1 << 18


def product_dtype_of(x: Tensor) -> torch.dtype:
    """The dtype in which operands like x are multiplied."""
    if not x.is_cuda:
        return multiplied_in(x.dtype, x.device)
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x.dtype
    # a 16-bit GEMM of a GPU can add to an f32 result, where torch offers this
    if x.dtype == torch.float16:
        mixed = not torch.backends.cuda.matmul.allow_fp16_accumulation
    else:
        mixed = bool(torch.version.hip) or torch.cuda.get_device_capability(x.device) >= (8, 0)
    if torch.version.hip:  # rocBLAS and hipBLASLt can, Composable Kernel cannot
        mixed &= torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Ck
    return x.dtype if mixed else torch.float32


def add_product(out: Tensor, a: Tensor, b: Tensor, add: bool) -> Tensor:
    """``out = a @ b``, or ``out += a @ b``, accumulated in the output's dtype on GPUs; without
    ``add`` the old values are not read."""
    if out.dtype == a.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    if out.is_cuda and a.dtype.itemsize == 2:
        return torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)
    if not add:
        out.copy_(a @ b)
    else:  # out is wider than the 16-bit product: torch up-casts a whole operand before it adds
        rows = max(1, _ADDED_AT_A_TIME // max(1, out.shape[1]))
        for some, more in zip(out.split(rows), (a @ b).split(rows), strict=True):
            some.add_(more)
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """Writes ``x @ weight.T + bias`` to ``out``. All have one dtype; the sum is rounded once."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def split_bias(bias: Tensor | None, stored: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The bias for the GEMM, and the bias to be added afterwards; at least one of them is None.

    A bias wider than the ``stored`` dtype of the logits is added to the up-cast logits."""
    if bias is None or bias.dtype == stored:
        return bias, None
    return None, bias


def slice_of(t: Tensor, some: slice, dim: int = 0) -> Tensor:
    """Some rows (or columns) of a tensor. All of them are the tensor itself: in small calls a view
    costs the host as much as an addition."""
    size = some.stop - some.start
    return t if size == t.shape[dim] else t.narrow(dim, some.start, size)


def joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    """The concatenated parts; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@functools.lru_cache(64)
def slices(start: int, stop: int, step: int) -> tuple[slice, ...]:
    """Divides ``[start, stop)`` into slices of ``step`` (at least 1); the last may be smaller."""
    step = max(1, step)
    return tuple(slice(i, min(i + step, stop)) for i in range(start, stop, step))
