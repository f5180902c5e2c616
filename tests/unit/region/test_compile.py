"""Compiling: once, for any number of rows, in any surroundings, or not at all."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

import torch
from torch._dynamo.utils import counters

from fxpass.op.rows import rows
from fxpass.region import compile as compile_module
from fxpass.region.compile import RowFunction
from fxpass.region.text import graph_of

CPU = torch.device("cpu")
SOFTMAX = """%0 = input float32[n, 37]
%1 = aten._softmax.default(%0, 1, False)
%2 = aten.mul.Tensor(%1, %0)
%3 = aten.sum.dim_IntList(%2, [1])
return %3"""
LARGEST = """%0 = input float32[n, 37]
%1 = aten.amax.default(%0, [1])
return %1"""


def made(text: str = SOFTMAX, compiled: bool = True) -> RowFunction:
    return RowFunction(graph_of(text.split("\n")), CPU, compiled)


def compiles() -> int:
    return sum(counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))


def agree(function: RowFunction, n: int = 5, change=lambda t: t) -> None:
    z = torch.randn(n, 37)
    [found], [expected] = function([change(z)]), function.interpreter([z])
    torch.testing.assert_close(found, expected)


def test_any_number_of_rows_without_compiling_again():
    function, before = made(), compiles()
    for n in (5, 1, 0, 2, 300):
        agree(function, n)
    assert compiles() == before + 1


def test_operands_of_other_strides():
    function = made()
    agree(function, change=lambda t: t.t().contiguous().t())
    agree(function, change=lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape))


def test_an_interpreted_function_is_not_compiled():
    function, before = made(compiled=False), compiles()
    agree(function)
    assert (compiles(), function.compiled, function.compiles) == (before, None, False)


def test_modes_around_change_nothing():
    first, second = made(), made(LARGEST)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        agree(first)
    agree(first)
    with torch.no_grad(), torch._subclasses.FakeTensorMode():
        assert second.compiled
    agree(second)


def test_within_a_backend_of_dynamo():
    function = made(LARGEST)

    def backend(module, inputs):
        assert function.compiled
        return torch._inductor.compile(module, inputs)

    run = torch.compiler.disable(lambda x: function([x.clone()])[0])
    compiled = torch.compile(lambda x: x.sin().sum(1) + run(x), backend=backend, dynamic=True)
    x = torch.randn(5, 37)
    torch.testing.assert_close(compiled(x), x.sin().sum(1) + x.amax(1))


def test_threads_compile_once():
    function, before, errors = made(), compiles(), []

    def work():
        try:
            agree(function)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert compiles() == before + 1


def test_deterministic_algorithms_have_their_own_code():
    text = """rows rows=0,1 sums= wide= memory_mb=0 compiled=1
%0 = input float32[n, 37]
%1 = input int64[n, 4]
%2 = aten.gather.default(%0, 1, %1)
%3 = aten.scatter_add.default(%0, 1, %1, %2)
return %3"""
    z, index = torch.randn(5, 37), torch.randint(3, (5, 4))
    before, seen = torch.are_deterministic_algorithms_enabled(), compiles()
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            [found] = rows([z, index], text)
            torch.testing.assert_close(found, z.scatter_add(1, index, z.gather(1, index)))
    finally:
        torch.use_deterministic_algorithms(before)
    assert compiles() == seen + 2


def test_what_inductor_cannot_compile_is_interpreted(monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(compile_module, "_warned", set())
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", fails)
    with caplog.at_level(logging.WARNING, "fxpass"):
        agree(made())
        agree(made(LARGEST))
    (record,) = caplog.records
    assert "is interpreted instead" in record.getMessage()
    assert "no compiler" in record.getMessage()


CHILD = """
import sys
import torch
from torch._dynamo.utils import counters
torch.use_deterministic_algorithms(True)  # as conftest.py sets these
torch.set_num_threads(int(sys.argv[1]))
from tests.unit.region.test_compile import made
assert made().compiled
print(counters["inductor"]["fxgraph_cache_hit"])
"""


def test_another_process_finds_what_was_compiled():
    assert torch.are_deterministic_algorithms_enabled()
    assert made().compiled
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


FORKS = """
import os
import torch
from tests.unit.region.test_compile import LARGEST, agree, made
torch.set_num_threads(1)
first, second = made(), made(LARGEST)
agree(first)
if not (child := os.fork()):
    agree(first), agree(second)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_compiles():
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    subprocess.run(command, check=True, timeout=300)
