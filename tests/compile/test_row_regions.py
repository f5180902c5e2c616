"""Row regions in compiled programs: values and gradients, other batch sizes, reports, fallbacks."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

from fxpass.region import compile as compile_module
from fxpass.report import explain_with
from fxpass.rewrite.matches import RegionMatch
from fxpass.settings import Settings
from tests.support.numerics import assert_close

N, D, V = 40, 24, 300


def jsd(x, weight, teacher_x, teacher_weight, labels):
    student = F.linear(x, weight).log_softmax(-1)
    with torch.no_grad():
        teacher = F.linear(teacher_x, teacher_weight).log_softmax(-1)
    mixed = torch.logaddexp(student, teacher) - torch.tensor(2.0).log()
    one = F.kl_div(mixed, student, reduction="none", log_target=True).sum(-1)
    other = F.kl_div(mixed, teacher, reduction="none", log_target=True).sum(-1)
    counted = labels != -100
    return ((one + other) / 2 * counted).sum() / counted.sum()


def kl_and_loss(x, weight, teacher_x, teacher_weight, labels):
    z = F.linear(x, weight)
    teacher = F.linear(teacher_x, teacher_weight).detach()
    kl = F.kl_div((z / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="batchmean")
    return F.cross_entropy(z, labels) + 4 * kl


def adapter(x, weight, teacher_x, teacher_weight, labels):
    update = F.linear(F.linear(x, teacher_x[:4]), teacher_weight[:, :4])
    return F.cross_entropy(F.linear(x, weight.detach()) + 0.5 * update, labels)


def top_p(x, weight, teacher_x, teacher_weight, labels):
    p, _ = F.linear(x, weight).softmax(-1).sort(-1, descending=True)
    kept = p * (p.cumsum(-1) - p < 0.9)
    kept = kept / kept.sum(-1, keepdim=True)
    return -(kept * kept.clamp(min=1e-9).log()).sum(-1).pow(2).mean()


PROGRAMS = {f.__name__: f for f in (jsd, kl_and_loss, adapter, top_p)}
KNOWN = {"jsd", "kl_and_loss", "adapter"}  # coefficients


def operands(dtype=torch.float32, n=N):
    torch.manual_seed(n)
    shapes = (n, D), (V, D), (n, D), (V, D)
    made = [0.3 * torch.randn(shape, device="cpu") for shape in shapes]
    labels = torch.randint(V, (n,)).masked_fill(torch.arange(n) % 5 == 1, -100)
    return *(t.to(torch.bfloat16).to(dtype).requires_grad_() for t in made), labels


def values(function, tensors):
    loss = function(*tensors)
    trained = tensors[:-1]
    return [loss, *torch.autograd.grad(loss, trained, materialize_grads=True)]


def compiled(function, inner="aot_eager", **more):
    options = {"fusedce.min_logits_mb": 0, "fusedce.inner": inner}
    return torch.compile(function, backend="fusedce", options=options, **more)


ONCE = [("jsd", torch.float32, "eager"), ("kl_and_loss", torch.bfloat16, "inductor")]
ONCE += [(name, torch.float32, "inductor") for name in PROGRAMS]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("name", "dtype", "inner"),
    [*ONCE, *((name, dtype, "aot_eager") for name in PROGRAMS for dtype in DTYPES)],
)
def test_values_and_gradients(name, dtype, inner):
    function = PROGRAMS[name]
    got = values(compiled(function, inner), operands(dtype))
    eager, exact = (values(function, operands(d)) for d in (dtype, torch.float64))
    assert_close(got, eager, exact, dtype)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_report(name, monkeypatch):
    settings, function = Settings(min_logits_mb=0), PROGRAMS[name]
    monkeypatch.setattr(compile_module, "_known", {})
    report, sources = run_and_get_code(explain_with, settings, function, *operands())
    [match] = report.matches
    assert isinstance(match, RegionMatch)
    assert f"    kernels: {', '.join(match.kernels)}\n" in str(report)
    for kernel in match.kernels:
        assert kernel.startswith("cpp_fused")
        assert any(f"\n{kernel} = " in source for source in sources)
    monkeypatch.setattr(compile_module, "_known", {})  # Inductor's cache has the code now
    assert str(explain_with(settings, function, *operands())) == str(report)
    heads = 1 if name == "top_p" else 2
    assert f"region of {heads} head" in str(report)
    assert "rows at a time" in str(report)
    known = "the gradients are computed with the outputs" in str(report)
    assert known == (name in KNOWN)
    assert not report.rejections
    [after] = report.after
    assert "row_region" in after
    assert f"[{N}, {V}]" not in after  # no logits


@pytest.mark.parametrize("name", PROGRAMS)
def test_other_numbers_of_rows_compile_nothing(name):
    counter = CompileCounterWithBackend("fusedce")
    settings = {"fusedce.min_logits_mb": 0, "fusedce.inner": "aot_eager"}

    def backend(gm, inputs):
        counter.frame_count += 1
        return torch._dynamo.lookup_backend("fusedce")(gm, inputs, options=settings)

    function = torch.compile(PROGRAMS[name], backend=backend, dynamic=True)
    for n in (N, 7, 65):
        got = values(function, operands(n=n))
        eager, exact = (
            values(PROGRAMS[name], operands(dtype, n)) for dtype in (torch.float32, torch.float64)
        )
        assert_close(got, eager, exact, torch.float32)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_gradients(name):
    with torch.no_grad():
        got = compiled(PROGRAMS[name])(*operands())
        eager, exact = (PROGRAMS[name](*operands(d)) for d in (torch.float32, torch.float64))
    assert_close([got], [eager], [exact], torch.float32)


def test_small_logits_are_left():
    report = explain_with(Settings(), jsd, *operands())
    assert not report.matches


def test_a_failure_leaves_the_program(monkeypatch, caplog):
    def fails(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr("fxpass.rewrite.fuse.rewrite_region", fails)
    with caplog.at_level(logging.WARNING):
        got = values(compiled(jsd), operands())
    for one, other in zip(got, values(jsd, operands()), strict=True):
        assert torch.equal(one, other)
    assert "the rewrite failed" in caplog.text


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_autograd(name):
    """It compiles backward while a region may still be traced; what is detached gets no gradient."""
    function, tensors, others = PROGRAMS[name], operands(), operands()
    function(*tensors).backward()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        compiled(function)(*others).backward()
    for tensor, other in zip(tensors[:-1], others[:-1], strict=True):
        torch.testing.assert_close(other.grad, tensor.grad, rtol=1e-4, atol=1e-6)


def test_backward_twice():
    tensors = operands()
    loss = compiled(top_p)(*tensors)
    once = torch.autograd.grad(loss, tensors[1], retain_graph=True)
    again = torch.autograd.grad(loss, tensors[1])
    assert torch.equal(once[0], again[0])
