"""``fxpass doctor``: what this machine can do, which settings are in force, and what is wrong.

In: the :class:`fxpass.cli.doctor_probe.Machine` that the probes read, which is plain data. Out:
:func:`findings` judges it by the rules here and in ``doctor_rules``, :func:`text` prints it; both
are pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from fxpass.cli import doctor_rules
from fxpass.cli.doctor_capability import arch_text, memory_text, native, native_cpu
from fxpass.cli.doctor_devices import SELECTING, Accelerators, Cpu, Device
from fxpass.cli.doctor_probe import Lowering, Machine, Setting, Tools, probe
from fxpass.cli.doctor_rules import LEVELS, Finding

SUPPORTED_TORCH = ((2, 11), (2, 15))

# (types of device, the field of Tools that Inductor needs there, what is so without it, advice)
_NEEDED = (
    (
        ("cpu",),
        "cxx",
        "there is no C++ compiler",
        "install g++ or clang (for example apt-get install g++), or name yours in CXX; or set "
        "FUSEDCE_INNER=aot_eager, which needs none",
    ),
    (("cuda",), "triton", "triton is not installed", "pip install triton"),
    (
        ("cuda",),
        "cc",
        "Triton needs a C compiler",
        "install gcc or clang (for example apt-get install gcc), or name yours in CC",
    ),
    (
        ("cpu", "cuda"),
        "python_header",
        "Python.h is missing",
        "install Python's headers (for example apt-get install python3-dev)",
    ),
)


def run() -> int:
    """Probes, prints, judges.

    Returns:
        1 if there is a problem, else 0: warnings and notes do not count.
    """
    machine = probe()
    print(text(machine))
    return int(any(finding.level == "problem" for finding in findings(machine)))


# ---------------------------------------------------------------- judging


def findings(machine: Machine) -> list[Finding]:
    """What is wrong, the worst first, each with what to do."""
    found = [finding for rule in RULES for finding in rule(machine)]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _torch_version(machine: Machine) -> Iterator[Finding]:
    version = machine.versions["torch"]
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    lowest, highest = SUPPORTED_TORCH
    if release is None or not lowest <= release <= highest:
        yield Finding(
            "problem",
            f"torch {version} is not supported",
            "install {}.{} to {}.{}".format(*lowest, *highest),
        )


def _settings(machine: Machine) -> Iterator[Finding]:
    if machine.settings_error:
        yield Finding("problem", machine.settings_error, "correct or unset the variable")


def _inductor(machine: Machine) -> Iterator[Finding]:
    on_gpu = any(device.kind in ("cuda", "hip") for device in machine.accelerators.devices)
    for kind in ("cpu", "cuda") if on_gpu else ("cpu",):
        for lacking, advice in _lacking(machine.tools, kind):
            yield Finding("warning", f"Inductor cannot compile for {kind}: {lacking}", advice)


def _devices(machine: Machine) -> Iterator[Finding]:
    yield from doctor_rules.findings(machine.accelerators, machine.cpu)


RULES: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    _torch_version,
    _settings,
    _inductor,
    _devices,
)


def inductor_problem(tools: Tools, device_type: str) -> str:
    """Why Inductor cannot compile for a type of device, and what to do; empty if it can."""
    return "; ".join(f"{lacking}: {advice}" for lacking, advice in _lacking(tools, device_type))


def _lacking(tools: Tools, device_type: str) -> Iterator[tuple[str, str]]:
    for types, field, lacking, advice in _NEEDED:
        if device_type in types and not getattr(tools, field):
            yield lacking, advice


# ---------------------------------------------------------------- printing


def text(machine: Machine) -> str:
    """The whole report."""
    sections = (
        ("versions", _version_rows(machine.versions)),
        ("devices", _device_rows(machine.accelerators, machine.cpu)),
        ("which devices", _selection_rows(machine.accelerators)),
        ("compilers", _tool_rows(machine.tools)),
        ("fused loss", _lowering_rows(machine.lowerings)),
        ("settings", _setting_rows(machine.settings)),
    )
    blocks = [f"{title}\n{_columns(rows)}" for title, rows in sections if rows]
    found = findings(machine)
    lines = [f"{finding.level}: {finding.text}\n  do: {finding.advice}" for finding in found]
    if all(finding.level == "note" for finding in found):
        lines.append("no problems found")
    return "\n\n".join([*blocks, "\n".join(lines)])


def _version_rows(versions: dict[str, str]) -> list[tuple[str, ...]]:
    supported = "fxpass supports {}.{} to {}.{}".format(*SUPPORTED_TORCH[0], *SUPPORTED_TORCH[1])
    return [
        (name, version or "not installed", supported if name == "torch" else "")
        for name, version in versions.items()
    ]


def _device_rows(accelerators: Accelerators, cpu: Cpu) -> list[tuple[str, ...]]:
    """Torch's devices, the cards that it does not see, the CPU."""
    used = accelerators.used
    rows, seen = [], []
    for device in accelerators.devices:
        card = accelerators.card(device)
        seen.append(card)
        place = f"nvidia-smi {card.index}" if card else ""
        rows.append((*_device_cells(device.label, device), place, "used" if device == used else ""))
    for card in accelerators.cards:
        # a device that is not among the cards (a slice of one, say) may be any of them
        if card not in seen and None not in seen:
            rows.append((*_device_cells("-", card), f"nvidia-smi {card.index}", "not visible"))
    bf16, fp16 = native_cpu(cpu)
    words = (f"bf16 {bf16}", f"fp16 {fp16}", "", "", "")
    rows.append(("cpu", cpu.name, cpu.vectors, *words, "" if used else "used"))
    return rows


def _device_cells(label: str, device: Device) -> tuple[str, ...]:
    bf16, fp16 = native(device)
    memory = memory_text(device.memory_bytes) if device.memory_bytes else ""
    free = f"{memory_text(device.free_bytes)} free" if device.free_bytes is not None else ""
    return label, device.name, arch_text(device), f"bf16 {bf16}", f"fp16 {fp16}", memory, free


def _selection_rows(accelerators: Accelerators) -> list[tuple[str, ...]]:
    """The variables that are set, and those that could be, if there is something to choose from."""
    environ = dict(accelerators.environ)
    if accelerators.devices or accelerators.cards:
        order = ("CUDA_DEVICE_ORDER",) if accelerators.build == "cuda" else ()
        names = (*SELECTING.get(accelerators.build, ())[:1], *order, "LOCAL_RANK")
        environ = {**dict.fromkeys(names, "not set"), **environ}
    rows = [(name, value or "(empty)") for name, value in environ.items()]
    if accelerators.build == "cuda" and accelerators.cards_error:
        rows.append(("nvidia-smi", f"{accelerators.cards_error}; its numbers are unknown"))
    return rows


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
