"""Choosing among launch configurations with Triton's own autotuner and cache.

A driver and a clock of the test's own stand for the GPU's: what they say needs a GPU, what is made
of it does not.
"""

import logging
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from fxpass.kernels import tuning

CUDA = torch.device("cuda", 0)
CANDIDATES = (
    {"BLOCK_V": 64, "num_warps": 4, "num_stages": 2},
    {"BLOCK_V": 32, "num_warps": 2, "num_stages": 3},
    {"BLOCK_V": 16, "num_warps": 2, "num_stages": 3},
)
TIMES = {64: 3.0, 32: 1.0, 16: 2.0}


def copy(x, out, BLOCK_V: tl.constexpr):
    i = tl.arange(0, BLOCK_V)
    tl.store(out + i, tl.load(x + i))


def double(x, out, BLOCK_V: tl.constexpr):
    i = tl.arange(0, BLOCK_V)
    tl.store(out + i, 2 * tl.load(x + i))


# not triton.jit, which returns what the interpreter runs where there is no GPU
COPY, DOUBLE = triton.JITFunction(copy), triton.JITFunction(double)


class Clock:
    """Launches once and answers from a table; remembers what was launched."""

    def __init__(self, times):
        self.times, self.launched, self.timed = times, [], []

    def __call__(self, launch, quantiles):
        launch()
        self.timed.append(self.launched[-1])
        return self.times[self.launched[-1]]

    def launch(self, candidate):
        assert candidate in CANDIDATES
        self.launched.append(candidate["BLOCK_V"])


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A GPU, as far as it is asked before anything is launched, and an empty cache."""
    described = SimpleNamespace(name="NVIDIA H200", arch=90, capturing=False)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", described.arch, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: described.name)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: described.capturing)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(tuning, "_chosen", {})
    torch.use_deterministic_algorithms(False)
    return described


@pytest.fixture
def clock(machine, monkeypatch):
    clock = Clock(TIMES)
    monkeypatch.setattr(tuning, "milliseconds", clock)
    return clock


def best(clock, kernel=COPY, dtype=torch.float32, sizes=(5, 100), candidates=CANDIDATES):
    return tuning.best(kernel, CUDA, dtype, sizes, candidates, clock.launch)


def another_process():
    """As a process that has the cache, but not the memory of this one."""
    tuning._chosen.clear()


def test_the_fastest_is_chosen_and_timed_once(clock):
    assert best(clock) == CANDIDATES[1]
    assert clock.timed == [64, 32, 16]
    launched = len(clock.launched)
    assert best(clock) == CANDIDATES[1]
    assert len(clock.launched) == launched


def test_another_process_times_nothing(clock):
    assert best(clock) == CANDIDATES[1]
    another_process()
    clock.times = {}
    assert best(clock) == CANDIDATES[1]
    assert len(clock.timed) == 3


@pytest.mark.parametrize(
    ("same", "changed"),
    [
        (True, {"sizes": (8, 65)}),  # the same powers of two
        (False, {"sizes": (9, 100)}),
        (False, {"sizes": (5, 64)}),
        (False, {"kernel": DOUBLE}),
        (False, {"dtype": torch.float16}),
    ],
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_what_a_choice_depends_on(same, changed, in_memory, clock):
    best(clock)
    if not in_memory:
        another_process()
    best(clock, **changed)
    assert (len(clock.timed) == 3) is same


@pytest.mark.parametrize("change", ["name", "arch", "candidates"])
def test_what_a_written_choice_depends_on(change, clock, machine):
    """A home directory may be shared by machines, and by versions of fxpass."""
    best(clock)
    another_process()
    if change == "name":
        machine.name = "NVIDIA H100 PCIe"
    elif change == "arch":
        machine.arch = 80
    best(clock, candidates=CANDIDATES[: 2 if change == "candidates" else 3])
    assert len(clock.timed) == (5 if change == "candidates" else 6)


# ---------------------------------------------------------------- when nothing is timed


def test_one_candidate_is_not_timed(clock):
    assert best(clock, candidates=CANDIDATES[1:2]) == CANDIDATES[1]
    assert clock.launched == []


def test_the_interpreter_is_not_timed(clock, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert best(clock, kernel=triton.jit(copy)) == CANDIDATES[0]
    assert clock.launched == []


def test_deterministic_algorithms_take_the_default(clock):
    assert best(clock) == CANDIDATES[1]
    torch.use_deterministic_algorithms(True)
    launched = len(clock.launched)
    assert best(clock) == CANDIDATES[0]
    assert len(clock.launched) == launched


def test_nothing_is_timed_while_a_cuda_graph_is_captured(clock, machine):
    """Nor is anything read that another process has chosen: that would have to be compiled."""
    machine.capturing = True
    assert best(clock) == CANDIDATES[0]
    assert clock.launched == []
    machine.capturing = False
    assert best(clock) == CANDIDATES[1]
    launched = len(clock.launched)
    machine.capturing = True
    assert best(clock) == CANDIDATES[1]
    assert best(clock, sizes=(5000, 100)) == CANDIDATES[0]
    another_process()
    assert best(clock) == CANDIDATES[0]
    assert len(clock.launched) == launched


# ---------------------------------------------------------------- what goes wrong


def events(monkeypatch, times):
    """Events of a stream on which ``times`` ms pass from one to the next."""
    times = iter(times)
    event = SimpleNamespace(
        record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: next(times)
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)


def test_a_time_is_the_median_of_rounds(monkeypatch):
    launches = []
    events(monkeypatch, [4.0, 400.0, 8.0, 12.0, 4.0])
    assert tuning.milliseconds(lambda: launches.append(1)) == 2.0
    assert len(launches) == 1 + 5 * 4


@pytest.mark.parametrize("failing", [[64], [32], [64, 16]])
def test_a_candidate_that_fails_is_not_taken(failing, machine, monkeypatch, caplog):
    events(monkeypatch, [1.0] * 100)

    def launch(candidate):
        if candidate["BLOCK_V"] in failing:
            raise RuntimeError("PassManager::run failed")

    with caplog.at_level(logging.DEBUG, tuning.__name__):
        choice = tuning.best(COPY, CUDA, torch.float32, (5,), CANDIDATES, launch)
    assert choice == next(c for c in CANDIDATES if c["BLOCK_V"] not in failing)
    assert len(caplog.records) == len(failing)
    assert "PassManager::run failed" in caplog.text


def test_where_every_candidate_fails_the_defaults_error_is_raised(machine):
    def launch(candidate):
        raise MemoryError(candidate["BLOCK_V"])

    with pytest.raises(MemoryError, match="64"):
        tuning.best(COPY, CUDA, torch.float32, (5,), CANDIDATES, launch)


def test_threads_time_once(clock):
    """Autograd has a thread for each device, and Triton's autotuner keeps its arguments in itself."""
    choices = []
    start = threading.Barrier(8)

    def run():
        start.wait()
        choices.append(best(clock))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert choices == [CANDIDATES[1]] * 8
    assert clock.timed == [64, 32, 16]


@pytest.mark.gpu
def test_a_gpu_chooses_and_remembers(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning, "_chosen", {})
    torch.use_deterministic_algorithms(False)
    x, out = torch.randn(64, device="cuda"), torch.zeros(64, device="cuda")
    launched = []

    def launch(candidate):
        launched.append(candidate["BLOCK_V"])
        COPY[(1,)](x, out, **candidate)

    def choose():
        with caplog.at_level(logging.DEBUG, tuning.__name__):
            return tuning.best(COPY, x.device, x.dtype, (64,), CANDIDATES, launch)

    choice = choose()
    assert choice in CANDIDATES
    assert set(launched) == {64, 32, 16}
    assert torch.equal(out, x)
    assert caplog.text == ""
    another_process()
    launched.clear()
    assert choose() == choice
    assert launched == [choice["BLOCK_V"]]
