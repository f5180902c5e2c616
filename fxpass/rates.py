"""How fast a device is: from a table for GPUs, measured once for a CPU.

In: a device and a dtype. Out: :class:`fxpass.cost.Rates`::

    >>> device_rates(torch.device("cuda"), torch.bfloat16).bandwidth  # an H200
    4.08e12

The rates decide which strategy is written into a compiled graph, so they must not differ from one
process to the next: a CPU's are rounded to powers of the square root of two and kept in a file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fxpass.cost import MIB, Rates

# ---------------------------------------------------------------- any device of a kind

# Plans are made with these, so that chunks, and with them the order of every sum, are the same on
# every machine; and they stand in where nothing can be measured.
NOMINAL = {
    "cpu": Rates(flops=1e11, bandwidth=1e10, elements=4e8, call=5e-6, half=24, share=1),
    "cuda": Rates(flops=7e14, bandwidth=4e12, elements=4e12, call=5e-6, half=64, share=0.75),
}


def nominal(device_type: str) -> Rates:
    """The rates of a typical device of a kind; other kinds compute as a CPU does."""
    return NOMINAL.get(device_type, NOMINAL["cpu"])


def device_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of one device for operands of ``dtype``; the same in every process."""
    if device.type == "cuda" and properties_of(device) is not None:
        return _gpu_rates(device, dtype)
    if device.type == "cpu":
        return _cpu_rates(dtype)
    return nominal(device.type)


# ---------------------------------------------------------------- GPUs


class Gpu(NamedTuple):
    """Dense peak rates in 10¹² operations a second, memory in 10¹² bytes a second."""

    name: str  # a pattern of the device's name
    half: float  # bf16 and f16 with f32 sums
    tf32: float
    f32: float
    memory: float
    generated: float = math.inf  # what Triton's tl.dot is limited to: 3.7 has no mma.sync for sm_75


# Without sparsity, as published for these cards; not checked line by line against the vendors' own
# data sheets, and only ever used to compare strategies. MI250X is one of its two devices.
GPUS = (
    Gpu(r"B200", 2250, 1125, 75, 7.7),
    Gpu(r"H200|GH200", 989.4, 494.7, 66.9, 4.8),
    Gpu(r"H100 PCIe", 756, 378, 51, 2.0),
    Gpu(r"H100 NVL", 835, 417, 60, 3.9),
    Gpu(r"H100", 989.4, 494.7, 66.9, 3.35),
    Gpu(r"A100.*80GB", 312, 156, 19.5, 1.935),
    Gpu(r"A100", 312, 156, 19.5, 1.555),
    Gpu(r"L40S", 362, 183, 91.6, 0.864),
    Gpu(r"L4", 121, 60, 30.3, 0.300),
    Gpu(r"A10", 125, 62.5, 31.2, 0.600),
    Gpu(r"T4", 65, 8.1, 8.1, 0.320, generated=8.1),
    Gpu(r"RTX 5090", 209.5, 104.8, 104.8, 1.792),
    Gpu(r"RTX 4090", 165.2, 82.6, 82.6, 1.008),
    Gpu(r"RTX 3090", 71, 35.6, 35.6, 0.936),
    Gpu(r"MI325X", 1307.4, 653.7, 163.4, 6.0),
    Gpu(r"MI300X", 1307.4, 653.7, 163.4, 5.3),
    Gpu(r"MI250X", 191.5, 47.9, 47.9, 1.6),
)

# Operations a clock of one multiprocessor, by compute capability: half precision and f32.
PER_CLOCK = {
    (7, 5): (1024, 128),
    (8, 0): (2048, 128),
    (8, 6): (512, 256),
    (8, 9): (1024, 256),
    (9, 0): (4096, 256),
    (10, 0): (8192, 256),
    (12, 0): (1024, 256),
}

# What is left of the peaks in long runs. QuACK's 17.33 ms for 6·N·D·V at N=4096, D=4096, V=128256
# on an H200 (its README) are 0.75 of the peak, all else included.
ATTAINABLE, ATTAINABLE_MEMORY = 0.75, 0.85


@functools.cache
def properties_of(device: torch.device) -> Any:
    """What the driver tells of a GPU; None where there is none, only tensors without data."""
    return torch.cuda.get_device_properties(device) if torch.cuda.is_available() else None


@functools.cache
def _gpu(device: torch.device) -> Gpu:
    properties = properties_of(device)
    for gpu in GPUS:
        if re.search(rf"\b(?:{gpu.name})\b", properties.name):
            return gpu
    return _unknown_gpu(properties)


def _unknown_gpu(properties: Any) -> Gpu:
    """From clocks and widths, where the driver tells them."""
    clock = getattr(properties, "clock_rate", 1_500_000) * 1e3  # kHz
    capability = (properties.major, properties.minor)
    known = [row for row in PER_CLOCK if row <= capability] or [min(PER_CLOCK)]
    half, f32 = PER_CLOCK[max(known)]
    rate = properties.multi_processor_count * clock / 1e12
    # both edges of the clock carry data
    memory = 2 * getattr(properties, "memory_clock_rate", 7_000_000) * 1e3
    memory *= getattr(properties, "memory_bus_width", 256) / 8
    return Gpu(properties.name, half * rate, half * rate / 2, f32 * rate, memory / 1e12)


