"""``fxpass doctor``: what this machine can do, which settings are in force, and what is wrong.

In: the :class:`fxpass.doctor_probe.Machine` that the probes read, which is plain data. Out:
:func:`findings` judges it, :func:`text` prints it; both are pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fxpass.doctor_probe import Device, Lowering, Machine, Setting, Tools, probe

SUPPORTED_TORCH = ((2, 11), (2, 15))
GIB = 2**30

# AMD chips with matrix instructions for both bf16 and fp16: CDNA from gfx908 on, RDNA from 3 on.
_HIP_MATRIX = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")


class Finding(NamedTuple):
    """One judgement; a ``problem`` makes fxpass unusable, a ``warning`` does not."""

    level: str
    text: str


def run() -> int:
    """Probes, prints, judges.

    Returns:
        1 if there is a problem, else 0.
    """
    machine = probe()
    print(text(machine))
    return int(any(finding.level == "problem" for finding in findings(machine)))


# ---------------------------------------------------------------- judging


def native(device: Device) -> tuple[str, str]:
    """How the device multiplies matrices of bf16 and of fp16, in a few words each."""
    if device.kind == "hip":
        word = "matrix units" if device.arch.startswith(_HIP_MATRIX) else "emulated"
        return word, word
    if device.capability is None:
        return "unknown", "unknown"
    bf16 = "tensor cores" if device.capability >= (8, 0) else "emulated"
    return bf16, _cuda_fp16(device.capability)


def _cuda_fp16(capability: tuple[int, int]) -> str:
    if capability >= (7, 0):
        return "tensor cores"
    if capability == (6, 1):
        return "native but slow"  # 1/64 of the float32 rate
    return "native" if capability >= (5, 3) else "emulated"


def findings(machine: Machine) -> list[Finding]:
    """What is wrong, the worst first, each with what to do."""
    found = [*_version_findings(machine.versions["torch"])]
    if machine.settings_error:
        found.append(Finding("problem", machine.settings_error))
    kinds = ["cpu", *("cuda" for d in machine.devices[:1] if d.kind in ("cuda", "hip"))]
    for kind in kinds:
        problem = inductor_problem(machine.tools, kind)
        if problem:
            found.append(Finding("warning", f"Inductor cannot compile for {kind}: {problem}"))
    found += device_findings(machine.devices, machine.default_index, dict(machine.environ))
    return found


def _version_findings(version: str) -> Iterator[Finding]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    lowest, highest = SUPPORTED_TORCH
    if release is None or not lowest <= release <= highest:
        yield Finding(
            "problem",
            "torch {} is not supported: install {}.{} to {}.{}".format(version, *lowest, *highest),
        )


def inductor_problem(tools: Tools, device_type: str) -> str:
    """Why Inductor cannot compile for a type of device, and what to install; empty if it can."""
    if device_type == "cpu" and not tools.cxx:
        return (
            "there is no C++ compiler. Install g++ or clang (for example apt-get install g++), or "
            "name yours in CXX; or set FUSEDCE_INNER=aot_eager, which needs none"
        )
    if device_type == "cuda" and not tools.triton:
        return "triton is not installed (pip install triton)"
    if device_type == "cuda" and not tools.cc:
        return (
            "Triton needs a C compiler. Install gcc or clang (for example apt-get install gcc), or "
            "name yours in CC"
        )
    if device_type in ("cpu", "cuda") and not tools.python_header:
        return (
            "Python.h is missing. Install Python's headers (for example apt-get install "
            "python3-dev)"
        )
    return ""


def device_findings(
    devices: Sequence[Device], default_index: int, environ: dict[str, str]
) -> list[Finding]:
    """Warns if the default of several unlike devices is the weaker one.

    Args:
        environ: ``CUDA_VISIBLE_DEVICES``, ``HIP_VISIBLE_DEVICES``, ``CUDA_DEVICE_ORDER`` if set.
    """
    default = next((d for d in devices if d.index == default_index), None)
    if default is None:
        return []
    stronger = [device for device in devices if _stronger(device, default)]
    if not stronger:
        return []
    best = stronger[0]
    for device in stronger[1:]:
        if _stronger(device, best):
            best = device
    hip = best.kind == "hip"
    variable = "HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES"
    advice = (
        f"set {variable}={_visible_name(best.index, environ.get(variable, ''))} before Python "
        f"starts, or call torch.cuda.set_device({best.index}) first"
    )
    if not hip and "CUDA_DEVICE_ORDER" not in environ:
        advice += "; CUDA_DEVICE_ORDER=PCI_BUS_ID makes the numbers those of nvidia-smi"
    return [
        Finding(
            "warning",
            f"{default.label} ({default.name}) is the default, but {best.label} ({best.name}) is "
            f"stronger: {advice}",
        )
    ]


def _visible_name(index: int, visible: str) -> str:
    """The name of torch's device ``index`` in a variable that may hold a selection already."""
    chosen = [name.strip() for name in visible.split(",") if name.strip()]
    return chosen[index] if index < len(chosen) else str(index)


