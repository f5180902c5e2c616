"""Names the implementation that runs on a device, and the dtypes in which it computes.

In: a device and the operands' dtype. Out: names and dtypes::

    >>> implementation_for(torch.device("cpu"), torch.float32)
    ('aten', 'ATen multiplies float32 in float32: its own')
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import torch

from fxpass.plan import cpu
from fxpass.spec.dtypes import compute_dtype, short


@functools.cache
def has_triton() -> bool:
    """Whether the triton package is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def properties_of(device: torch.device) -> Any:
    """The driver's properties of a GPU; None on a machine without GPUs, for fake tensors."""
    return torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None


def implementation_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The name of the implementation that runs on a device, and the reason in one line."""
    if device.type == "cpu":
        multiplied, why = cpu.multiplied_in(dtype)
        return "aten", f"ATen multiplies {short(dtype)} in {short(multiplied)}: {why}"
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
    return cpu.multiplied_in(dtype)[0] if device.type == "cpu" else compute_dtype(dtype)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current device for a ``with`` block; does nothing for other devices.

    Triton launches kernels on the current device, and torch's stream queries refer to it. Without
    this, the current device may differ from the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
