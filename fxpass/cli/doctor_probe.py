"""What ``fxpass doctor`` reads from the machine, as plain data that can be judged and printed.

In: nothing but the machine. Out: a :class:`Machine`.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from fxpass.cli.doctor_devices import Accelerators, Cpu, Device, read_accelerators, read_cpu
from fxpass.plan.devices import lowering_for
from fxpass.settings import TABLE, Settings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
        settings_error: why the settings cannot be read; empty if they can.
    """

    versions: dict[str, str]
    cpu: Cpu
    tools: Tools
    accelerators: Accelerators = field(default_factory=Accelerators)
    settings: tuple[Setting, ...] = ()
    settings_error: str = ""
    lowerings: tuple[Lowering, ...] = ()


def probe() -> Machine:
    """Reads the machine. Starts the accelerator's driver if there is one."""
    settings, error = _probe_settings()
    accelerators = read_accelerators()
    return Machine(
        versions={
            "python": platform.python_version(),
            **{name: _version(name) for name in ("torch", "triton", "sympy", "fxpass")},
        },
        cpu=read_cpu(),
        tools=probe_tools(),
        accelerators=accelerators,
        settings=settings,
        settings_error=error,
        lowerings=tuple(_probe_lowerings(accelerators.devices)),
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
