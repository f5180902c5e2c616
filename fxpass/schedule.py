"""Which lowering runs one fused loss, and with how many rows at a time.

In: sizes, dtype, device and the user's budget. Out: a :class:`Plan`. Sizes are plain integers, read
when the operator runs, so one compiled graph serves every batch size::

    >>> plan(2048, 512, 32000, torch.float32, torch.device("cpu"), Spec()).rows
    262
"""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch

from fxpass.spec import Spec

MIB = 1 << 20

# Rows of one chunk when the user sets no budget. A chunk reads and writes the whole f32 weight
# gradient once, so few rows make that traffic dominate the GEMMs; many rows make the chunk as large
# as the logits that are to be avoided. GPUs reach the GEMMs' full rate only with larger chunks.
ROWS = {"cpu": 256, "cuda": 4096}
# Few classes make small rows; a chunk below this size would only be more calls.
CHUNK_BYTES = 32 * MIB


class Plan(NamedTuple):
    """How one fused loss runs: the lowering's name, why, and the rows of a chunk."""

    lowering: str
    reason: str
    rows: int


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums, exponentials and losses: f64 for f64, f32 for everything smaller."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@functools.cache
def has_triton() -> bool:
    """Whether the triton package is installed."""
    return importlib.util.find_spec("triton") is not None


def lowering_for(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """The lowering that runs on a device, by name, and the reason in one line."""
    if device.type != "cuda":
        return "aten", f"ATen chunks run on {device.type}; the Triton kernels need CUDA or HIP"
    if not has_triton():
        return "aten", "triton is not installed"
    if dtype == torch.float64:
        return "aten", "the Triton kernels compute in f32"
    if torch.version.cuda and torch.cuda.get_device_capability(device) < (7, 5):
        return "aten", f"{torch.cuda.get_device_name(device)} is older than sm_75"
    return "triton", "generated Triton kernel over row chunks"


def plan(n: int, d: int, v: int, dtype: torch.dtype, device: torch.device, spec: Spec) -> Plan:
    """The plan for x ``[n, d]`` and weight ``[v, d]`` of ``dtype`` on ``device``.

    ``spec.memory_mb`` bounds the scratch in MiB, gradients excluded; at least one row is taken.
    """
    lowering, reason = lowering_for(device, dtype)
    row_bytes = max(1, v) * (dtype if lowering == "triton" else compute_dtype(dtype)).itemsize
    rows = max(ROWS.get(device.type, ROWS["cpu"]), CHUNK_BYTES // row_bytes)
    if spec.memory_mb:
        rows = spec.memory_mb * MIB // row_bytes
    return Plan(lowering, reason, max(1, min(rows, n)))