def _stronger(left: Device, right: Device) -> bool:
    """Whether ``left`` is better in something that counts here and worse in nothing."""
    # two of one name are alike, though one may have less memory left, for ECC or a display
    if left.kind != right.kind or left.name == right.name:
        return False
    a, b = _strength(left), _strength(right)
    return a != b and all(x >= y for x, y in zip(a, b, strict=True))


def _strength(device: Device) -> tuple[int, ...]:
    ranks = ("emulated", "unknown", "native but slow", "native", "matrix units", "tensor cores")
    return (*map(ranks.index, native(device)), device.processors, device.memory_bytes)


# ---------------------------------------------------------------- printing


def text(machine: Machine) -> str:
    """The whole report."""
    sections = (
        ("versions", _version_rows(machine.versions)),
        ("devices", _device_rows(machine)),
        ("compilers", _tool_rows(machine.tools)),
        ("fused loss", _lowering_rows(machine.lowerings)),
        ("settings", _setting_rows(machine.settings)),
    )
    blocks = [f"{title}\n{_columns(rows)}" for title, rows in sections if rows]
    found = findings(machine)
    lines = [f"{finding.level}: {finding.text}" for finding in found]
    return "\n\n".join([*blocks, "\n".join(lines) or "no problems found"])


def _version_rows(versions: dict[str, str]) -> list[tuple[str, ...]]:
    supported = "fxpass supports {}.{} to {}.{}".format(*SUPPORTED_TORCH[0], *SUPPORTED_TORCH[1])
    return [
        (name, version or "not installed", supported if name == "torch" else "")
        for name, version in versions.items()
    ]


def _device_rows(machine: Machine) -> list[tuple[str, ...]]:
    rows = []
    for device in machine.devices:
        bf16, fp16 = native(device)
        capability = "sm_{}{}".format(*device.capability) if device.capability else device.arch
        memory = f"{device.memory_bytes / GIB:.1f} GiB" if device.memory_bytes else ""
        default = "default" if device.index == machine.default_index else ""
        rows.append(
            (device.label, device.name, capability, f"bf16 {bf16}", f"fp16 {fp16}", memory, default)
        )
    cpu = machine.cpu
    bf16, fp16 = (f"native ({units})" if units else "emulated" for units in (cpu.bf16, cpu.fp16))
    default = "" if machine.devices else "default"
    rows.append(("cpu", cpu.name, cpu.vectors, f"bf16 {bf16}", f"fp16 {fp16}", "", default))
    return rows + [(name, value, "", "", "", "", "") for name, value in machine.environ]


def _tool_rows(tools: Tools) -> list[tuple[str, ...]]:
    return [
        ("C++", tools.cxx or "not found", "for Inductor's code on the CPU"),
        ("C", tools.cc or "not found", "for Triton's kernel launchers, on a GPU"),
        ("Python.h", tools.python_header or "not found", "for both"),
    ]


def _lowering_rows(lowerings: Sequence[Lowering]) -> list[tuple[str, ...]]:
    """One row per device and reason, with the dtypes that share it."""
    dtypes: dict[tuple[str, str, str], list[str]] = {}
    for lowering in lowerings:
        dtypes.setdefault((lowering.device, lowering.name, lowering.reason), []).append(
            lowering.dtype
        )
    return [
        (device, name, ", ".join(names), reason) for (device, name, reason), names in dtypes.items()
    ]


def _setting_rows(settings: Sequence[Setting]) -> list[tuple[str, ...]]:
    return [
        (s.variable, s.value or "-", "environment" if s.chosen else "default", s.meaning)
        for s in settings
    ]


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # a column that is empty in every row takes no place
    return "\n".join(
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True) if w).rstrip()
        for row in rows
    )
