"""Kernels taken to machine code for GPUs that need not be there, and what they take of them.

In: :class:`Unit`, a kernel's source with the types and options of one launch. Out:
:class:`Resources` for each target, read from what the assemblers say, and a markdown table that is
compared with the one in the repository::

    units = {"a kernel": Unit(source, "kernel", {"x": "*bf16", "N": "i32"}, {"BLOCK": 64})}
    compare(Path("tests/unit/kernels/compiled_reductions.md"), "sm_90", resources(units, "sm_90"))

Triton brings its assemblers along. They run in a process of their own, without TRITON_INTERPRET:
that variable decides at import what ``triton.jit`` makes of a function.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# bytes of shared memory that one block may have
SHARED = {
    **{"sm_75": 65536, "sm_80": 166912, "sm_86": 101376, "sm_89": 101376},
    **{"sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536},
}
TARGETS = tuple(SHARED)


@dataclass(frozen=True)
class Unit:
    """One launch of one kernel, apart from its grid.

    Attributes:
        source: a Python module.
        name: the kernel in it.
        signature: the type of every parameter that is no constant, as Triton spells it.
        constants: the value of every ``tl.constexpr`` parameter.
        options: num_warps, num_stages and whatever else a launch takes.
        aligned: the parameters (or other pointers' names) that are multiples of 16.
    """

    source: str
    name: str
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()


class Resources(NamedTuple):
    """What one block takes: registers of a thread, bytes that it spills, bytes of shared memory."""

    registers: int
    spills: int
    shared: int

    def __str__(self) -> str:
        spills = f", {self.spills} B spilled" if self.spills else ""
        return f"{self.registers}, {self.shared} B{spills}"


def resources(units: Mapping[str, Unit], target: str) -> dict[str, Resources]:
    """What each unit takes on one of :data:`TARGETS`.

    Raises:
        AssertionError: what the compiler says, where one does not compile.
    """
    return {label: Resources(*one[:3]) for label, one in _compiled(units, target, False).items()}


def loops(units: Mapping[str, Unit], target: str) -> dict[str, list[int]]:
    """The instructions in each loop of each unit on an NVIDIA GPU, in the order of the code, without
    those that a branch inside the loop may skip."""
    return {label: one[3] for label, one in _compiled(units, target, True).items()}


def _compiled(units: Mapping[str, Unit], target: str, disassembled: bool) -> dict[str, Any]:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    work = {label: dataclasses.asdict(unit) for label, unit in units.items()}
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.run(
            [sys.executable, "-m", __name__, target, directory, *["loops"] * disassembled],
            input=json.dumps(work),
            env={**environ, "TRITON_CACHE_DIR": directory},
            capture_output=True,
            text=True,
        )
    assert not process.returncode, process.stderr
    return json.loads(process.stdout)


# ---------------------------------------------------------------- the table


def compare(path: Path, target: str, found: Mapping[str, Resources]) -> None:
    """Compares one column of the table with what was found; the rest of the table is not looked at.

    Another version of Triton allocates other registers, so numbers are compared under the version
    that the table names. With EXPECTTEST_ACCEPT=1 the column is written instead (with ``-n0``:
    every target writes to the same file).

    Raises:
        AssertionError: a spill, too much shared memory, or a number that is not the table's.
    """
    spills = {label: str(one) for label, one in found.items() if one.spills}
    assert not spills, f"{target} spills: {spills}"
    large = {label: str(one) for label, one in found.items() if one.shared > SHARED[target]}
    assert not large, f"{target} has {SHARED[target]} B of shared memory: {large}"
    version, columns = _read(path.read_text() if path.exists() else "")
    installed = importlib.metadata.version("triton")
    cells = {label: str(one) for label, one in found.items()}
    if os.environ.get("EXPECTTEST_ACCEPT"):
        columns[target] = cells
        path.write_text(_write(installed, columns))
    elif version == installed:
        assert columns.get(target) == cells, f"{path} is old: set EXPECTTEST_ACCEPT=1 (with -n0)"


_HEAD = """\
Registers of a thread and bytes of shared memory of a block, as Triton {version} compiles them.
Nothing spills. Written by the tests: `EXPECTTEST_ACCEPT=1 python -m pytest -n0 tests/unit/kernels`
"""


def _write(version: str, columns: Mapping[str, Mapping[str, str]]) -> str:
    targets = [target for target in TARGETS if target in columns]
    labels = list(dict.fromkeys(label for target in targets for label in columns[target]))
    rows = [["kernel", *targets], ["---"] * (1 + len(targets))]
    rows += [[label, *(columns[target].get(label, "") for target in targets)] for label in labels]
    return "\n".join(
        [_HEAD.format(version=version), *(f"| {' | '.join(row)} |" for row in rows), ""]
    )


def _read(text: str) -> tuple[str, dict[str, dict[str, str]]]:
    found = re.search(r"as Triton (\S+) compiles", text)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    columns: dict[str, dict[str, str]] = {}
    for place, target in enumerate(rows[0][1:] if rows else [], 1):
        columns[target] = {row[0]: row[place] for row in rows[2:] if row[place]}
    return found[1] if found else "", columns


# ---------------------------------------------------------------- in the other process


def _compile(unit: Unit, target: str, folder: Path, disassembled: bool) -> list[Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hip = target.startswith("gfx")
    function = load(unit, folder)
    source = ASTSource(
        fn=function,
        signature={
            name: "constexpr" if name in unit.constants else unit.signature[name]
            for name in function.arg_names
        },
        constexprs=dict(unit.constants),
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(function.arg_names)
            if name in unit.aligned
        },
    )
    gpu = GPUTarget("hip", target, 64) if hip else GPUTarget("cuda", int(target[3:]), 32)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):  # where Triton prints what ptxas says
        out = triton.compile(source, target=gpu, options=dict(unit.options))
    registers, spills = _of_amdgcn(out.asm["amdgcn"]) if hip else _of_ptxas(log.getvalue())
    loops = _loops(out.asm["cubin"], folder) if disassembled else []
    return [registers, spills, out.metadata.shared, loops]


def _loops(cubin: bytes, folder: Path) -> list[int]:
    from triton import knobs

    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    bins = Path(knobs.nvidia.cuobjdump.path).parent
    environ = {**os.environ, "PATH": f"{bins}:{os.environ.get('PATH', '')}"}
    command = [knobs.nvidia.cuobjdump.path, "-sass", path]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    code = {int(at, 16): what for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?) *;", text)}
    jumps = {at: re.search(r"BRA.* 0x([0-9a-f]+)", what) for at, what in code.items()}
    targets = {at: int(found[1], 16) for at, found in jumps.items() if found}
    found = []
    for end, start in sorted(targets.items()):
        if start >= end:
            continue
        skips = [(a, b) for a, b in targets.items() if start <= a < b <= end]
        inside = (at for at in code if start <= at <= end and "NOP" not in code[at])
        found.append(sum(not any(a < at < b for a, b in skips) for at in inside))
    return found


def load(unit: Unit, folder: Path) -> Any:
    """The kernel of a unit, imported from a file in the folder."""
    path = folder / f"{unit.name}.py"
    path.write_text(unit.source)
    spec = importlib.util.spec_from_file_location(unit.name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, unit.name)


def _of_ptxas(log: str) -> tuple[int, int]:
    """Registers, and bytes in local memory: an array there is as slow as a spill."""
    spills = _numbers(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)
    return max(_numbers(r"Used (\d+) registers", log)), max(spills)


def _of_amdgcn(text: str) -> tuple[int, int]:
    spills = [4 * count for count in _numbers(r"\.[sv]gpr_spill_count:\s+(\d+)", text)]
    spills += _numbers(r"\.private_segment_fixed_size:\s+(\d+)", text)
    return max(_numbers(r"\.vgpr_count:\s+(\d+)", text)), max(spills)


def _numbers(pattern: str, text: str) -> list[int]:
    found = [int(number) for number in re.findall(pattern, text)]
    assert found, f"no {pattern} in {text}"
    return found


def _main(target: str, folder: Path, *disassembled: str) -> None:
    from triton import knobs

    knobs.nvidia.dump_ptxas_log = True
    knobs.compilation.always_compile = True  # what comes from a cache leaves no log
    work = {label: Unit(**fields) for label, fields in json.load(sys.stdin).items()}
    # equal units, such as one kernel for two numbers of classes, are compiled once
    texts = {label: repr(unit) for label, unit in work.items()}
    units = {texts[label]: unit for label, unit in work.items()}
    some = bool(disassembled)
    found = {text: _compile(unit, target, folder, some) for text, unit in units.items()}
    print(json.dumps({label: found[text] for label, text in texts.items()}))


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
