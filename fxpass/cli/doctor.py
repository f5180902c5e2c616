"""``fxpass doctor``: reports the machine, the settings, and problems with their remedies."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

from fxpass.plan.devices import implementation_for, target_of
from fxpass.releases.torch_2_13 import SPLITS_PATHS
from fxpass.settings import TABLE, Settings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUPPORTED_TORCH = ((2, 11), (2, 15))


class Tool(NamedTuple):
    """A tool that Inductor needs."""

    name: str
    device_types: tuple[str, ...]  # for which Inductor needs it
    advice: str  # how to install it


TOOLS = (
    Tool("C++ compiler", ("cpu",), "install g++ or clang, or name yours in CXX"),
    Tool("Triton", ("cuda",), "pip install triton"),
    Tool("C compiler", ("cuda",), "install gcc or clang, or name yours in CC"),
    Tool(
        name="Python.h",
        device_types=("cpu", "cuda"),
        advice="install Python's headers, such as apt-get install python3-dev",
    ),
)


class Finding(NamedTuple):
    """A problem or warning with its remedy; a problem makes fxpass unusable."""

    level: str
    text: str
    advice: str


class Device(NamedTuple):
    """A device that torch finds."""

    device: torch.device
    name: str
    arch: str  # ``sm_86``, ``gfx942``, or the vector instructions of a CPU


def print_report() -> int:
    """Prints the report; returns 1 if there is a problem, else 0."""
    devices, found = read_devices()
    found += _of_torch()
    for kind in dict.fromkeys(d.device.type for d in devices):
        if kind in ("cpu", "cuda") and (lacking := inductor_problem(kind)):
            advice = "install what is missing, or set FUSEDCE_INNER=aot_eager, which needs none"
            found.append(
                Finding("warning", f"Inductor cannot compile for {kind}: {lacking}", advice)
            )
    settings: list[tuple[str, ...]] = []
    try:
        settings += _settings(Settings.read())
    except ValueError as error:
        found.append(Finding("problem", str(error), "correct or unset the variable"))
    paths = read_compilers()
    sections: dict[str, Sequence[tuple[str, ...]]] = {
        "versions": [
            ("python", platform.python_version()),
            ("torch", str(torch.__version__)),  # has the local part (+cu130); metadata may lack it
            *((name, _version(name)) for name in ("triton", "sympy", "fxpass")),
        ],
        "devices": [(str(d.device), d.name, d.arch) for d in devices],
        "what Inductor needs": [
            (tool.name, paths[tool.name] or "not found", f"for {' and '.join(tool.device_types)}")
            for tool in TOOLS
        ],
        "fused loss": [
            (str(d.device), str(dtype).removeprefix("torch."), *implementation_for(d.device, dtype))
            for d in devices
            for dtype in DTYPES
        ],
        "settings": settings,
    }
    blocks = [f"{title}\n{aligned(rows)}" for title, rows in sections.items() if rows]
    found.sort(key=lambda finding: finding.level != "problem")
    lines = [f"{f.level}: {f.text}\n  do: {f.advice}" for f in found] or ["no problems found"]
    print("\n\n".join([*blocks, "\n".join(lines)]))
    return int(any(finding.level == "problem" for finding in found))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _settings(settings: Settings) -> Iterator[tuple[str, ...]]:
    for name, row in TABLE.items():
        value = getattr(settings, name)
        shown = value if isinstance(value, str) else f"{value:g}"
        source = "environment" if os.environ.get(row.variable) else "default"
        yield row.variable, shown or "-", source


def _of_torch() -> Iterator[Finding]:
    lowest, highest = SUPPORTED_TORCH
    if not lowest <= _release() <= highest:
        advice = "install {}.{} to {}.{}".format(*lowest, *highest)
        yield Finding("problem", f"torch {torch.__version__} is not supported", advice)


def _release() -> tuple[int, int]:
    """torch's, without the patch; zeros for a version that is no release."""
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


# ---------------------------------------------------------------- devices


def read_devices() -> tuple[list[Device], list[Finding]]:
    """The accelerators that torch finds, in torch's order, and the CPU; and their problems.

    Starts the accelerator's driver if there is one.
    """
    devices: list[Device] = []
    found: list[Finding] = []
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:
            count = torch.accelerator.device_count()
            devices += [_read(torch.device(accelerator.type, i)) for i in range(count)]
    # a broken driver raises various types, and the report has to show its error
    except Exception as error:
        text = f"torch cannot start the accelerator: {type(error).__name__}: {_line(error)}"
        advice = "repair its driver, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        found.append(Finding("problem", text, advice))
    return [*devices, _read(torch.device("cpu"))], found


def _read(device: torch.device) -> Device:
    """A device's facts, from properties only: a context would take memory of the GPU."""
    if device.type == "cpu":
        name = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
        return Device(device, name, torch.backends.cpu.get_cpu_capability())
    if device.type == "cuda":
        return Device(device, torch.cuda.get_device_properties(device).name, target_of(device))
    return Device(device, device.type, "")


def _line(message: object) -> str:
    return next((line.strip() for line in str(message).splitlines() if line.strip()), "")


# ---------------------------------------------------------------- compilers


def inductor_problem(device_type: str) -> str:
    """Why Inductor cannot compile for ``cpu`` or ``cuda``, with remedy; empty if it can."""
    paths = read_compilers()
    found = [
        f"{tool.name} not found: {tool.advice}"
        for tool in TOOLS
        if device_type in tool.device_types and not paths[tool.name]
    ]
    folder = Path(torch.__file__).parent
    if device_type == "cpu" and " " in str(folder) and SPLITS_PATHS:
        what = f"the C++ linker gets the path {folder} in pieces, which torch 2.14 quotes"
        found.append(f"{what}: make the virtual environment where no folder's name has a space")
    return "; ".join(found)


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


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Lines of text with aligned columns; a column without any text is omitted."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w).rstrip()
        for row in rows
    )
