"""Choosing among launch configurations; a clock of the test's own stands for the GPU's."""

import json
import logging
import os
import stat
import subprocess
import sys
import threading

import pytest
import torch

from fxpass.kernels import tuning

CPU = torch.device("cpu")
CANDIDATES = ({"BLOCK_V": 64, "num_warps": 4}, {"BLOCK_V": 32, "num_warps": 2}, {"BLOCK_V": 16})
TIMES = {64: 3.0, 32: 1.0, 16: 2.0}


@pytest.fixture(autouse=True)
def _nothing_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_chosen", {})
    monkeypatch.setattr(tuning, "_latest", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.use_deterministic_algorithms(False)


class Clock:
    """Launches once and answers from a table; remembers what was launched."""

    def __init__(self, times):
        self.times, self.launched = times, []

    def __call__(self, launch):
        launch()
        return self.times[self.launched[-1]]

    def launch(self, candidate):
        self.launched.append(candidate["BLOCK_V"])


def best(clock, kernel="k", dtype=torch.float32, sizes=(5, 100), candidates=CANDIDATES, device=CPU):
    return tuning.best(kernel, device, dtype, sizes, candidates, clock.launch, clock)


def forget():
    tuning._chosen.clear()
    tuning._latest.clear()


def files():
    return sorted(tuning.directory().iterdir()) if tuning.directory().exists() else []


def test_the_fastest_is_chosen_and_timed_once():
    clock = Clock(TIMES)
    assert best(clock) == {"BLOCK_V": 32, "num_warps": 2}
    assert clock.launched == [64, 32, 16]
    assert best(clock) is CANDIDATES[1]
    forget()
    assert best(clock) is CANDIDATES[1]
    assert len(clock.launched) == 3


def test_what_is_hardly_faster_does_not_replace_the_default():
    assert best(Clock({64: 1.0, 32: 0.98, 16: 2.0})) is CANDIDATES[0]
    assert best(Clock({64: 1.0, 32: 0.9, 16: 2.0}), kernel="other") is CANDIDATES[1]


def test_another_process_times_nothing():
    """Nor does it launch anything: its clock and its launch would raise."""
    assert best(Clock(TIMES)) is CANDIDATES[1]
    code = (
        "import torch; from fxpass.kernels import tuning\n"
        f"arguments = 'k', torch.device('cpu'), torch.float32, (5, 100), {CANDIDATES}\n"
        "print(tuning.best(*arguments, launch=None, clock=lambda launch: 1 / 0))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout == "{'BLOCK_V': 32, 'num_warps': 2}\n"


@pytest.mark.parametrize(
    ("same", "changed"),
    [
        (True, {"sizes": (8, 65)}),  # the same powers of two
        (False, {"sizes": (9, 100)}),
        (False, {"sizes": (5, 64)}),
        (False, {"kernel": "other"}),
        (False, {"dtype": torch.float16}),
        (False, {"candidates": CANDIDATES[:2]}),
    ],
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_what_a_choice_depends_on(same, changed, in_memory):
    clock = Clock(TIMES)
    best(clock)
    if not in_memory:
        forget()
    best(clock, **changed)
    assert (len(clock.launched) == 3) is same


@pytest.mark.parametrize("fact", ["triton", "device", "arch"])
def test_what_a_written_choice_depends_on(fact, monkeypatch):
    clock = Clock(TIMES)
    best(clock)
    forget()
    facts = tuning._facts(CPU)
    monkeypatch.setattr(tuning, "_facts", lambda device: {**facts, fact: "another"})
    best(clock)
    assert len(clock.launched) == 6
    assert len(files()) == 2


# ---------------------------------------------------------------- when nothing is timed


def test_one_candidate_is_not_timed():
    assert best(Clock({}), candidates=CANDIDATES[:1]) is CANDIDATES[0]


def test_only_gpus_have_a_clock():
    launched = []
    arguments = ("k", CPU, torch.float32, (5,), CANDIDATES, launched.append)
    assert tuning.best(*arguments) is CANDIDATES[0]
    assert launched == files() == []
    assert tuning._clock_of(torch.device("cuda")) is tuning._gpu_clock


def test_deterministic_algorithms_take_the_default():
    assert best(Clock(TIMES)) is CANDIDATES[1]
    torch.use_deterministic_algorithms(True)
    assert best(Clock({})) is CANDIDATES[0]


def test_nothing_is_timed_while_a_cuda_graph_is_recorded(monkeypatch):
    """Nor is anything read that another process has chosen: it would have to be compiled."""
    capturing = True
    device = torch.device("cuda", 0)
    monkeypatch.setattr(tuning, "_facts", lambda device: {"device": "a GPU"})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    clock = Clock(TIMES)
    assert best(clock, device=device) is CANDIDATES[0]
    assert clock.launched == files() == []
    capturing = False
    assert best(clock, device=device) is CANDIDATES[1]
    assert len(clock.launched) == 3
    capturing = True
    assert best(clock, device=device) is CANDIDATES[1]
    # other sizes: what has run is there, the default may not be
    assert best(clock, device=device, sizes=(5000, 100)) is CANDIDATES[1]
    assert best(clock, device=device, kernel="other") is CANDIDATES[0]
    forget()
    assert best(clock, device=device) is CANDIDATES[0]
    assert len(clock.launched) == 3


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("failing", [[64], [32], [64, 16]])
def test_a_candidate_that_fails_is_not_taken(failing, caplog):
    clock = Clock(TIMES)

    def launch(candidate):
        clock.launch(candidate)
        if candidate["BLOCK_V"] in failing:
            raise RuntimeError("out of resource: shared memory")

    with caplog.at_level(logging.DEBUG, tuning.__name__):
        choice = tuning.best("k", CPU, torch.float32, (5,), CANDIDATES, launch, clock)
    working = {block: time for block, time in TIMES.items() if block not in failing}
    assert choice["BLOCK_V"] == min(working, key=working.get)
    failures = [record.message for record in caplog.records if record.levelno == logging.DEBUG]
    assert len(failures) == len(failing)
    assert all("out of resource: shared memory" in message for message in failures)


def test_the_default_where_every_candidate_fails():
    """And nothing is kept: what failed for want of memory may run the next time."""
    assert best(Clock({})) is CANDIDATES[0]
    assert files() == []
    assert best(Clock(TIMES)) is CANDIDATES[1]


def damaged(text):
    return text[: len(text) // 2]


def of_another_kernel(text):
    return text.replace('"k"', '"another"')


def beyond_the_candidates(text):
    return json.dumps({**json.loads(text), "choice": 7})


def not_a_number(text):
    return json.dumps({**json.loads(text), "choice": True})


def a_list(text):
    return f"[{text}]"


def binary(text):
    return b"\xff\xfe"


@pytest.mark.parametrize(
    "change", [damaged, of_another_kernel, beyond_the_candidates, not_a_number, a_list, binary]
)
def test_a_file_that_is_no_choice_is_made_again(change):
    best(Clock(TIMES))
    (file,) = files()
    text = file.read_text()
    wrong = change(text)
    file.write_bytes(wrong if isinstance(wrong, bytes) else wrong.encode())
    forget()
    clock = Clock(TIMES)
    assert best(clock) is CANDIDATES[1]
    assert len(clock.launched) == 3
    assert file.read_text() == text
    assert files() == [file]


def test_the_file_is_private_and_says_what_was_timed():
    best(Clock(TIMES))
    (file,) = files()
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(file.parent).st_mode) == 0o700
    written = json.loads(file.read_text())
    assert written["choice"] == 1
    assert written["milliseconds"] == [3.0, 1.0, 2.0]
    assert (written["kernel"], written["dtype"], written["sizes"]) == ("k", "float32", [8, 128])


def test_a_directory_that_cannot_be_written():
    tuning.directory().write_text("a file in its place")
    clock = Clock(TIMES)
    assert best(clock) is best(clock) is CANDIDATES[1]
    assert len(clock.launched) == 3


# ---------------------------------------------------------------- several at once


def test_the_first_process_decides(monkeypatch):
    """Another one writes while this one times: both go on with what was written."""

    class Interrupted(Clock):
        def __call__(self, launch):
            if not self.launched:
                with monkeypatch.context() as patch:  # another process has a lock of its own
                    patch.setattr(tuning, "_one_at_a_time", threading.Lock())
                    assert best(Clock({64: 3.0, 32: 2.0, 16: 1.0})) is CANDIDATES[2]
                forget()
            return super().__call__(launch)

    clock = Interrupted(TIMES)
    assert best(clock) is CANDIDATES[2]
    assert clock.launched == [64, 32, 16]
    assert len(files()) == 1


def test_threads_time_once():
    clock, choices = Clock(TIMES), []
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
    assert clock.launched == [64, 32, 16]
