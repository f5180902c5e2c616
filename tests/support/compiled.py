"""Kernels taken to machine code for GPUs that need not be there, and what they take of them.

In: :class:`Unit`, a kernel's source with the types and options of one launch. Out:
:class:`Resources` for each target, read from what the assemblers say::

    units = {"a kernel": Unit(source, "kernel", {"x": "*bf16", "N": "i32"}, {"BLOCK": 64})}
    assert_fits(resources(units, "sm_90"), units, "sm_90")

Triton brings its assemblers along. They run in a process of their own, without TRITON_INTERPRET:
that variable decides at import what ``triton.jit`` makes of a function.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
SHARED = {"sm_75": 65536, "sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
TARGETS = tuple(SHARED)
# of a multiprocessor; a thread with more than MOST_REGISTERS leaves none for others
REGISTERS = dict.fromkeys(TARGETS, 65536) | {"gfx942": 4 * 512 * 64}
MOST_REGISTERS = 128


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


def assert_fits(found: Mapping[str, Resources], units: Mapping[str, Unit], target: str) -> None:
    """Nothing spills; a multiprocessor has registers for the block, of which no thread has more than
    :data:`MOST_REGISTERS`, and shared memory for two.

    Raises:
        AssertionError: what takes more, and how much.
    """
    for label, one in found.items():
        assert not one.spills, f"{target} spills: {label}: {one}"
        assert one.shared <= SHARED[target] // 2, f"{target}, shared memory: {label}: {one}"
        threads = units[label].options["num_warps"] * (64 if target.startswith("gfx") else 32)
        most = min(MOST_REGISTERS, REGISTERS[target] // threads)
        assert one.registers <= most, f"{target} has {most} registers for {label}: {one}"


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
