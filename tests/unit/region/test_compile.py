"""Compiling: once, for any number of rows, in any surroundings, or not at all."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch._dynamo.utils import counters

from fxpass.region import compile as compile_module
from fxpass.region.compile import functions, interpreted, warm
from tests.unit.region.programs import PROGRAMS

CPU = torch.device("cpu")
NAMES = ("max", "softmax")


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    """As in a new process; Inductor's cache on the disk stays."""
    monkeypatch.setattr(compile_module, "_known", {})
    monkeypatch.setattr(compile_module, "_warned", set())


def compiles() -> int:
    return sum(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))


def agree(name: str = "softmax", n: int = 5, change=lambda t: t) -> None:
    text, tensors = PROGRAMS[name].region().text(), PROGRAMS[name].tensors(n, torch.float32)
    expected = interpreted(text, CPU).forward(list(tensors))
    found = functions(text, CPU).forward([change(t) for t in tensors])
    torch.testing.assert_close(found, expected)


def test_any_number_of_rows_without_compiling_again():
    before = compiles()
    for n in (5, 1, 0, 2, 300):
        agree(n=n)
    assert compiles() == before + 1


def test_warm_compiles_what_runs():
    region = PROGRAMS["softmax"].region()
    before = compiles()
    warm(region.text(), CPU)
    assert compiles() == before + 2  # forward and backward
    agree()
    assert compiles() == before + 2


@pytest.mark.parametrize("total", [False, True])
def test_warm_of_a_region_without_gradients_or_with_a_total(total):
    program = PROGRAMS["softmax" if total else "frozen"]
    before = compiles()
    warm(program.region(total=total).text(), CPU)
    assert compiles() == before + 1


def test_operands_of_other_strides():
    agree(change=lambda t: t.t().contiguous().t())
    agree(change=lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape))


def test_an_interpreted_region_is_not_compiled():
    region = PROGRAMS["softmax"].region(compiled=False)
    before = compiles()
    warm(region.text(), CPU)
    functions(region.text(), CPU).forward([torch.randn(3, 37)])
    assert compiles() == before


def test_modes_around_change_nothing():
    inside = torch.randn(4)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        agree()
    agree()
    with torch.no_grad(), torch._subclasses.FakeTensorMode():
        warm(PROGRAMS["max"].region().text(), CPU)
    agree("max")
    assert not inside.requires_grad


def test_warm_within_a_backend_of_dynamo():
    text = PROGRAMS["max"].region().text()

    def backend(module, inputs):
        warm(text, CPU)
        return torch._inductor.compile(module, inputs)

    x = torch.randn(5, 37)
    compiled = torch.compile(
        lambda x: x.sin().sum(1) + functions_of(x), backend=backend, dynamic=True
    )
    functions_of = torch.compiler.disable(lambda x: functions(text, CPU).forward([x.clone()])[0])
    torch.testing.assert_close(compiled(x), x.sin().sum(1) + x.amax(1))


def test_threads_compile_once():
    before, errors = compiles(), []

    def work():
        try:
            agree()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert compiles() == before + 1


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_have_their_own_code(deterministic):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        agree("several labels")
    finally:
        torch.use_deterministic_algorithms(before)


def test_what_inductor_cannot_compile_is_interpreted(monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    with caplog.at_level(logging.WARNING, "fxpass"):
        agree("softmax")
        agree("max")
    (record,) = caplog.records
    assert "is interpreted instead" in record.getMessage()
    assert "no compiler" in record.getMessage()


CHILD = """
import sys
import torch
from torch._dynamo.utils import counters
from fxpass.region.compile import warm
torch.use_deterministic_algorithms(True)  # as conftest.py sets these
torch.set_num_threads(int(sys.argv[1]))
from tests.unit.region.programs import PROGRAMS
text = PROGRAMS["softmax"].region().text()
warm(text, torch.device("cpu"))
print(counters["inductor"]["fxgraph_cache_hit"])
"""


def test_another_process_finds_what_was_compiled():
    assert torch.are_deterministic_algorithms_enabled()
    warm(PROGRAMS["softmax"].region().text(), CPU)
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2"


FORKS = """
import os
import torch
from fxpass.region.compile import functions
from tests.unit.region.programs import PROGRAMS
torch.set_num_threads(1)
# traced before: autograd does not outlive a fork either, if torch has CUDA
texts = {name: PROGRAMS[name].region().text() for name in ("softmax", "max")}
def run(name):
    return functions(texts[name], torch.device("cpu")).forward([torch.randn(5, 37)])[0].shape
run("softmax")
if not (child := os.fork()):
    run("softmax"), run("max")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_fork_compiles():
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    subprocess.run(command, check=True, timeout=300)
