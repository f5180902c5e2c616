"""Choosing among launch configurations, with Triton's cache.

A driver and a clock of the test's own stand for the GPU's: what they say needs a GPU, what is made
of it does not.
"""

import functools
import importlib.util
import logging
import threading
from collections import Counter
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

    def __call__(self, launch):
        launch()
        self.timed.append(self.launched[-1])
        return self.times[self.launched[-1]]

    def launch(self, candidate):
        assert candidate in CANDIDATES
        self.launched.append(candidate["BLOCK_V"])


class Process:
    """The module as one process has it: it remembers nothing of another one's choices."""

    def __init__(self, clock=None):
        found = importlib.util.find_spec("fxpass.kernels.tuning")
        self.tuning = importlib.util.module_from_spec(found)
        found.loader.exec_module(self.tuning)
        if clock is not None:
            self.tuning.time_of = clock  # which takes the time of launches on a GPU

    def best(self, launch, kernel=COPY, dtype=torch.float32, sizes=(5, 100), candidates=CANDIDATES):
        return self.tuning.best(kernel, CUDA, dtype, sizes, candidates, launch)


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


@pytest.fixture
def clock(machine):
    return Clock(TIMES)


@pytest.fixture
def best(clock):
    return functools.partial(Process(clock).best, clock.launch)


@pytest.fixture
def best_elsewhere(clock):
    """In another process, which has the cache, but not the memory of the first."""
    return functools.partial(Process(clock).best, clock.launch)


def test_the_fastest_is_chosen_and_timed_once(clock, best):
    assert best() == CANDIDATES[1]
    assert clock.timed == [64, 32, 16]
    launched = len(clock.launched)
    assert best() == CANDIDATES[1]
    assert len(clock.launched) == launched


def test_another_process_times_nothing(clock, best, best_elsewhere):
    assert best() == CANDIDATES[1]
    clock.times = {}
    assert best_elsewhere() == CANDIDATES[1]
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
def test_what_a_choice_depends_on(same, changed, in_memory, clock, best, best_elsewhere):
    best()
    (best if in_memory else best_elsewhere)(**changed)
    assert (len(clock.timed) == 3) is same


@pytest.mark.parametrize("change", ["name", "arch", "candidates"])
def test_what_a_written_choice_depends_on(change, clock, machine, best, best_elsewhere):
    """A home directory may be shared by machines, and by versions of fxpass."""
    best()
    if change == "name":
        machine.have(replace(H200, name="NVIDIA H100 PCIe"))
    elif change == "arch":
        machine.have(replace(H200, major=8))
    best_elsewhere(candidates=CANDIDATES[: 2 if change == "candidates" else 3])
    assert len(clock.timed) == (5 if change == "candidates" else 6)


# ---------------------------------------------------------------- when nothing is timed


def test_one_candidate_is_not_timed(clock, best):
    assert best(candidates=CANDIDATES[1:2]) == CANDIDATES[1]
    assert clock.launched == []


def test_the_interpreter_is_not_timed(clock, best, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert best(kernel=triton.jit(copy)) == CANDIDATES[0]
    assert clock.launched == []


def test_deterministic_algorithms_take_the_default(clock, best):
    assert best() == CANDIDATES[1]
    torch.use_deterministic_algorithms(True)
    launched = len(clock.launched)
    assert best() == CANDIDATES[0]
    assert len(clock.launched) == launched


def test_nothing_is_timed_while_a_cuda_graph_is_captured(clock, machine, best, best_elsewhere):
    """Nor is anything read that another process has chosen: that would have to be compiled."""
    machine.capturing = 0
    assert best() == CANDIDATES[0]
    assert clock.launched == []
    machine.capturing = None
    assert best() == CANDIDATES[1]
    launched = len(clock.launched)
    machine.capturing = 0
    assert best() == CANDIDATES[1]
    assert best(sizes=(5000, 100)) == CANDIDATES[0]
    assert best_elsewhere() == CANDIDATES[0]
    assert len(clock.launched) == launched


def test_a_capture_after_stored_times_finds_the_default_loaded(
    clock, machine, best, best_elsewhere
):
    """With other sizes it takes the default, which nothing has launched in this process."""
    best()
    clock.launched.clear()
    assert best_elsewhere() == CANDIDATES[1]
    assert 64 in clock.launched
    loaded = set(clock.launched)
    machine.capturing = 0
    assert best_elsewhere(sizes=(5000, 100))["BLOCK_V"] in loaded


def test_a_default_that_does_not_run_may_stay_unloaded(stream):
    stream.errors = {64: RuntimeError("PassManager::run failed")}
    assert Process().best(stream.launch) == CANDIDATES[2]
    assert Process().best(stream.launch) == CANDIDATES[2]


# ---------------------------------------------------------------- what goes wrong


class Stream:
    """A GPU's stream: a launch of a candidate takes as many ms as it has classes in a block, or
    raises its error; events tell the time."""

    def __init__(self, monkeypatch, errors=None):
        self.now, self.launched, self.errors = 0.0, [], errors or {}
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self.event())

    def event(self):
        event = SimpleNamespace(synchronize=lambda: None)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def launch(self, candidate):
        self.launched.append(candidate["BLOCK_V"])
        if error := self.errors.get(candidate["BLOCK_V"]):
            raise error
        self.now += candidate["BLOCK_V"] * self.ms_a_class

    ms_a_class = 1 / 64

    def launches(self):
        """The number of launches of each candidate."""
        return dict(Counter(self.launched))


