"""Choosing among launch configurations: the choice is one of the candidates, and is kept.

What is timed here is what a launch of the test takes, in a table in place of a GPU.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fxpass.kernels import tuning
from tests.support.gpus import H200

CUDA = torch.device("cuda", 0)
CANDIDATES = tuple({"BLOCK_V": size, "num_warps": 2} for size in (64, 32, 16))
MS = {64: 3.0, 32: 1.0, 16: 2.0}


def copy(x, out, BLOCK_V: tl.constexpr):
    i = tl.arange(0, BLOCK_V)
    tl.store(out + i, tl.load(x + i))


def double(x, out, BLOCK_V: tl.constexpr):
    i = tl.arange(0, BLOCK_V)
    tl.store(out + i, 2 * tl.load(x + i))


# not triton.jit, which returns what the interpreter runs where there is no GPU
COPY, DOUBLE = triton.JITFunction(copy), triton.JITFunction(double)


class Process:
    """The module as one process has it, which remembers nothing of another one's choices; and what
    it launched."""

    def __init__(self, ms=MS, errors=None):
        found = importlib.util.find_spec("fxpass.kernels.tuning")
        self.tuning = importlib.util.module_from_spec(found)
        found.loader.exec_module(self.tuning)
        self.tuning.time_of = self.time_of
        self.launched, self.ms, self.errors = [], ms, errors or {}

    def time_of(self, launch):
        launch()
        return self.ms[self.launched[-1]]

    def launch(self, candidate):
        self.launched.append(candidate["BLOCK_V"])
        if error := self.errors.get(candidate["BLOCK_V"]):
            raise error

    def best(self, kernel=COPY, dtype=torch.float32, sizes=(5, 100), candidates=CANDIDATES):
        """The block that is chosen."""
        chosen = self.tuning.best(kernel, CUDA, dtype, sizes, candidates, self.launch)
        assert chosen in candidates
        return chosen["BLOCK_V"]


@pytest.fixture
def machine(tmp_path, monkeypatch, gpus):
    """A GPU, as far as it is asked before anything is launched, and an empty cache."""
    gpus.have(H200)

    def target():
        card = gpus.cards[gpus.current]
        return GPUTarget("cuda", 10 * card.major + card.minor, 32)

    # not set_active(): to reset that, Triton would look for a GPU
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=target))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    torch.use_deterministic_algorithms(False)
    return gpus


def test_the_fastest_is_chosen_and_kept(machine):
    """By this process, and by others, which launch the default alone: captures take it for other
    sizes."""
    process, other = Process(), Process()
    assert [process.best() for _ in range(2)] == [32, 32]
    assert process.launched == [64, 32, 16]
    assert [other.best() for _ in range(2)] == [32, 32]
    assert other.launched == [64]
    assert Process(errors={64: RuntimeError("the default does not run")}).best() == 32


@pytest.mark.parametrize(
    ("again", "changed"),
    [
        (False, {"sizes": (8, 65)}),  # the same powers of two
        (True, {"sizes": (9, 100)}),
        (True, {"sizes": (5, 64)}),
        (True, {"kernel": DOUBLE}),
        (True, {"dtype": torch.float16}),
        (True, {"candidates": CANDIDATES[:2]}),
    ],
)
def test_what_a_choice_depends_on(again, changed, machine):
    process, other = Process(), Process()
    process.best()
    del process.launched[:]
    process.best(**changed)
    other.best(**changed)
    assert bool(process.launched) == again
    # what is timed again was stored by the first
    assert other.launched == [64]


@pytest.mark.parametrize("card", [replace(H200, name="NVIDIA H100 PCIe"), replace(H200, major=8)])
def test_what_a_written_choice_depends_on(card, machine):
    """A home directory may be shared by machines."""
    Process().best()
    machine.have(card)
    other = Process({64: 1.0, 32: 2.0, 16: 3.0})
    assert other.best() == 64
    assert other.launched == [64, 32, 16]


@pytest.mark.parametrize("why", ["one candidate", "interpreter", "deterministic", "capture"])
def test_when_nothing_is_timed(why, machine, monkeypatch):
    """The default is taken; while a CUDA graph is captured also what was chosen before."""
    process, kernel, candidates = Process(), COPY, CANDIDATES
    if why == "one candidate":
        candidates = CANDIDATES[:1]
    if why == "interpreter":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        kernel = triton.jit(copy)
    torch.use_deterministic_algorithms(why == "deterministic")
    machine.capturing = 0 if why == "capture" else None
    assert process.best(kernel, candidates=candidates) == 64
    assert process.launched == []
    if why == "capture":
        machine.capturing = None
        assert process.best() == 32
        machine.capturing = 0
        assert [process.best(), process.best(sizes=(5000, 100))] == [32, 64]
        assert process.launched == [64, 32, 16]


@pytest.mark.parametrize("failing", [[64], [32], [64, 16]])
def test_a_candidate_that_fails_is_not_taken(failing, machine, caplog):
    errors = dict.fromkeys(failing, RuntimeError("PassManager::run failed"))
    with caplog.at_level(logging.DEBUG, tuning.__name__):
        chosen = Process(errors=errors).best()
    assert MS[chosen] == min(ms for size, ms in MS.items() if size not in failing)
    assert caplog.text.count("PassManager::run failed") == len(failing)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError("no")]
)
def test_where_every_candidate_fails_the_defaults_error_is_raised(error, machine):
    process = Process(errors=dict.fromkeys(MS, error))
    with pytest.raises(type(error)):
        process.best()
    process.errors = {}
    assert process.best() == 32


def test_a_candidate_without_memory_is_timed_by_the_next_process(machine):
    process = Process(errors={32: torch.OutOfMemoryError("CUDA out of memory.")})
    assert [process.best() for _ in range(2)] == [16, 16]
    assert process.launched == [64, 32, 16]  # this process does not try again at every step
    assert Process().best() == 32


@pytest.mark.only_gpu
def test_a_gpu_chooses_and_remembers(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    torch.use_deterministic_algorithms(False)
    x, out = torch.randn(64, device="cuda"), torch.zeros(64, device="cuda")
    launched = []

    def launch(candidate):
        launched.append(candidate["BLOCK_V"])
        COPY[(1,)](x, out, **candidate)

    def choose():
        process = Process()
        process.tuning.time_of = tuning.time_of
        with caplog.at_level(logging.DEBUG, tuning.__name__):
            return process.tuning.best(COPY, CUDA, torch.float32, (64,), CANDIDATES, launch)

    choice = choose()
    assert choice in CANDIDATES
    assert set(launched) == {64, 32, 16}
    assert len(launched) > 6  # each in several rounds
    assert torch.equal(out, x)
    assert caplog.text == ""
    launched.clear()
    assert choose() == choice
    assert set(launched) == {64}  # the default, for captures
