"""The schemes whose accuracy is compared: name → label and function.

In: x ``[N, D]``, weight ``[V, D]``, target int64 ``[N]``. Out: the mean loss, with gradients. The
schemes are providers of :mod:`benchmarks.loss.providers`, and others that differ in their rounding:

``liger_scheme`` is "Liger's scheme": plain PyTorch that rounds as Liger 0.8.5's fused linear
cross-entropy does, without its kernels, so that it runs at full size on a CPU. ``liger_scheme_f32``
adds ``accum_dtype=torch.float32``. ``liger_scheme_sum`` uses ``reduction="sum"`` and divides the
loss, as Liger's patched models do if a Trainer passes the number of tokens. ``liger`` is the
installed ``liger-kernel``. Without a GPU it needs ``TRITON_INTERPRET=1`` and takes about 0.1 s for
a row of 32,000 classes, so ``tests/libraries/test_accuracy_liger.py`` compares the scheme with
Liger 0.8.5 at a small size::

    TRITON_INTERPRET=1 python -m benchmarks --suite accuracy --n 64 --v 12288 --dtype float16 \\
        --providers eager liger liger_scheme fusedce

There more than 99 % of the elements of dX and dW are the same fp16 numbers in both. On a CPU, Liger
rounds each chunk's part of dW before it adds it. On a GPU, it adds in f32 and rounds the sum, which
is slightly more accurate; the scheme does the same. (bf16 cannot be compared, because the
interpreter truncates instead of rounding.)
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.providers import PROVIDERS, Loss, Provider

# Liger's and PyTorch's chunks have few rows if D is much smaller than V: 8 and 4 rows at D=16. Then
# the rounding of many partial sums would be worse than in any real model, so both get the chunks of
# this hidden size.
HIDDEN = 4096


def liger_rows(n: int, d: int, v: int) -> int:
    """Rows of one of Liger's chunks: its logits are about as large as x ``[n, d]``."""
    rows = -(-n // -(-v // d))
    return min(n, 1 << (rows - 1).bit_length())


def liger_scheme(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    accumulate: torch.dtype | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of x ``[N, D]``, weight ``[V, D]``, target ``[N]``; a scalar in f32.

    For each chunk of rows, forward computes the logits in the dtype of the operands (or of
    autocast), divides ``softmax - onehot`` by N for "mean", *rounds it to the same dtype*, and
    multiplies it with weight and x. dW accumulates in ``accumulate``, by default the weight's
    dtype. Backward multiplies both gradients by the incoming gradient. Products accumulate in f32
    and are rounded once, as on GPUs.

    Source: https://github.com/linkedin/Liger-Kernel, ``ops/fused_linear_cross_entropy.py``.
    """
    count = len(target) if reduction == "mean" else 1
    return _LigerScheme.apply(x, weight, target, accumulate, count)  # type: ignore[return-value]


class _LigerScheme(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, target: Tensor, accumulate: Any, count: int
    ) -> Tensor:
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        n, v = len(x), len(weight)
        rows = liger_rows(n, HIDDEN, v)
        loss = x.new_zeros((), dtype=torch.float32)
        dx, dw = torch.empty_like(x), torch.zeros_like(weight, dtype=accumulate)
        with torch.autocast(kind, enabled=False):
            w = weight.to(dtype).float()
            for start in range(0, n, rows):
                part = slice(start, start + rows)
                x_rows = x[part].to(dtype).float()
                z = _rounded(x_rows @ w.t(), dtype)
                picked = target[part].unsqueeze(1)
                loss += ((z.logsumexp(1) - z.gather(1, picked).squeeze(1)) / count).sum()
                g = z.softmax(1)
                g.scatter_add_(1, picked, torch.full_like(z[:, :1], -1))
                g = _rounded(g / count, dtype)  # most of an fp16 gradient underflows here
                dx[part] = _rounded(g @ w, dtype)
                dw.copy_(dw.float() + g.t() @ x_rows)
        ctx.save_for_backward(dx, dw.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        return *((g * incoming[0]).to(g.dtype) for g in ctx.saved_tensors), None, None, None


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value rounded to ``dtype``, as f32, which CPUs multiply a hundred times faster."""
    return value.to(dtype).float()


def _liger() -> Loss:
    functional = importlib.import_module("liger_kernel.transformers.functional")

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # in units of the size of x, so that its chunks are those of HIDDEN
        budget = max(1, HIDDEN // x.shape[1])
        return functional.liger_fused_linear_cross_entropy(
            x, weight, target, chunk_mem_const=budget
        )

    return loss


def _core() -> Loss:
    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        rows = liger_rows(len(x), HIDDEN, len(weight))
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
        return F.linear_cross_entropy(x, weight, target, options=options)

    return loss


def _scheme_f32(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return liger_scheme(x, weight, target, torch.float32)


def _scheme_sum(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return liger_scheme(x, weight, target, reduction="sum") / len(target)


ROUNDED = "rounded"
SCHEMES = {
    ROUNDED: Provider("*float64, rounded*", PROVIDERS["eager"].make),  # computes no loss
    "eager": PROVIDERS["eager"],
    "inductor": PROVIDERS["inductor"],
    "auto_chunker": PROVIDERS["auto_chunker"],
    "core": Provider(PROVIDERS["core"].label, _core),
    "liger_scheme": Provider("Liger's scheme", lambda: liger_scheme),
    "liger_scheme_f32": Provider(
        "Liger's scheme, `accum_dtype=torch.float32`", lambda: _scheme_f32
    ),
    "liger_scheme_sum": Provider('Liger\'s scheme, `reduction="sum"`', lambda: _scheme_sum),
    "liger": Provider("Liger itself", _liger, package=("liger-kernel", "liger_kernel", "0.8.5")),
    "fusedce": PROVIDERS["fusedce"],
}
