"""Names the implementation that runs on a device, and the dtypes in which it computes.

In: a device and the operands' dtype. Out: names and dtypes::

    >>> implementation_for(torch.device("cpu"), torch.float32)
    ('aten', 'ATen multiplies float32 in float32: its own')
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from typing import Any

import torch

from fxpass.formula.dtypes import compute_dtype, dtype_name

# Values of oneDNN's limit (ONEDNN_MAX_CPU_ISA) that allow bf16 instructions.
_HAS_BF16 = ("DEFAULT", "ALL", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX10")
_HAS_AMX = ("DEFAULT", "ALL", "AVX512_CORE_AMX", "AVX10_1_512_AMX", "AVX10_2")

_NOTHING = contextlib.nullcontext()


@functools.cache
def has_triton() -> bool:
    """Tells if the triton package is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def properties_of(device: torch.device) -> Any:
    """The driver's properties of a GPU; None on a machine without GPUs, for fake tensors."""
    return torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None


def implementation_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The name of the implementation that runs on a device, and the reason in one line."""
    if device.type == "cpu":
        multiplied, why = _multiplied_by_cpu(dtype)
        return "aten", f"ATen multiplies {dtype_name(dtype)} in {dtype_name(multiplied)}: {why}"
    if device.type != "cuda":
        return "aten", f"ATen runs on {device.type}; the Triton kernels need CUDA or HIP"
    if not has_triton():
        return "aten", "triton is not installed"
    if dtype == torch.float64:
        return "aten", "the Triton kernels compute in f32"
    gpu = properties_of(device)
    if torch.version.cuda and gpu is not None and (gpu.major, gpu.minor) < (7, 5):
        return "aten", f"{gpu.name} is older than sm_75"
    return "triton", "generated Triton kernels"


def target_of(device: torch.device) -> str:
    """A GPU's architecture as compilers name it (``sm_90``, ``gfx942``); ``cpu`` for the
    interpreter and for fake tensors on a machine without GPUs."""
    gpu = properties_of(device) if device.type == "cuda" else None
    if gpu is None:
        return "cpu"
    if torch.version.hip:
        return gpu.gcnArchName.partition(":")[0]
    return f"sm_{gpu.major}{gpu.minor}"


def multiplied_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which the ATen implementation multiplies operands of ``dtype``."""
    return _multiplied_by_cpu(dtype)[0] if device.type == "cpu" else compute_dtype(dtype)


@functools.cache  # oneDNN, too, reads its limit once
def _multiplied_by_cpu(dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """The dtype of products on this CPU and the reason: bf16 where AMX, AVX512-BF16 or ARM's
    instructions are faster than f32.

    GFLOP/s in bf16 and f32: 360 and 135 on two cores of an AMD EPYC with AVX512-BF16; 81 and 150
    on one core of an Intel Xeon with AVX512-BF16 but no AMX. AMX and ARM were not measured. fp16 is
    always multiplied in f32: AVX512-FP16 is no faster in oneDNN (146 GFLOP/s on the same Xeon
    core), and sums over many rows may overflow in fp16.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    limit = limit.upper() if torch.backends.mkldnn.is_available() else "no oneDNN"
    cpu = torch.cpu.get_capabilities()
    if dtype in (torch.float32, torch.float64):
        return dtype, "its own"
    if dtype == torch.bfloat16:
        if cpu.get("amx_bf16") and limit.startswith(_HAS_AMX):
            return dtype, "AMX multiplies bf16"
        if cpu.get("avx512_bf16") and limit.startswith(_HAS_BF16):
            if "Intel" not in str(cpu.get("cpu_name", "")):
                return dtype, "AVX512-BF16 multiplies bf16"
            return torch.float32, "AVX512-BF16 is slower than f32 on Intel's processors without AMX"
        if cpu.get("architecture") == "aarch64" and cpu.get("bf16"):
            return dtype, "ARM's BFMMLA multiplies bf16"
    return torch.float32, f"nothing multiplies {dtype_name(dtype)} faster"


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current device for a ``with`` block; does nothing for other devices.

    Triton launches kernels on the current device, and torch's stream queries refer to it. Without
    this, the current device may differ from the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING
