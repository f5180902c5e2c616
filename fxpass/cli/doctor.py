"""``fxpass doctor``: reports the machine, the settings, and problems with their remedies.

:func:`read_machine` reads a :class:`Machine`, plain data; :func:`findings` judges it, and
:func:`text` prints it; both are pure functions::

    >>> bf16(Device("cuda:0", "Tesla T4", "sm_75"))
    ('emulated', 'train in float16 there, with torch.amp.GradScaler')
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fxpass.plan.devices import implementation_for, target_of
from fxpass.settings import TABLE, Settings

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SUPPORTED_TORCH = ((2, 11), (2, 15))

# (tool that Inductor needs, types of device that need it, how to install it)
NEEDED = (
    ("C++ compiler", ("cpu",), "install g++ or clang, or name yours in CXX"),
    ("Triton", ("cuda",), "pip install triton"),
    ("C compiler", ("cuda",), "install gcc or clang, or name yours in CC"),
    ("Python.h", ("cpu", "cuda"), "install Python's headers, such as apt-get install python3-dev"),
)


@dataclass(frozen=True)
class Device:
    """One accelerator, or the CPU; empty or 0 where a fact is unknown."""

    label: str  # torch's name, for example ``cuda:0``
    name: str
    arch: str = ""  # ``sm_86``, ``gfx942``, or the vector instructions of a CPU
    processors: int = 0  # streaming multiprocessors or compute units
    memory_bytes: int = 0
    # of the fused loss: (dtype, name of the implementation, reason)
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


class Finding(NamedTuple):
    """A problem or warning with its remedy; a problem makes fxpass unusable."""

    level: str
    text: str
    advice: str


def run() -> int:
    """Reads the machine and prints the report; returns 1 if there is a problem, else 0."""
    machine = read_machine()
    print(text(machine))
    return int(any(finding.level == "problem" for finding in findings(machine)))


def inductor_problem(device_type: str) -> str:
    """Why Inductor cannot compile for ``cpu`` or ``cuda``, with remedy; empty if it can."""
    return _lacking(read_compilers(), device_type)


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
    return Device(
        str(device),
        name,
        arch,
        getattr(properties, "multi_processor_count", 0),
        getattr(properties, "total_memory", 0),
        tuple((str(t).removeprefix("torch."), *implementation_for(device, t)) for t in DTYPES),
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


def findings(machine: Machine) -> list[Finding]:
    """All findings, problems first."""
    found = [Finding(*row) for row in (*_of_torch(machine), *_of_devices(machine))]
    return sorted(found, key=lambda finding: finding.level != "problem")


def _of_torch(machine: Machine) -> Iterator[tuple[str, str, str]]:
    versions, (lowest, highest) = machine.versions, SUPPORTED_TORCH
    numbers = re.match(r"(\d+)\.(\d+)", versions["torch"])
    if not numbers or not lowest <= (int(numbers[1]), int(numbers[2])) <= highest:
        advice = "install {}.{} to {}.{}".format(*lowest, *highest)
        yield "problem", f"torch {versions['torch']} is not supported", advice
    if machine.settings_error:
        yield "problem", machine.settings_error, "correct or unset the variable"
    if machine.error:
        advice = "repair its driver, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        yield "problem", f"torch cannot start the accelerator: {machine.error}", advice
    hidden = [*machine.said, *(f"{name}={value}" for name, value in machine.hiding.items())]
    built = versions["cuda"] or versions["hip"]
    if built and hidden and not machine.devices and not machine.error:
        yield (
            "warning",
            f"torch is built for GPUs and sees none: {'; '.join(hidden)}",
            "unset the variables that hide devices, or install a torch for the driver",
        )
    for warning in machine.said if machine.devices else ():  # such as of a GPU without code
        advice = "install a torch for this machine: https://pytorch.org/get-started/locally/"
        yield "warning", f"torch warns: {warning}", advice


def _of_devices(machine: Machine) -> Iterator[tuple[str, str, str]]:
    used = best = machine.used
    emulating: dict[str, list[str]] = {}  # by advice
    for device in machine.devices:
        best = device if stronger(device, best) else best
        if advice := bf16(device)[1]:
            emulating.setdefault(advice, []).append(_name(device))
    on_gpu = any(device.label.startswith("cuda") for device in machine.devices)
    for device_type in ("cpu", "cuda") if on_gpu else ("cpu",):
        if lacking := _lacking(machine.compilers, device_type):
            yield (
                "warning",
                f"Inductor cannot compile for {device_type}: {lacking}",
                "install what is missing, or set FUSEDCE_INNER=aot_eager, which needs none of it",
            )
    if best != used:
        module, _, index = best.label.partition(":")
        yield (
            "warning",
            f"{_name(used)} is the default, and {_name(best)} is stronger: "
            f"{_strength(best)} against {_strength(used)}",
            f"call torch.{module}.set_device({index}) first, or let CUDA_VISIBLE_DEVICES name it "
            "alone; with CUDA_DEVICE_ORDER=PCI_BUS_ID the numbers there are those of nvidia-smi",
        )
    told = "though torch.cuda.is_bf16_supported() is True"
    for advice, names in emulating.items():
        yield "warning", f"bf16 is emulated on {', '.join(names)}, {told}", advice


def _lacking(compilers: Mapping[str, str], device_type: str) -> str:
    return "; ".join(
        f"{tool} not found: {advice}"
        for tool, types, advice in NEEDED
        if device_type in types and not compilers[tool]
    )


def bf16(device: Device) -> tuple[str, str]:
    """How an NVIDIA GPU multiplies bf16, and advice; both empty for other devices.

    The same as ``torch.cuda.is_bf16_supported(including_emulation=False)``, which answers for the
    current device only.
    """
    capability = device.capability
    if capability is None:
        return "", ""
    if capability >= (8, 0):
        return "native", ""
    if capability >= (7, 0):
        return "emulated", "train in float16 there, with torch.amp.GradScaler"
    advice = "stay with float32 there, and set FUSEDCE_INNER=aot_eager: Inductor needs sm_70"
    return "emulated", advice  # without tensor cores


def stronger(left: Device, right: Device) -> bool:
    """Whether ``left`` is the better device for training than ``right``: by native bf16, else by
    more processors or more memory, and less of neither.

    Devices with the same name are equal, although ECC or a display may reduce the memory of one.
    """
    if bf16(left)[0] != bf16(right)[0]:
        return bf16(left)[0] == "native"
    pairs = ((left.processors, right.processors), (left.memory_bytes, right.memory_bytes))
    larger = any(a > b for a, b in pairs) and all(a >= b for a, b in pairs)
    return larger and left.name != right.name


def text(machine: Machine) -> str:
    """The whole report."""
    devices = (*machine.devices, machine.cpu)
    sections: dict[str, list[tuple[str, ...]]] = {
        "versions": [(name, version or "-") for name, version in machine.versions.items()],
        "devices": [(*_cells(d), "used" if d == machine.used else "") for d in devices],
        "devices hidden by": [(k, value or "(empty)") for k, value in machine.hiding.items()],
        "what Inductor needs": [
            (tool, machine.compilers[tool] or "not found", f"for {' and '.join(types)}")
            for tool, types, _ in NEEDED
        ],
        "fused loss": [(d.label, *row) for d in devices for row in d.implementations],
        "settings": list(machine.settings),
    }
    blocks = [f"{title}\n{_columns(rows)}" for title, rows in sections.items() if rows]
    found = [f"{f.level}: {f.text}\n  do: {f.advice}" for f in findings(machine)]
    return "\n\n".join([*blocks, "\n".join(found or ["no problems found"])])


def _cells(device: Device) -> tuple[str, ...]:
    word = bf16(device)[0]
    return (
        device.label,
        device.name,
        device.arch,
        f"bf16 {word}" if word else "",
        f"{device.processors} processors" if device.processors else "",
        f"{device.memory_bytes / 2**30:.1f} GiB" if device.memory_bytes else "",
    )


def _name(device: Device) -> str:
    return f"{device.label} ({device.name})"


def _strength(device: Device) -> str:
    return ", ".join(filter(None, _cells(device)[3:]))


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # columns without any text are omitted
    return "\n".join(
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w).rstrip()
        for row in rows
    )
