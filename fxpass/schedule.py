"""Which lowering runs one fused loss, and with how many rows and classes at a time.

In: sizes, dtype, device, the strategy and the user's budget, when the operator runs. Out: a
:class:`Plan` within the budget. Sizes are plain integers then, so one compiled graph serves every
batch size::

    >>> plan(2048, 512, 32000, torch.float32, torch.device("cpu"), Spec()).rows
    256

The strategy is chosen before, when a graph is rewritten: :mod:`fxpass.strategy`. What costs how
much is :mod:`fxpass.cost`, how fast a device is :mod:`fxpass.rates`, and what fits into the budget
:mod:`fxpass.fit`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any, NamedTuple

import sympy
import torch

from fxpass import cost, expression, rates
from fxpass.cost import MIB, Work
from fxpass.expression import Z
from fxpass.fit import fit
from fxpass.spec import Spec

# ---------------------------------------------------------------- which lowering


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
    gpu = rates.properties_of(device)
    if torch.version.cuda and gpu is not None and (gpu.major, gpu.minor) < (7, 5):
        return "aten", f"{gpu.name} is older than sm_75"
    return "triton", "generated Triton kernel over row chunks"


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a GPU the current device: Triton launches on that, and what is asked about a stream is
    asked about that one's. It need not be the one of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# ---------------------------------------------------------------- the budget

# A GPU's share for scratch without a setting: 1 GiB holds 4096 rows of Llama-3's logits in bf16.
GPU_SHARE, GPU_BUDGET = 1 / 64, (256 * MIB, 1024 * MIB)
# A CPU's: some hundred rows of logits are enough for its GEMMs; in f64 twice as many bytes.
CPU_ROWS, CPU_BUDGET = 256, (36 * MIB, 128 * MIB)


def budget(v: int, dtype: torch.dtype, device: torch.device, memory_mb: int) -> int:
    """Bytes of scratch that one fused loss of ``v`` classes may take; 0 MiB asks for the default.

    Outputs and the f32 gradients that ``chunked`` keeps until backward do not count.
    """
    if memory_mb:
        return memory_mb * MIB
    if device.type == "cuda":
        low, high = GPU_BUDGET
        total = getattr(rates.properties_of(device), "total_memory", 0)
        return max(low, min(high, int(total * GPU_SHARE)))
    low, high = CPU_BUDGET
    row = v * compute_dtype(dtype).itemsize
    return max(low, min(high * row // (4 * max(1, v)), CPU_ROWS * row + 4 * MIB))


# ---------------------------------------------------------------- rows and classes


class Plan(NamedTuple):
    """How one fused loss runs: the lowering's name, the strategy, the rows of a chunk (``tiled``:
    of a block), the classes of a tile (``chunked``: those up-cast at a time), and why."""

    lowering: str
    strategy: str
    rows: int
    classes: int
    reason: str


def plan(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Spec,
    kept: bool = False,
) -> Plan:
    """The plan for one run over x ``[n, d]`` and weight ``[v, d]`` of ``dtype`` on ``device``.

    ``spec.gradients`` are those that this run computes; ``kept`` says that the logits exist. The
    scratch stays within ``spec.memory_mb`` MiB (0: see :func:`budget`) as long as that is enough
    for one row; else the reason says so.
    """
    return _plan(n, d, v, dtype, device, spec, kept, *lowering_for(device, dtype))


@functools.lru_cache(maxsize=4096)
def _plan(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Spec,
    kept: bool,
    lowering: str,
    reason: str,
) -> Plan:
    strategy = "tiled" if spec.strategy == "tiled" else "chunked"
    work = work_of(n, d, v, dtype, device, lowering, spec, spec.gradients, kept)
    allowed = budget(v, dtype, device, spec.memory_mb)
    rows, classes = fit(lowering, strategy, work, allowed, device.type)
    taken = cost.scratch(lowering, strategy, work, rows, classes)
    if taken > allowed:
        reason += f"; the least it can take, {size(taken)}, is over its budget of {size(allowed)}"
    return Plan(lowering, strategy, rows, classes, reason)


def work_of(
    n: int,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    lowering: str,
    spec: Spec,
    gradients: tuple[str, ...],
    kept: bool = False,
) -> Work:
    """What one run that computes ``gradients`` does, as the cost model wants it."""
    compute = compute_dtype(dtype)
    copied = lowering == "aten" or torch.version.hip is not None
    return Work(
        max(1, n),
        d,
        max(1, v),
        dtype.itemsize,
        compute.itemsize,
        *(int(name in gradients) for name in ("x", "weight", "bias")),
        kept=int(kept),
        up=int(copied and dtype != compute),
        temporaries=_temporaries(spec, bool(gradients)),
        processors=getattr(rates.properties_of(device), "multi_processor_count", 1)
        if lowering == "triton"
        else 1,
    )


@functools.lru_cache(maxsize=1024)
def _temporaries(spec: Spec, gradients: bool) -> int:
    """Copies of a block of logits that exist beside it: of the target, of the logit transform."""
    dense = 2 if spec.target == "probabilities" else int(spec.label_smoothing > 0)
    if spec.logits == Z:
        return dense
    value = _copies(spec.logits)
    slope = _copies(expression.derivative(spec.logits)) if gradients else 0
    # beside the value: of the next block, or while the gradient is taken
    return 1 + max(value, slope, dense)


def _copies(expr: Any) -> int:
    """Copies of z that :func:`fxpass.expression.evaluate` holds at most, its result included."""
    if expr == Z:
        return 0
    if expr.is_number:
        return 1
    joined = isinstance(expr, sympy.Add | sympy.Mul)
    held, most = 0, 1
    for operand in expr.args:
        if operand.is_number:
            continue
        most = max(most, held + _copies(operand))
        held = 1 if joined else held + (operand != Z)
    return most if joined else max(most, held + 1 + isinstance(expr, expression.Where))


# ---------------------------------------------------------------- as text


def size(number: int) -> str:
    """Bytes in MiB or GiB."""
    if number >= 1024 * MIB:
        return f"{number / MIB / 1024:.2f} GiB"
    return f"{number / MIB:.{0 if number >= 10 * MIB else 1}f} MiB"


def duration(seconds: float) -> str:
    """Seconds with two significant digits, in the unit that suits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        number = float(f"{seconds / scale:.1e}")
        if number >= 1:
            return f"{number:g} {unit}"
    return "less than 1 µs"
