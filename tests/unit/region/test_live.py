"""Counted bytes against what the process allocates."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fxpass.region.compile import RowFunction
from fxpass.region.live import row_bytes
from fxpass.region.text import graph_of
from tests.programs.operands import Sizes
from tests.unit.region.programs import CPU, functions

# torch 2.11's, of every profile
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")

N, V = 32, 2048
SIZES = Sizes(b=2, t=N // 2, d=8, v=V)
COMPILED = ("mean", "largest", "divergence", "top-k", "top-p")
NAMES = (*COMPILED, "entropy and argmax", "several labels", "binary", "norms")


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


@pytest.mark.parametrize(
    ("name", "compiled", "way"),
    [
        *((name, True, "eager") for name in COMPILED),
        *((name, False, way) for name in NAMES for way in ("eager", "bf16")),
    ],
)
def test_no_more_is_allocated_than_is_counted(name, compiled, way):
    for function in functions(name, way, SIZES):
        run, tensors = RowFunction(function.graph, CPU, compiled), function.tensors
        run(list(tensors))  # compiles
        heads = sum(t.numel() * t.element_size() for t in tensors[: function.heads])
        real = heads + peak(lambda: run(list(tensors)))  # noqa: B023
        counted = N * row_bytes(function.graph, function.heads, run.compiles)
        assert real <= 1.02 * counted, (real / N / V, counted / N / V)
        loosest = 1.05 if not compiled and name != "top-p" else 3.5
        assert counted <= loosest * real, (real / N / V, counted / N / V)


def test_an_input_is_freed_when_it_was_read():
    """Nobody else has the logits: a chain of operations needs two of them at a time."""
    lines = [f"%{i + 1} = aten.exp.default(%{i})" for i in range(5)]
    lines += ["%6 = aten.amax.default(%5, [1])", "return %6"]
    run = RowFunction(graph_of([f"%0 = input float32[n, {V}]", *lines]), CPU, compiled=False)
    assert peak(lambda: run([torch.zeros(N, V)])) <= 2.02 * N * V * 4
