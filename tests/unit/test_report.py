"""explain(): what it counts, what it says, and that it may be called on anything, repeatedly."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import fxpass
from fxpass import messages
from fxpass.kernels.call import Gpu
from fxpass.report import Report, explain
from tests.support.reported import (
    NON_LEAF,
    Model,
    broken,
    broken_before,
    compiled_in_place,
    counts,
    fused,
    inputs,
    kept,
    loss_less,
    plain,
    rejected,
    several,
    under_autocast,
    wrapped,
)

# ---------------------------------------------------------------- what is counted


# graphs, losses that are fused and that are not, casts
COUNTS = {
    fused: (1, 1, 0, 0),
    rejected: (1, 0, 1, 0),
    loss_less: (1, 0, 0, 0),
    broken: (2, 0, 1, 0),
    broken_before: (2, 1, 0, 0),
    kept: (1, 1, 0, 0),
    several: (1, 2, 1, 0),
    under_autocast: (1, 1, 0, 0),  # whose casts are torch's
}
# of logits that are not there
BYTES = {fused: 160, under_autocast: 80, several: 320, kept: 160, broken_before: 160}


@NON_LEAF
@pytest.mark.parametrize("fn", COUNTS, ids=lambda fn: fn.__name__)
def test_counts(fn):
    report = explain(fn, *inputs())
    text = str(report)
    assert counts(report) == COUNTS[fn]
    assert len(report.before) == len(report.after) == report.graphs
    changed = [b != a for b, a in zip(report.before, report.after, strict=True)]
    assert sum(changed) == (report.matches != ())
    head = text.splitlines()[0]
    assert [int(word) for word in head.split() if word.isdigit()] == [*COUNTS[fn]]
    assert ("nothing to fuse" in text) == (fn is loss_less)
    assert len(report.breaks) == report.graphs - 1
    assert report.logits_bytes == BYTES.get(fn, 0)
    assert ("logits not materialised" in text) == (fn in BYTES)
    number = fn.__code__.co_firstlineno + 2
    place = f"graph break: tests/support/reported.py:{number} torch._dynamo.graph_break()"
    assert (place in text) == (fn in (broken, broken_before))
    assert (messages.fixed(messages.ENTERS) in text) == (fn is broken)


@NON_LEAF
def test_a_mask_of_rows_names_the_switch_that_captures_it():
    def program(x, weight, labels):
        z, t = F.linear(x, weight).flatten(0, -2), labels.flatten()
        return F.cross_entropy(z[t > 0], t[t > 0])

    switch = "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
    broke = explain(program, *inputs())
    assert all(f"It is captured with {switch}." in place for place in broke.breaks)
    assert broke.breaks
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert counts(explain(program, *inputs()))[:3] == (1, 1, 0)


@pytest.mark.parametrize("again", [False, True])
def test_a_compiled_function(again):
    assert (fxpass.explain, fxpass.Report) == (explain, Report)
    compiled = torch.compile(fused, backend="eager")
    if again:
        compiled(*inputs())
    assert counts(explain(compiled, *inputs())) == (1, 1, 0, 0)


@pytest.mark.parametrize("make", [plain, wrapped, compiled_in_place])
@pytest.mark.parametrize("ran", [False, True])
def test_a_module(make, ran):
    x, _, target = inputs()
    model = make(Model())
    if ran:
        model(x, target)
    report = explain(model, x, target=target)
    assert counts(report) == (1, 1, 0, 0)
    assert "bias" in report.matches[0].calls[0].spec.gradients
    # and the module is what it was
    torch.testing.assert_close(model(x, target), F.cross_entropy(model.head(x), target))


def test_a_call_that_cannot_be_traced_by_itself(caplog):
    """It can in the joint graph."""

    def program(x, w, target):
        z = x.bfloat16() @ w.bfloat16().t()
        return torch.renorm(z, 2, 0, 1.0).logsumexp(-1).mean()

    x, w, target = inputs()
    assert counts(explain(program, x.requires_grad_(), w, target)) == (1, 1, 0, 0)
    assert not [r for r in caplog.records if r.exc_info and r.levelname != "DEBUG"]


def test_it_can_be_called_again_and_again():
    first = explain(fused, *inputs())
    for _ in range(12):  # more often than Dynamo compiles one function
        assert str(explain(fused, *inputs())) == str(first)


@pytest.mark.parametrize("n", [3, 9])
def test_it_does_not_use_up_what_torch_compile_may_do(n):
    for _ in range(n):
        explain(fused, *inputs())
    counters.clear()
    torch.compile(fused, backend="fusedce", options={"fusedce.inner": "eager"})(*inputs())
    assert counters["fusedce"]["matched"] == 1


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "1")
    report = explain(fused, *inputs())
    assert counts(report) == (1, 0, 1, 0)
    assert "fewer than 1 MiB (FUSEDCE_MIN_LOGITS_MB=0 fuses all)" in str(report)
    monkeypatch.setenv("FUSEDCE_MIN_LOGITS_MB", "small")
    with pytest.raises(ValueError, match="FUSEDCE_MIN_LOGITS_MB='small' is not allowed"):
        explain(fused, *inputs())


def test_switched_off_it_tells_what_would_be_done(monkeypatch):
    monkeypatch.setenv("FUSEDCE", "0")
    assert counts(explain(fused, *inputs())) == (1, 1, 0, 0)


# ---------------------------------------------------------------- what it says


def of_unlike_dtypes(x, w, target, other):
    return F.cross_entropy(F.linear(x, w, other), target)


def test_casts_name_operand_dtypes_and_line():
    x, w, target = inputs()
    report = explain(of_unlike_dtypes, x.bfloat16(), w, target, torch.zeros(len(w)))
    (line,) = {cast.source for cast in report.casts}
    number = of_unlike_dtypes.__code__.co_firstlineno + 1
    assert f"test_report.py:{number} return F.cross_entropy(F.linear(x, w, other), target)" in line
    assert [(c.operand, c.old, c.new) for c in report.casts] == [
        ("l_w_", torch.float32, torch.bfloat16),
        ("l_other_", torch.float32, torch.bfloat16),
    ]
    assert f"cast: %l_w_, %l_other_ float32 -> bfloat16: {line}" in str(report)


def test_logits_bytes_are_those_of_the_dtype():
    assert explain(fused, *inputs(7, torch.bfloat16)).logits_bytes == 7 * 10 * 2


def test_logits_bytes_of_a_symbolic_batch():
    explain(fused, *inputs(4))
    args = inputs(6)
    torch._dynamo.mark_dynamic(args[0], 0)
    torch._dynamo.mark_dynamic(args[2], 0)
    assert explain(fused, *args).logits_bytes == 6 * 10 * 4


def test_kernels_have_a_name_and_a_source():
    (kernel,) = explain(fused, *inputs()).kernels
    names = {n.name for n in ast.walk(ast.parse(kernel.source)) if isinstance(n, ast.FunctionDef)}
    assert kernel.name in names


def test_kernels_of_a_gpu_are_named():
    report = explain(fused, *inputs())
    (kernel,) = report.kernels
    kernel = kernel._replace(gpu=Gpu("NVIDIA H200", "sm_90"))
    report = dataclasses.replace(report, kernels=(kernel,))
    assert f"Triton kernels on sm_90 (NVIDIA H200): {kernel.name}" in str(report)


def test_kernels_of_a_gpu_that_is_not_there_are_not_named(gpus):
    gpus.have()
    report = explain(fused, *inputs())
    assert str(report.kernels[0].gpu) == "sm_90 (an H200, assumed)"
    assert "Triton" not in str(report)


def test_kernels_of_one_spec_are_listed_once():
    def twice(x, w, target):
        return fused(x, w, target) + fused(x, w, target)

    report = explain(twice, *inputs())
    assert len(report.matches) == 2
    assert report.kernels == explain(fused, *inputs()).kernels
    assert not explain(rejected, *inputs()).kernels


def test_a_bias_in_f32_is_added_by_the_kernel():
    """A GEMM in bf16 would round it; so the kernel is another."""

    def step(x, weight, target, bias):
        return F.cross_entropy(F.linear(x, weight).float() + bias, target)

    x, weight, target = inputs(dtype=torch.bfloat16)
    (narrow,) = explain(fused, x, weight, target).kernels
    (wide,) = explain(step, x, weight, target, torch.zeros(len(weight))).kernels
    assert "bias" in wide.source
    assert "bias" not in narrow.source


# float16, which every CPU multiplies in f32: the scratch does not depend on the processor.
TRAIN = """\
import torch.nn.functional as F

