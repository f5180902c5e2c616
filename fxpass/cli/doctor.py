"""``fxpass doctor``: reports the machine, the settings, and problems with their remedies.

In: a :class:`fxpass.cli.doctor_machine.Machine`. Out: problems (:func:`findings`) and the report
(:func:`text`); both are pure functions::

    >>> bf16(Device("cuda:0", "Tesla T4", "sm_75"))
    ('emulated', 'train in float16 there, with torch.amp.GradScaler')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fxpass.cli.doctor_machine import Device, Machine, read_compilers, read_machine

SUPPORTED_TORCH = ((2, 11), (2, 15))

# (tool that Inductor needs, types of device that need it, how to install it)
NEEDED = (
    ("C++ compiler", ("cpu",), "install g++ or clang, or name yours in CXX"),
    ("Triton", ("cuda",), "pip install triton"),
    ("C compiler", ("cuda",), "install gcc or clang, or name yours in CC"),
    ("Python.h", ("cpu", "cuda"), "install Python's headers, such as apt-get install python3-dev"),
)


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


# ---------------------------------------------------------------- judging


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
    reasons = [*machine.said, *(f"{name}={value}" for name, value in machine.hiding.items())]
    built = versions["cuda"] or versions["hip"]
    if built and reasons and not machine.devices and not machine.error:
        yield (
            "warning",
            f"torch is built for GPUs and sees none: {'; '.join(reasons)}",
            "unset the variables that hide devices, or install a torch for the driver",
        )


def _of_devices(machine: Machine) -> Iterator[tuple[str, str, str]]:
    used = best = machine.used
    emulating: dict[str, list[str]] = {}  # by advice
    for device in machine.devices:
        best = device if stronger(device, best) else best
        if advice := bf16(device)[1]:
            emulating.setdefault(advice, []).append(_name(device))
        if not has_code(device, machine.arch_list):
            yield (
                "problem" if device == used else "warning",
                f"this torch has no code for {_name(device)}, which is {device.arch}, only for "
                + ", ".join(machine.arch_list),
                "install a build of torch that has: https://pytorch.org/get-started/locally/",
            )
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


def has_code(device: Device, arch_list: Sequence[str]) -> bool:
    """Whether a torch that is built for ``arch_list`` runs on a device; True if unknown.

    Machine code (``sm_80``) runs on later devices of the same major number, the text form
    (``compute_80``) on all later ones.
    """
    if device.capability is None or not arch_list:
        return True
    for arch in arch_list:
        form, _, number = arch.partition("_")
        since = divmod(int(number.rstrip("af")), 10)  # torch, too, takes sm_90a for sm_90
        same_major = since[0] == device.capability[0]
        if since <= device.capability and (same_major or form == "compute"):
            return True
    return False


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


# ---------------------------------------------------------------- printing


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