@pytest.fixture
def stream(machine, monkeypatch):
    return Stream(monkeypatch)


def test_a_time_is_the_median_of_rounds(monkeypatch):
    stream, times = Stream(monkeypatch), iter([1.0, 4.0, *[1.0] * 4, *[100.0] * 4, *[2.0] * 12])

    def launch():
        stream.now += next(times)

    assert tuning.time_of(launch) == 2.0
    assert next(times, None) is None


@pytest.mark.parametrize("ms_a_class", [0.5, 10.0, 100.0])
def test_a_slow_candidate_is_launched_twice(ms_a_class, stream):
    """One launch compiles it, one is timed."""
    stream.ms_a_class = ms_a_class  # 8 ms and more
    assert Process().best(stream.launch) == CANDIDATES[2]
    assert stream.launches() == {64: 2, 32: 2, 16: 2}


@pytest.mark.parametrize("ms_a_class", [1e-4, 0.01, 0.1, 1.0, 10.0])
def test_the_time_of_tuning_is_bounded(ms_a_class, stream):
    stream.ms_a_class = ms_a_class
    many = tuple({**CANDIDATES[0], "num_warps": 1 << warps} for warps in range(5))
    assert Process().best(stream.launch, candidates=many) in many
    launch = 64 * ms_a_class
    assert stream.now <= 5 * (100 + 2 * launch)
    assert len(stream.launched) <= 5 * 22


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA: out of memory")]
)
@pytest.mark.parametrize("short", [64, 32, 16])
def test_a_candidate_without_memory_is_timed_by_the_next_process(short, error, stream):
    stream.errors = {short: error}
    without = Process()
    fastest = min(c["BLOCK_V"] for c in CANDIDATES if c["BLOCK_V"] != short)
    assert without.best(stream.launch)["BLOCK_V"] == fastest
    launched = len(stream.launched)
    assert without.best(stream.launch)["BLOCK_V"] == fastest
    assert len(stream.launched) == launched  # this process does not try again at every step
    stream.errors = {}
    assert Process().best(stream.launch) == CANDIDATES[2]


@pytest.mark.parametrize("failing", [[64], [32], [64, 16]])
def test_a_candidate_that_fails_is_not_taken(failing, stream, caplog):
    stream.errors = dict.fromkeys(failing, RuntimeError("PassManager::run failed"))
    with caplog.at_level(logging.DEBUG, tuning.__name__):
        choice = Process().best(stream.launch)
    assert choice == [c for c in CANDIDATES if c["BLOCK_V"] not in failing][-1]
    assert len(caplog.records) == len(failing)
    assert "PassManager::run failed" in caplog.text


def test_where_every_candidate_fails_the_defaults_error_is_raised(machine):
    def launch(candidate):
        raise MemoryError(candidate["BLOCK_V"])

    with pytest.raises(MemoryError, match="64"):
        Process().best(launch)


def test_where_no_candidate_has_memory_nothing_is_remembered(stream):
    stream.errors = dict.fromkeys(TIMES, torch.OutOfMemoryError("CUDA out of memory."))
    process = Process()
    with pytest.raises(torch.OutOfMemoryError):
        process.best(stream.launch)
    stream.errors = {}
    assert process.best(stream.launch) == CANDIDATES[2]


def test_threads_time_once(clock, best):
    """Autograd has a thread for each device."""
    choices = []
    start = threading.Barrier(8)

    def run():
        start.wait()
        choices.append(best())

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert choices == [CANDIDATES[1]] * 8
    assert clock.timed == [64, 32, 16]


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
        with caplog.at_level(logging.DEBUG, tuning.__name__):
            return Process().best(launch, sizes=(64,))

    choice = choose()
    assert choice in CANDIDATES
    assert set(launched) == {64, 32, 16}
    assert torch.equal(out, x)
    assert caplog.text == ""
    launched.clear()
    assert choose() == choice
    assert set(launched) == {64}  # the default, for captures
