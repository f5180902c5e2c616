"""Whose gradients are compared: name → what it is called and how it is made.

In: x ``[N, D]``, weight ``[V, D]``, target int64 ``[N]``. Out: the mean loss, with gradients. They
are those of :mod:`benchmarks.loss.providers`, and some that differ only in how they round:

``liger_scheme`` is "Liger's scheme" in plain PyTorch: what Liger 0.8.5's fused linear cross-entropy
rounds, and when, without its kernels, so that it runs at full size on a CPU. ``liger_scheme_f32``
is the same with ``accum_dtype=torch.float32``; ``liger_scheme_sum`` with ``reduction="sum"`` and a
division of the loss, as Liger's patched models have it where a Trainer tells them the number of
tokens. ``liger`` is the real one, for who has ``liger-kernel`` installed. Without a GPU that needs
``TRITON_INTERPRET=1`` and takes about 0.1 s for a row of 32,000 classes, so the scheme was compared
with it, Liger 0.8.5 on a CPU, at a small size (``tests/libraries/test_accuracy_liger.py``)::

    TRITON_INTERPRET=1 python -m benchmarks.accuracy --n 64 --v 12288 --dtypes float16 \\
        --providers eager liger liger_scheme fusedce

There more than 99 % of the elements of dX and dW are the same fp16 in both. On a CPU Liger rounds
each chunk's part of dW before adding it up, where on a GPU it adds in f32 and rounds the sum; the
scheme does as on a GPU, which is a little more accurate. (bf16 cannot be compared so: the
interpreter cuts digits off instead of rounding.)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.providers import PROVIDERS, Loss

# Liger and PyTorch's own chunked operator take few rows at a time where D is small beside V: 8 and
# 4 at D=16. What they add up in a low dtype then shows more than it would in any real model, so
# both get the chunks of this hidden size.
HIDDEN = 4096


def liger_rows(n: int, d: int, v: int) -> int:
    """Rows of one of Liger's chunks: so many that their logits are as large as x ``[n, d]``."""
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

    Forward takes a chunk of rows at a time, makes their logits in the dtype of the operands (of
    autocast, where it is on), divides ``softmax - onehot`` by N for "mean", *rounds that to the
    same dtype*, and multiplies it with weight and x. dW is added up in ``accumulate``, which is the
    weight's dtype if it is not given. Backward multiplies both gradients by the incoming one. The
    products are added up in f32 and rounded once, as GPUs do.

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
                g = _rounded(g / count, dtype)  # most of an fp16 gradient ends here
                dx[part] = _rounded(g @ w, dtype)
                dw.copy_(dw.float() + g.t() @ x_rows)
        ctx.save_for_backward(dx, dw.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        return *((g * incoming[0]).to(g.dtype) for g in ctx.saved_tensors), None, None, None


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The f32 value with the digits of ``dtype``: CPUs multiply f32 a hundred times faster."""
    return value.to(dtype).float()


def _liger() -> Loss:
    functional = importlib.import_module("liger_kernel.transformers.functional")

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # counted in the size of x, so that its chunks are those of HIDDEN
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


def _liger_scheme_f32() -> Loss:
    return lambda x, weight, target: liger_scheme(x, weight, target, torch.float32)


def _liger_scheme_sum() -> Loss:
    return lambda x, weight, target: liger_scheme(x, weight, target, reduction="sum") / len(target)


class Scheme(NamedTuple):
    """A provider.

    Attributes:
        label: what it is called in the table.
        make: compiles it.
    """

    label: str
    make: Callable[[], Loss]


SCHEMES = {
    "eager": Scheme("eager", PROVIDERS["eager"]),
    "inductor": Scheme("Inductor", PROVIDERS["inductor"]),
    "auto_chunker": Scheme("Inductor with `auto_chunker`", PROVIDERS["auto_chunker"]),
    "core": Scheme("core's `F.linear_cross_entropy(options=...)`", _core),
    "liger_scheme": Scheme("Liger's scheme", lambda: liger_scheme),
    "liger_scheme_f32": Scheme("Liger's scheme, `accum_dtype=torch.float32`", _liger_scheme_f32),
    "liger_scheme_sum": Scheme('Liger\'s scheme, `reduction="sum"`', _liger_scheme_sum),
    "liger": Scheme("Liger itself", _liger),
    "fusedce": Scheme("**fusedce**", PROVIDERS["fusedce"]),
}
