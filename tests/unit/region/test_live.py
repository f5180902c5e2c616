"""Counted bytes against what the process allocates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fxpass.region.compile import functions, interpreted
from tests.unit.region import programs
from tests.unit.region.programs import PROGRAMS

# torch 2.11's, of every profile
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")

CPU = torch.device("cpu")
N, V = 32, 2048
NAMES = (
    *("cross entropy", "entropy and argmax", "max", "jsd of two heads"),
    *("several labels", "top-k", "mean", "binary", "sort"),
)
QUICK = ("cross entropy", "max")
COMPILED = (*QUICK, "jsd of two heads", "top-k", "sort")


def wider(program):
    """The program with V classes instead of 37."""
    wide = lambda shape: tuple(V if s == programs.V else s for s in shape)  # noqa: E731
    rows, shared = (tuple(map(wide, of)) for of in (program.rows, program.shared))
    return replace(program, heads=wide(program.heads), rows=rows, shared=shared)


def peak(run) -> int:
    """The most bytes that ``run`` has allocated at a time, kernels' own scratch too."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        _ = run()
    result = profiled.profiler
    assert result is not None
    events = [e for e in result.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


def calls(program, dtype, total, make):
    """The functions of a region with real inputs: name, function, list of tensors."""
    region = program.region(dtype, total)
    made = make(region.text(), CPU)
    tensors = program.tensors(N, dtype)
    of_tangents = [made.parts.outputs[k] for k in region.tangents]
    tangents = [torch.randn(N, *o.shape[1:]).to(o.dtype) for o in of_tangents]
    if total:
        yield "both", made, [*tensors, *tangents]
        return
    yield "forward", made, tensors
    saved = made.forward(list(tensors))[region.outputs :]
    yield "backward", made, [*tensors, *saved, *tangents]


@pytest.mark.parametrize(
    ("name", "make", "dtype"),
    [
        *((name, functions, torch.float32) for name in COMPILED),
        *((name, interpreted, torch.float32) for name in NAMES),
        *((name, interpreted, torch.bfloat16) for name in NAMES),
    ],
)
def test_no_more_is_allocated_than_is_counted(name, make, dtype, monkeypatch):
    monkeypatch.setattr(programs, "V", V)  # class indices and one-hot vectors
    program = wider(replace(PROGRAMS[name])) if name != "binary" else PROGRAMS[name]
    program = replace(program, heads=(V,) * len(program.heads))
    for total in (False, True) if name in QUICK else (False,):
        for which, made, tensors in calls(program, dtype, total, make):
            run = getattr(made, which)
            run(list(tensors))  # compiles
            heads = sum(t.numel() * t.element_size() for t in tensors[: len(program.heads)])
            real = heads + peak(lambda: run(list(tensors)))  # noqa: B023
            counted = N * made.row_bytes(which)
            assert real <= 1.02 * counted, (which, total, real / N / V, counted / N / V)
            loosest = 1.05 if make is interpreted and name != "sort" else 3.5
            assert counted <= loosest * real, (which, total, real / N / V, counted / N / V)


def test_an_input_is_freed_when_it_was_read():
    """Nobody else has the logits: a chain of operations needs two of them at a time."""
    text = "\n".join(
        [
            "row_region heads=2 rows=0 shared=0 trained= outputs=1 tangents= total=0 "
            "memory_mb=0 compiled=0",
            f"%0 = input float32[n, {V}]",
            *(f"%{i + 1} = aten.exp.default(%{i})" for i in range(5)),
            "%6 = aten.amax.default(%5, [1])",
            "return %6",
        ]
    )
    run = interpreted(text, CPU).forward
    real = peak(lambda: run([torch.zeros(N, V)]))
    assert real <= 2.02 * N * V * 4