def _gpu_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    gpu = _gpu(device)
    if dtype.itemsize == 2:
        peak = gpu.half
    elif dtype == torch.float64:
        peak = gpu.f32 / 2
    else:
        peak = gpu.tf32 if torch.backends.cuda.matmul.fp32_precision == "tf32" else gpu.f32
    return nominal("cuda")._replace(
        flops=peak * 1e12 * ATTAINABLE,
        bandwidth=gpu.memory * 1e12 * ATTAINABLE_MEMORY,
        elements=gpu.f32 * 1e12 / 16,  # an exponential and some ten more instructions
        share=min(nominal("cuda").share, gpu.generated / peak),
    )


# ---------------------------------------------------------------- the CPU


def _cpu_rates(dtype: torch.dtype) -> Rates:
    """The ATen lowering multiplies low-precision operands in f32, so f32's rate is theirs too."""
    measured = _kept(rates_file())
    if measured is None:
        return nominal("cpu")
    flops = measured["float64" if dtype == torch.float64 else "float32"]
    scale = 2 if dtype == torch.float64 else 1
    return nominal("cpu")._replace(
        flops=flops, bandwidth=measured["bandwidth"], elements=measured["elements"] / scale
    )


def rates_file() -> Path:
    """Where this machine's rates are kept: a file per CPU, number of threads and torch."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # Inductor, only when needed

    key = "\n".join([_cpu_model(), str(torch.get_num_threads()), torch.__version__])
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(cache_dir()) / "fxpass" / f"rates-{name}.json"


@functools.cache
def _cpu_model() -> str:
    words = [platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability()]
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        words += [line for line in lines if line.startswith("model name")][:1]
    except OSError:
        pass  # not Linux: platform.processor() has the model there
    return " ".join(words)


@functools.cache
def _kept(path: Path) -> dict[str, float] | None:
    """The rates in the file, measured first where it is missing or damaged; None where they could
    not be kept, for then the next process might measure something else."""
    known = _read(path)
    if known is not None:
        return known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            own = Path(file.name)
            try:
                json.dump(_measure(), file)
            except RuntimeError:
                own.unlink()
                raise
        if _read(path) is None:  # damaged, or still missing
            path.unlink(missing_ok=True)
        try:
            os.link(own, path)  # whoever is first decides for all
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            own.replace(path)
        own.unlink(missing_ok=True)
    except (OSError, RuntimeError):
        return None
    return _read(path)


def _read(path: Path) -> dict[str, float] | None:
    try:
        rates = json.loads(path.read_text())
        if set(rates) != {"float32", "float64", "bandwidth", "elements"}:
            return None
        return rates if all(0 < rate < math.inf for rate in rates.values()) else None
    except (OSError, ValueError, TypeError):
        return None


# Where one rate is this far from what usually goes with the GEMM's, somebody else was computing.
UNLIKELY = 4


def _measure() -> dict[str, float]:
    """A few milliseconds of products, of a copy and of a softmax, each the best of some runs."""
    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        rates = {str(t).removeprefix("torch."): _flops(t) for t in (torch.float32, torch.float64)}
        source, target = (_full(8 * MIB, dtype=torch.float32) for _ in range(2))
        found = {
            "bandwidth": 64 * MIB / _best(lambda: target.copy_(source)),
            "elements": 2 * MIB / _best(lambda: _softmax(source)),
        }
    for name, rate in found.items():
        usual = getattr(nominal("cpu"), name) / nominal("cpu").flops * rates["float32"]
        rates[name] = min(max(rate, usual / UNLIKELY), usual * UNLIKELY)
    return {name: rounded(rate) for name, rate in rates.items()}


def _full(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(size, 0.5, dtype=dtype, device="cpu")  # the user's random numbers are theirs


def _flops(dtype: torch.dtype) -> float:
    a, b = _full(128, 512, dtype=dtype), _full(512, 2048, dtype=dtype)
    out = _full(128, 2048, dtype=dtype)
    return 2 * 128 * 512 * 2048 / _best(lambda: torch.mm(a, b, out=out))


def _softmax(logits: torch.Tensor) -> None:
    """About what :mod:`fxpass.aten` does to a quarter of ``logits``, 1 MiB at a time."""
    for z in logits[: 2 * MIB].view(8, 8, -1):
        z.sub_(z.amax(1, keepdim=True)).exp_()
        z.mul_(z.sum(1, keepdim=True).reciprocal_())


# Seconds after which something is not run again, however few runs there were.
ENOUGH = 0.05


def _best(run: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs; the first, which may touch new memory, not counted."""
    run()
    found = []
    start = last = time.perf_counter()
    while len(found) < 8 and last - start < ENOUGH:
        run()
        now = time.perf_counter()
        found.append(now - last)
        last = now
    return max(min(found), 1e-9)


def rounded(rate: float) -> float:
    """The nearest power of the square root of two: a measurement is not more exact than that."""
    return 2 ** (round(2 * math.log2(rate)) / 2)
