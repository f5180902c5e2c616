"""Row regions in compiled programs: reports, compilations, failures, backward in other ways."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import fxpass
from fxpass.region import compile as compile_module
from fxpass.report import explain_with
from fxpass.rewrite.matches import RegionMatch
from fxpass.settings import Settings
from tests.programs.catalog import of
from tests.programs.row import REGION, Row
from tests.programs.rows.refused import spread
from tests.support.numerics import assert_as_accurate
from tests.support.oracle import FIRST, check

ROWS = {row.name: row for row in of("regions")}
JSD, KL, ADAPTER, TOP_P = (
    "Jensen-Shannon to a teacher",
    "KL to a teacher beside a loss",
    "a low-rank update of a frozen head",
    "entropy of the nucleus",
)
PROGRAMS = (JSD, KL, ADAPTER, TOP_P)
ALWAYS = Settings(min_logits_mb=0)
OPTIONS = {"fusedce.min_logits_mb": 0, "fusedce.inner": "aot_eager"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_report(name, monkeypatch):
    function, tensors = ROWS[name].program(), ROWS[name].tensors()
    monkeypatch.setattr(compile_module, "_known", {})
    report, sources = run_and_get_code(explain_with, ALWAYS, function, *tensors)
    [match] = report.matches
    assert isinstance(match, RegionMatch)
    assert f"    kernels: {', '.join(match.kernels)}\n" in str(report)
    for kernel in match.kernels:
        assert kernel.startswith("cpp_fused")
        assert any(f"\n{kernel} = " in source for source in sources)
    monkeypatch.setattr(compile_module, "_known", {})  # Inductor's cache has the code now
    assert str(explain_with(ALWAYS, function, *tensors)) == str(report)
    heads = "1 head" if name == TOP_P else "2 heads, logits [48, 97] and [48, 97]: "
    assert f"region of {heads}" in str(report)
    assert "rows at a time" in str(report)
    known = "the gradients are computed with the outputs" in str(report)
    assert known == (name != TOP_P)
    assert not report.rejections
    [after] = report.after
    assert "row_region" in after
    assert "[48, 97]" not in after  # no logits


def test_other_numbers_of_rows_compile_nothing():
    counter = CompileCounterWithBackend("fusedce")

    def backend(gm, inputs):
        counter.frame_count += 1
        return torch._dynamo.lookup_backend("fusedce")(gm, inputs, options=OPTIONS)

    row = ROWS[TOP_P]
    function = torch.compile(row.program(), backend=backend, dynamic=True)
    for n in (48, 7, 65):
        x, weight = torch.randn(n, row.sizes.d), row.tensors()[1].detach()
        assert_as_accurate(function, row.program(), (x, weight), torch.float32)
    assert counter.frame_count == 1


def test_small_logits_are_left():
    row = ROWS[JSD]
    assert not explain_with(Settings(), row.program(), *row.tensors()).matches


def test_a_failure_leaves_the_program(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr("fxpass.rewrite.fuse.rewrite_region", fails)
    row = ROWS[JSD]
    compiled = torch.compile(row.program(), backend="fusedce", options=OPTIONS)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(compiled(*row.tensors()), row.program()(*row.tensors()))
    assert "the rewrite failed" in caplog.text


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_autograd(name):
    """It compiles backward while a region may still be traced; what is detached gets no gradient."""
    row = ROWS[name]

    def backward(function):
        def gradients(*trained):
            given = dict(zip(row.gradients, trained, strict=True))
            tensors = [given.get(n, t) for n, t in zip(row.names, row.tensors(), strict=True)]
            return torch.autograd.grad(
                function(*tensors), trained, allow_unused=True, materialize_grads=True
            )

        return gradients

    trained = [t for t in row.tensors() if t.requires_grad]
    wanted = backward(row.program())(*trained)
    compiled = torch.compile(row.program(), backend="fusedce", options=OPTIONS)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        found = backward(compiled)(*trained)
    torch.testing.assert_close(found, wanted)


def test_backward_twice():
    row = ROWS[TOP_P]
    tensors = row.tensors()
    loss = torch.compile(row.program(), backend="fusedce", options=OPTIONS)(*tensors)
    once = torch.autograd.grad(loss, tensors[1], retain_graph=True)
    again = torch.autograd.grad(loss, tensors[1])
    assert torch.equal(once[0], again[0])


def test_an_index_that_varies(caplog):
    """The row function may not read a size of no operand: then there is no region, and no warning."""

    def program(x, weight, index):
        z = torch.stack([F.linear(x, weight), F.linear(x.tanh(), weight)])[index]
        return spread(z).mean()

    x, weight = ROWS[TOP_P].tensors()
    compiled = torch.compile(program, backend="fusedce", options=OPTIONS, dynamic=True)
    for index in (1, 0):
        torch.testing.assert_close(compiled(x, weight, index), program(x, weight, index))
    assert not [r for r in caplog.records if r.name.startswith("fxpass") and r.levelno > 20]


@pytest.mark.parametrize("way", [FIRST, "dynamic"])
def test_a_temperature_that_varies(way):
    """No row: the tests of tags take values to be tensors."""
    text, varies = "spread(z / (labels[0] + 2.5).item())", {"capture_scalar_outputs": True}
    check(Row("a temperature", text, REGION, dynamo=varies, scope={"spread": spread}), way)


def test_a_hook_that_mixes_rows():
    """No row: the oracle runs graphs a second time, on operands without gradients."""

    def program(x, weight):
        z = F.linear(x, weight)
        z.register_hook(lambda gradient: gradient - gradient.mean(0))
        return spread(z).sum()

    x, weight = ROWS[TOP_P].tensors()
    [after] = fxpass.explain(program, x, weight).after
    assert "row_region" not in after
    compiled = torch.compile(program, backend="fusedce", options=OPTIONS)
    assert_as_accurate(compiled, program, (x, weight), torch.float32)