def step(x, w, t):
    loss = F.cross_entropy(F.linear(x.half(), w), t)
    return loss + F.cross_entropy(F.linear(x, w.detach()).cumsum(0), t)
"""


def test_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEDCE_STRATEGY", "chunked")
    (tmp_path / "train.py").write_text(TRAIN)
    spec = importlib.util.spec_from_file_location("train", tmp_path / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    report = dataclasses.replace(explain(train.step, *inputs()), kernels=())
    expecttest.assert_expected_inline(
        str(report),
        """\
1 graph, 1 loss fused, 1 not fused, 1 cast
  fused: train.py:4 loss = F.cross_entropy(F.linear(x.half(), w), t): logits [4, 10], cross-entropy: log-probability of the label; gradients of weight with the loss
    strategy: chunked, 4 rows at a time: 2 KiB of scratch; the gradients are computed with the outputs
  not fused: train.py:5 return loss + F.cross_entropy(F.linear(x, w.detach()).cumsum(0), t): aten.cumsum at train.py:5 works along rows
  cast: %l_w_ float32 -> float16: train.py:4 loss = F.cross_entropy(F.linear(x.half(), w), t)
  logits not materialised: 1 KiB""",
    )


def test_text_without_a_loss():
    assert str(explain(loss_less, *inputs())).splitlines() == [
        "1 graph, 0 losses fused, 0 not fused, 0 casts",
        "  no loss, or other reduction of logits, in any graph: nothing to fuse",
    ]


def in_a_generator(x, w, target):
    yield F.cross_entropy(F.linear(x, w), target)


def test_text_where_nothing_is_traced():
    assert "\n  nothing was traced: " in str(explain(in_a_generator, *inputs()))
    before = dict(vars(Model))
    assert "\n  nothing was traced: " in str(explain(Model))
    assert dict(vars(Model)) == before


def test_text_where_dynamo_is_off():
    with torch.compiler.set_stance("force_eager"):
        report = explain(loss_less, *inputs())
    assert str(report).splitlines() == [
        "0 graphs, 0 losses fused, 0 not fused, 0 casts",
        "  nothing was traced: Dynamo is off (TORCHDYNAMO_DISABLE=1, set_stance), or the call runs "
        "no tensor operation itself (a class, a generator)",
    ]


class Labelled(Model):
    def forward(self, x, labels=None):
        return x.cumsum(0).sum() if labels is None else self.loss(self.head(x), labels)


@pytest.mark.parametrize("make", [plain, wrapped, compiled_in_place])
def test_a_model_that_got_no_labels_is_asked_for_them(make):
    x, _, labels = inputs()
    advice = "nothing to fuse; call it with labels to have a loss"
    assert advice in str(explain(make(Labelled()), x))
    assert advice in str(explain(make(Labelled()), x, labels=None))
    assert advice not in str(explain(make(Labelled()), x, labels))
    assert "call it with labels" not in str(explain(loss_less, *inputs()))


def test_a_hook_that_takes_an_argument_away():
    x, _, labels = inputs()
    model = Labelled()
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, {}), with_kwargs=True)
    assert "matched" not in str(explain(model, x, labels, other=1)).partition("\n")[0]


def in_a_loop(x, w, target):
    return sum(F.cross_entropy(F.linear(x + i, w).cumsum(0), target) for i in range(16))


def test_equal_rejections_are_one_line():
    report = explain(in_a_loop, *inputs())
    assert len(report.rejections) == 16
    (line,) = (line for line in str(report).splitlines() if "not fused:" in line)
    assert line.endswith(" works along rows (16 times)")
    assert "times)" not in str(explain(several, *inputs()))


def smoothed(x, w, target):
    return F.cross_entropy(F.linear(x, w), target, label_smoothing=0.1)


def test_a_call_that_computes_gradients_with_the_loss(monkeypatch):
    monkeypatch.setenv("FUSEDCE_STRATEGY", "chunked")
    report = explain(smoothed, *inputs())
    ((call,),) = (head.calls for head in report.matches)
    assert (call.choice.strategy, call.spec.gradients) == ("chunked", ("weight",))
    assert call.spec.total
    (kernel,) = report.kernels
    assert kernel.name.rpartition("_")[0] == "class_reductions"
    assert "gradients of weight with the loss" in str(report)
    assert "; the gradients are computed with the outputs" in str(report)


def test_calls_of_which_backward_computes_the_logits_again(monkeypatch):
    monkeypatch.setenv("FUSEDCE_STRATEGY", "tiled")
    report = explain(smoothed, *inputs())
    ((forward, backward),) = (head.calls for head in report.matches)
    assert not forward.spec.gradients
    assert backward.spec.gradients == ("weight",)
    assert len(report.kernels) == 2
    assert "; backward computes the logits again" in str(report)
    assert "gradients of weight in backward" in str(report)
    assert "gradients of weight with the loss" not in str(report)
