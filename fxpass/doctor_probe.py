"""What ``fxpass doctor`` reads from the machine, as plain data that can be judged and printed.

In: nothing but the machine. Out: a :class:`Machine`.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from fxpass.schedule import lowering_for
from fxpass.settings import TABLE, Settings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# flags of torch.cpu.get_capabilities, x86 and ARM, with what to call them
_CPU_BF16 = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "sve_bf16": "SVE", "bf16": "NEON"}
_CPU_FP16 = {"amx_fp16": "AMX", "avx512_fp16": "AVX-512", "fp16_arith": "NEON"}


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
        kind: ``cuda``, ``hip``, or torch's name of another accelerator.
        index: as torch counts.
        memory_bytes: total; 0 if unknown.
        capability: of a CUDA device, for example (8, 6).
        arch: of a HIP device, for example ``gfx942``.
        processors: streaming multiprocessors or compute units; 0 if unknown.
    """

    kind: str
    index: int
    name: str
    memory_bytes: int = 0
    capability: tuple[int, int] | None = None
    arch: str = ""
    processors: int = 0

    @property
    def label(self) -> str:
        """As torch writes it: HIP devices are called cuda there."""
        return f"{'cuda' if self.kind == 'hip' else self.kind}:{self.index}"


@dataclass(frozen=True)
class Cpu:
    """The processor; ``vectors`` is the instruction set that torch's own kernels use."""

    name: str
    vectors: str
    bf16: str
    fp16: str


@dataclass(frozen=True)
class Tools:
    """Compilers; an empty string is one that was not found.

    Attributes:
        cxx: the C++ compiler that Inductor uses for code on the CPU.
        cc: the C compiler that Triton uses to launch its kernels.
        python_header: path of ``Python.h``; what either compiles includes it.
        triton: the version of the package.
    """

    cxx: str
    cc: str
    python_header: str
    triton: str


class Setting(NamedTuple):
    """One setting in force."""

    variable: str
    value: str
    chosen: bool  # by the environment, not by default
    meaning: str


class Lowering(NamedTuple):
    """Which implementation of the fused loss a device gets."""

    device: str
    dtype: str
    name: str
    reason: str


@dataclass(frozen=True)
class Machine:
    """All that the probes found.

    Attributes:
        versions: package name to version; empty if it is not installed.
        default_index: the accelerator that torch uses if nothing says otherwise.
        environ: the variables that choose and order devices, those that are set.
        settings_error: why the settings cannot be read; empty if they can.
    """

    versions: dict[str, str]
    cpu: Cpu
    tools: Tools
    devices: tuple[Device, ...] = ()
    default_index: int = 0
    environ: tuple[tuple[str, str], ...] = ()
    settings: tuple[Setting, ...] = ()
    settings_error: str = ""
    lowerings: tuple[Lowering, ...] = ()


def probe() -> Machine:
    """Reads the machine. Starts the accelerator's driver if there is one."""
    settings, error = _probe_settings()
    devices, default_index = _probe_devices()
    variables = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return Machine(
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "triton", "sympy", "fxpass")},
        },
        cpu=_probe_cpu(),
        tools=probe_tools(),
        devices=devices,
        default_index=default_index,
        environ=tuple((v, os.environ[v]) for v in variables if os.environ.get(v)),
        settings=settings,
        settings_error=error,
        lowerings=tuple(_probe_lowerings(devices)),
    )


def probe_tools() -> Tools:
    """Finds the compilers, in the places where Inductor and Triton look."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        cxx = get_cpp_compiler()
    except RuntimeError:  # InvalidCxxCompiler; on Windows what its own search raises
        cxx = ""
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""
    header = Path(sysconfig.get_path("include"), "Python.h")
    return Tools(cxx, cc, str(header) if header.is_file() else "", _version("triton"))


def _version(package: str) -> str:
    # torch's own attribute has the local part (+cpu, +cu126) under every installer
    if package == "torch":
        return str(torch.__version__)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _probe_cpu() -> Cpu:
    has = torch.cpu.get_capabilities()

    def units(flags: dict[str, str]) -> str:
        return ", ".join(name for flag, name in flags.items() if has.get(flag))

    name = str(has.get("cpu_name") or platform.processor() or platform.machine())
    vectors = torch.backends.cpu.get_cpu_capability()
    return Cpu(name, vectors, units(_CPU_BF16), units(_CPU_FP16))


def _probe_devices() -> tuple[tuple[Device, ...], int]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (), 0
    count = torch.accelerator.device_count()
    devices = tuple(_probe_device(accelerator.type, index) for index in range(count))
    return devices, torch.accelerator.current_device_index()


def _probe_device(kind: str, index: int) -> Device:
    properties_of = getattr(torch.get_device_module(kind), "get_device_properties", None)
    properties = properties_of(index) if properties_of is not None else None
    name = getattr(properties, "name", kind)
    memory = getattr(properties, "total_memory", 0)
    if kind != "cuda" or properties is None:
        return Device(kind, index, name, memory)
    processors = properties.multi_processor_count
    if torch.version.hip:
        arch = properties.gcnArchName.partition(":")[0]
        return Device("hip", index, name, memory, arch=arch, processors=processors)
    capability = (properties.major, properties.minor)
    return Device(kind, index, name, memory, capability=capability, processors=processors)


def _probe_settings() -> tuple[tuple[Setting, ...], str]:
    try:
        settings = Settings.read()
    except ValueError as error:
        return (), str(error)
    rows = []
    for name, row in TABLE.items():
        value = getattr(settings, name)
        shown = value if isinstance(value, str) else f"{value:g}"
        chosen = bool(os.environ.get(row.variable))
        rows.append(Setting(row.variable, shown, chosen, row.meaning))
    return tuple(rows), ""


def _probe_lowerings(devices: Sequence[Device]) -> Iterator[Lowering]:
    for label in (*(device.label for device in devices), "cpu"):
        for dtype in DTYPES:
            name, reason = lowering_for(torch.device(label), dtype)
            yield Lowering(label, str(dtype).removeprefix("torch."), name, reason)
