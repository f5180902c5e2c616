"""Decides whether this CPU multiplies 16-bit operands in their dtype or in f32.

In: a dtype. Out: the dtype of the products, and the reason in one line::

    >>> multiplied_in(torch.float32)
    (torch.float32, 'its own')
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch

# Values of oneDNN's limit (ONEDNN_MAX_CPU_ISA) that allow bf16 instructions.
_HAS_BF16 = ("DEFAULT", "ALL", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10")
_HAS_AMX = ("DEFAULT", "ALL", "AVX512_CORE_AMX", "AVX10_1_512_AMX", "AVX10_2")


@functools.cache  # oneDNN, too, reads its limit once
def multiplied_in(dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """The dtype in which the ATen implementation multiplies operands of ``dtype`` on this CPU."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    if not torch.backends.mkldnn.is_available():
        limit = "no oneDNN"
    return decide(dtype, _capabilities(), limit.upper())


def decide(dtype: torch.dtype, cpu: Mapping[str, Any], limit: str) -> tuple[torch.dtype, str]:
    """The dtype for a CPU with these capabilities (torch's names) and this oneDNN limit.

    bf16 is multiplied in bf16 where AMX, AVX512-BF16 or ARM's instructions are faster than f32.

    GFLOP/s in bf16 and f32: 360 and 135 on two cores of an AMD EPYC with AVX512-BF16; 81 and 150
    on one core of an Intel Xeon with AVX512-BF16 but no AMX. AMX and ARM were not measured. fp16 is
    always multiplied in f32: AVX512-FP16 is no faster in oneDNN (146 GFLOP/s on the same Xeon
    core), and sums over many rows may overflow in fp16.
    """
    if dtype in (torch.float32, torch.float64):
        return dtype, "its own"
    if dtype == torch.bfloat16:
        if cpu.get("amx_bf16") and limit.startswith(_HAS_AMX):
            return dtype, "AMX multiplies bf16"
        if cpu.get("avx512_bf16") and limit.startswith(_HAS_BF16):
            if "Intel" not in cpu.get("cpu_name", ""):
                return dtype, "AVX512-BF16 multiplies bf16"
            return torch.float32, "AVX512-BF16 is slower than f32 on Intel's processors without AMX"
        if cpu.get("architecture") == "aarch64" and cpu.get("bf16"):
            return dtype, "ARM's BFMMLA multiplies bf16"
    return torch.float32, f"nothing multiplies {str(dtype).removeprefix('torch.')} faster"


@functools.cache
def _capabilities() -> Mapping[str, Any]:
    return torch.cpu.get_capabilities()
