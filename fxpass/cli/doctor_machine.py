"""Reads the machine for ``fxpass doctor``: devices, versions, compilers, settings.

In: torch, the compilers and the environment. Out: a :class:`Machine`, plain data.
"""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fxpass.plan.devices import implementation_for, target_of
from fxpass.settings import TABLE, Settings

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU.

    Attributes:
        label: torch's name, for example ``cuda:0``.
        arch: ``sm_86``, ``gfx942``, or the vector instructions of a CPU; empty if unknown.
        processors: streaming multiprocessors or compute units; 0 if unknown.
        memory_bytes: total; 0 if unknown.
        implementations: rows of (dtypes, name of the fused loss's implementation, reason).
    """

    label: str
    name: str
    arch: str = ""
    processors: int = 0
    memory_bytes: int = 0
    implementations: tuple[tuple[str, str, str], ...] = ()

    @property
    def capability(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability, (8, 6) for ``sm_86``; None for other devices."""
        if not self.arch.startswith("sm_"):
            return None
        return divmod(int(self.arch.removeprefix("sm_")), 10)


@dataclass(frozen=True)
class Machine:
    """The facts about a machine; empty where they are unknown."""

    versions: Mapping[str, str]  # of packages, and of the CUDA or HIP that torch is built for
    compilers: Mapping[str, str]  # tool → path
    cpu: Device
    devices: tuple[Device, ...] = ()  # the accelerators that torch finds, in torch's order
    default_index: int = 0  # of torch's default device in ``devices``
    arch_list: tuple[str, ...] = ()  # the GPUs that torch has code for
    error: str = ""  # torch's error while it looked for devices
    said: tuple[str, ...] = ()  # torch's warnings while it looked for devices
    hiding: Mapping[str, str] = field(default_factory=dict)  # set variables that hide devices
    # (variable, value, ``environment`` or ``default``, meaning), or why they cannot be read
    settings: tuple[tuple[str, ...], ...] = ()
    settings_error: str = ""

    @property
    def used(self) -> Device:
        """The device of a script that does not choose a device."""
        return self.devices[self.default_index] if self.devices else self.cpu


def read_machine() -> Machine:
    """Reads the machine. Starts the accelerator's driver if there is one."""
    devices: tuple[Device, ...] = ()
    default_index, error = 0, ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            if accelerator is not None:
                count = torch.accelerator.device_count()
                devices = tuple(_read(torch.device(accelerator.type, i)) for i in range(count))
                default_index = torch.accelerator.current_device_index()
        # a broken driver raises various types, and the report has to show its error
        except Exception as caught:
            error = f"{type(caught).__name__}: {_first_line(caught)}"
    settings, settings_error = _read_settings()
    return Machine(
        versions={
            "python": platform.python_version(),
            "torch": str(torch.__version__),  # has the local part (+cu130); metadata may lack it
            "cuda": torch.version.cuda or "",
            "hip": torch.version.hip or "",
            **{name: _version(name) for name in ("triton", "sympy", "fxpass")},
        },
        compilers=read_compilers(),
        cpu=_read(torch.device("cpu")),
        devices=devices,
        default_index=default_index,
        arch_list=tuple(torch.cuda.get_arch_list()),
        error=error,
        said=tuple(_first_line(warning.message) for warning in said),
        hiding={name: os.environ[name] for name in HIDING if name in os.environ},
        settings=settings,
        settings_error=settings_error,
    )


def read_compilers() -> dict[str, str]:
    """The tools that Inductor and Triton find: tool → path; empty if missing."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton_package

    try:
        cxx = get_cpp_compiler()
    except RuntimeError:  # InvalidCxxCompiler, or the error of the search on Windows
        cxx = ""
    scheme = "nt" if os.name == "nt" else "posix_prefix"  # Debian's default names another folder
    header = Path(sysconfig.get_path("include", scheme), "Python.h")
    return {
        "C++ compiler": cxx,
        "C compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or "",
        "Python.h": str(header) if header.is_file() else "",
        "Triton": "importable" if has_triton_package() else "",
    }


def _read(device: torch.device) -> Device:
    """A device's facts, from properties only: a context would take memory of the GPU."""
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    properties: Any = properties_of(device) if properties_of is not None else None
    name, arch = getattr(properties, "name", device.type), ""
    if device.type == "cpu":
        name = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
        arch = torch.backends.cpu.get_cpu_capability()
    elif device.type == "cuda":
        arch = target_of(device)
    rows: dict[tuple[str, str], list[str]] = {}
    for dtype in DTYPES:
        rows.setdefault(implementation_for(device, dtype), []).append(str(dtype)[len("torch.") :])
    return Device(
        str(device),
        name,
        arch,
        getattr(properties, "multi_processor_count", 0),
        getattr(properties, "total_memory", 0),
        tuple((", ".join(dtypes), *implementation) for implementation, dtypes in rows.items()),
    )


def _read_settings() -> tuple[tuple[tuple[str, ...], ...], str]:
    try:
        settings = Settings.read()
    except ValueError as error:
        return (), str(error)
    rows = []
    for name, row in TABLE.items():
        value = getattr(settings, name)
        shown = value if isinstance(value, str) else f"{value:g}"
        source = "environment" if os.environ.get(row.variable) else "default"
        rows.append((row.variable, shown or "-", source, row.meaning))
    return tuple(rows), ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _first_line(message: object) -> str:
    return next((line.strip() for line in str(message).splitlines() if line.strip()), "")
