"""Scratch memory that one fused loss may take.

In: sizes, dtype, device, and the user's setting. Out: bytes::

    >>> size_text(scratch_budget(2048, 32000, torch.float32, torch.device("cpu"), memory_mb=0))
    '48 MiB'
"""

from __future__ import annotations

import torch

from fxpass.formula.dtypes import compute_dtype
from fxpass.plan.devices import properties_of

MIB = 1 << 20

# The default budget of a GPU: this share of its memory, within these bounds in bytes. 1 GiB holds
# 4096 rows of Llama-3's logits in bf16.
GPU_SHARE = 1 / 64
GPU_BUDGET = (256 * MIB, 1024 * MIB)
# The default budget of a CPU: this many rows of logits, within these bounds in bytes (twice the
# upper bound in f64). A few hundred rows keep the GEMMs efficient, and each chunk costs one more
# addition to the f32 gradient of the weight. But at most this part of all logits, or these bytes.
CPU_ROWS = 256
CPU_BUDGET = (48 * MIB, 128 * MIB)
CPU_PARTS = 5
CPU_LEAST = 16 * MIB


def scratch_budget(n: int, v: int, dtype: torch.dtype, device: torch.device, memory_mb: int) -> int:
    """Bytes of scratch that one fused loss of ``n`` rows and ``v`` classes may take.

    ``memory_mb`` is the user's setting in MiB; 0 is the default. Outputs and the rows' targets, lse
    and losses do not count.
    """
    if memory_mb:
        return memory_mb * MIB
    if device.type == "cuda":
        low, high = GPU_BUDGET
        total = getattr(properties_of(device), "total_memory", 0)
        return max(low, min(high, int(total * GPU_SHARE)))
    low, high = CPU_BUDGET
    a = compute_dtype(dtype).itemsize
    most = max(low, min(high * a // 4, CPU_ROWS * a * v + 4 * MIB))
    return min(most, max(CPU_LEAST, n * v * a // CPU_PARTS))


def size_text(number: int) -> str:
    """A number of bytes as text in KiB, MiB or GiB."""
    if number >= 1024 * MIB:
        return f"{number / MIB / 1024:.2f} GiB"
    if number < MIB:
        return f"{-(-number // 1024)} KiB"
    return f"{number / MIB:.{0 if number >= 10 * MIB else 1}f} MiB"
