"""explain(): what it counts, what it says, and that it may be called on anything, repeatedly."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from functools import partial

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import fxpass
from fxpass.kernels.call import Gpu
from fxpass.report import Report, explain

# Dynamo itself looks at the .grad of logits that enter a graph
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def inputs(n: int = 4, dtype: torch.dtype = torch.float32):
    weight = torch.ones(10, 8, dtype=dtype, requires_grad=True)
    return torch.ones(n, 8, dtype=dtype), weight, torch.zeros(n).long()


def fused(x, w, target):
    return F.cross_entropy(F.linear(x, w), target)


def rejected(x, w, target):
    return F.cross_entropy(F.linear(x, w).cumsum(0), target)


def loss_less(x, w, target):
    return F.linear(x, w).cumsum(0).sum()


def broken(x, w, target):
    logits = F.linear(x, w)
    torch._dynamo.graph_break()
    return F.cross_entropy(logits, target)


def broken_before(x, w, target):
    x = x * 2
    torch._dynamo.graph_break()
    return F.cross_entropy(F.linear(x, w), target)


def kept(x, w, target):
    logits = F.linear(x, w)
    return F.cross_entropy(logits, target), logits


def several(x, w, target):
    logits = F.linear(x, w) * 2
    first = F.cross_entropy(F.linear(x, w), target)
    return (
        first + F.cross_entropy(logits, target) + F.cross_entropy(F.linear(x, w).cumsum(0), target)
    )


def under_autocast(x, w, target):
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(F.linear(x, w), target)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 10)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, target):
        return self.loss(self.head(x), target)


def counts(report: Report) -> tuple[int, int, int, int]:
    return (report.graphs, len(report.matches), len(report.rejections), len(report.casts))


# ---------------------------------------------------------------- what is counted


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (fused, (1, 1, 0, 0)),
        (rejected, (1, 0, 1, 0)),
        (loss_less, (1, 0, 0, 0)),
        pytest.param(broken, (2, 0, 1, 0), marks=NON_LEAF),
        (broken_before, (2, 1, 0, 0)),
        (kept, (1, 1, 0, 0)),
        (several, (1, 2, 1, 0)),
        (under_autocast, (1, 1, 0, 2)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_counts(fn, expected):
    report = explain(fn, *inputs())
    assert counts(report) == expected
    assert len(report.before) == len(report.after) == report.graphs
    changed = [b != a for b, a in zip(report.before, report.after, strict=True)]
    assert sum(changed) == (report.matches != ())
    head = str(report).splitlines()[0]
    assert [int(word) for word in head.split() if word.isdigit()] == list(expected)
    assert ("nothing to fuse" in str(report)) == (fn is loss_less)
    assert len(report.breaks) == report.graphs - 1


@NON_LEAF
def test_a_graph_break_between_head_and_loss_is_located():
    report = str(explain(broken, *inputs()))
    number = broken.__code__.co_firstlineno + 2
    assert "the linear is in another graph" in report
    assert f"graph break: tests/unit/test_report.py:{number} torch._dynamo.graph_break()" in report


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


def test_it_is_what_the_package_exports():
    assert (fxpass.explain, fxpass.Report) == (explain, Report)


@pytest.mark.parametrize("again", [False, True])
def test_a_compiled_function(again):
    compiled = torch.compile(fused, backend="eager")
    if again:
        compiled(*inputs())
    assert counts(explain(compiled, *inputs())) == (1, 1, 0, 0)


def plain(model):
    return model


def wrapped(model):
    return torch.compile(model, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")
    return model


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


# ---------------------------------------------------------------- functions that call what is compiled


MODELS = {make: make(Model()) for make in (wrapped, compiled_in_place)}
loss_of = torch.compile(F.cross_entropy, backend="eager")


class Trainer:
    def __init__(self, model):
        self.models = {"policy": model}

    def step(self, x, w, target):
        return F.cross_entropy(self.models["policy"].head(x), target) + self.loss(x, target)

    def loss(self, x, target):
        return self.models["policy"](x, target) * 2


def of_an_argument(x, w, target, model):
    return model(x, target) + fused(x, w, target)


def of_a_global_variable(x, w, target):
    def inner():
        return MODELS[wrapped](x, target)

    return inner() + rejected(x, w, target)


def of_another_function(x, w, target):
    return of_a_global_variable(x, w, target)


model_in_place = MODELS[compiled_in_place]
IN_PARTS = {
    "argument": partial(of_an_argument, model=MODELS[wrapped]),
    "in place": partial(of_an_argument, model=model_in_place),
    "global": of_a_global_variable,
    "another function": of_another_function,
    "lambda": lambda x, w, target: model_in_place(x, target),
    "method": Trainer(model_in_place).step,
    "object": lambda x, w, target: TRAINER.step(x, w, target),
    "child": lambda x, w, target: torch.nn.ModuleList([model_in_place])[0](x, target),
}
TRAINER = Trainer(MODELS[wrapped])


@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.parametrize("ran", [False, True])
def test_a_function_that_calls_a_compiled_model_is_reported_as_it_runs(name, ran):
    """The losses around the model are not in a graph, and not in the report."""
    fn, graphs = IN_PARTS[name], []
    if ran:
        fn(*inputs())
    report = explain(fn, *inputs())
    assert counts(report) == (1, 1, 0, 0)
    assert report.in_parts
    assert "  the function is not compiled: only what it calls that is compiled" in str(report)
    with torch.compiler.set_stance(force_backend=lambda gm, _: graphs.append(gm) or gm.forward):
        fn(*inputs())
    assert len(graphs) == report.graphs


def test_what_is_compiled_is_compiled_as_one():
    """Also around a compiled model, of whose graphs none is in a real run."""
    outer = torch.compile(of_a_global_variable, backend="eager")
    report = explain(outer, *inputs())
    assert counts(report) == (1, 1, 1, 0)
    assert not report.in_parts
    assert not explain(model_in_place, *inputs()[::2]).in_parts
    assert not explain(fused, *inputs()).in_parts


@NON_LEAF
def test_layers_that_are_compiled_one_by_one():
    class Layer(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).relu()

    model = torch.nn.Sequential(Layer(8, 8), Layer(8, 10))
    for layer in model:
        layer.compile(backend="eager")
    report = explain(lambda x, w, target: F.cross_entropy(model(x), target), *inputs())
    assert (counts(report), report.in_parts) == ((2, 0, 0, 0), True)
    assert explain(model, inputs()[0]).in_parts


@NON_LEAF
def test_a_compiled_function_that_is_not_called():
    def f(x, w, target, use=False):
        return loss_of(F.linear(x, w), target) if use else fused(x, w, target)

    report = explain(f, *inputs())
    assert (counts(report), report.in_parts) == ((1, 1, 0, 0), False)
    assert counts(explain(f, *inputs(), use=True)) == (1, 0, 1, 0)


def test_a_disabled_function_is_not_compiled():
    @torch.compiler.disable
    def doubled(x):
        return x * 2

    report = explain(lambda x, w, target: fused(doubled(x), w, target), *inputs())
    assert (counts(report), report.in_parts) == ((1, 1, 0, 0), False)


def test_where_dynamo_is_off_nothing_that_is_compiled_runs():
    with torch.compiler.set_stance("force_eager"):
        assert explain(of_a_global_variable, *inputs()).graphs == 0


def test_the_function_really_runs_once():
    calls = []

    @torch._dynamo.disable
    def note():
        calls.append(1)

    def f(x, w, target, loss=fused):
        note()
        return loss(x, w, target)

    explain(f, *inputs())
    assert calls == [1]
    explain(f, *inputs(), loss=of_a_global_variable)
    assert calls == [1, 1]


class Vocabulary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 300)

    def forward(self, x):
        return self.head(self.body(x).tanh())


@NON_LEAF
def test_logits_that_the_run_computes_are_not_said_not_to_exist():
    model = Vocabulary()
    model.compile(backend="fusedce")
    x = torch.randn(6, 8)
    report = explain(lambda: model(x).logsumexp(-1).mean())
    assert not report.computed
    assert "logits not materialised: 8 KiB" in str(report)
    report = explain(lambda: model(x).softmax(0).mean())
    (computed,) = report.computed
    assert "works along rows" in computed.why
    assert report.logits_bytes == 0
    assert f"materialised: {computed.line} computes the logits float32[6, 300]" in str(report)
    assert "not materialised" not in str(report)


def test_what_is_behind_a_break_is_run_as_without_explain():
    """The logits are deferred, and what reduces them is answered."""

    class Broken(Vocabulary):
        def forward(self, x):
            logits = super().forward(x)[:-1]
            torch._dynamo.graph_break()
            return logits.logsumexp(-1).mean()

    report = explain(Broken(), torch.randn(6, 8))
    assert counts(report) == (1, 1, 0, 0)
    assert (report.matches[0].logits_mode, report.computed) == ("defer", ())


class Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


def contrastive(x, w, target):
    z = x @ w.t()
    return F.cross_entropy(z, target) + F.cross_entropy(z.t(), target)


REASONS = {
    "a head in a custom function": (
        lambda x, w, target: F.cross_entropy(Head.apply(x, w), target),
        "its logits are made inside of an autograd.Function",
    ),
    "without a loss with a name": (
        lambda x, w, target: Head.apply(x, w).log_softmax(-1).gather(1, target[:, None]).mean(),
        "its logits are made inside of an autograd.Function",
    ),
    "columns": (contrastive, "one pass over logits has their rows, or their columns"),
    "jagged": (
        lambda x, w, target: F.cross_entropy(
            F.linear(
                torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 2, 6])), w
            ).values(),
            target,
        ),
        "is a NestedTensor",
    ),
    "a call that cannot be traced": (
        lambda x, w, target: (
            torch.renorm((x.bfloat16() @ w.bfloat16().t()), 2, 0, 1.0).logsumexp(-1).mean()
        ),
        "its rows cannot be traced: RuntimeError: Trying to backward through prims",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_decline_is_one_line(name, caplog):
    program, reason = REASONS[name]
    x, w, target = torch.randn(6, 8), torch.randn(6, 8), torch.randint(6, (6,))
    report = explain(program, x.requires_grad_(), w.requires_grad_(), target)
    (rejection,) = report.rejections
    assert reason in rejection.reason
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


def test_casts_name_operand_dtypes_and_line():
    report = explain(under_autocast, *inputs())
    (line,) = {cast.source for cast in report.casts}
    number = under_autocast.__code__.co_firstlineno + 2
    assert f"test_report.py:{number} return F.cross_entropy(F.linear(x, w), target)" in line
    assert [(c.operand, c.old, c.new) for c in report.casts] == [
        ("l_x_", torch.float32, torch.bfloat16),
        ("l_w_", torch.float32, torch.bfloat16),
    ]
    assert f"cast: %l_x_, %l_w_ float32 -> bfloat16: {line}" in str(report)


@pytest.mark.parametrize(
    ("fn", "n", "dtype", "expected"),
    [
        (fused, 4, torch.float32, 4 * 10 * 4),
        (fused, 7, torch.bfloat16, 7 * 10 * 2),
        (under_autocast, 4, torch.float32, 4 * 10 * 2),
        (several, 4, torch.float32, 2 * 4 * 10 * 4),
        (kept, 4, torch.float32, 160),  # deferred
        (rejected, 4, torch.float32, 0),
        (loss_less, 4, torch.float32, 0),
    ],
)
def test_logits_bytes(fn, n, dtype, expected):
    report = explain(fn, *inputs(n, dtype))
    assert report.logits_bytes == expected
    assert ("logits not materialised" in str(report)) == (expected > 0)


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
    return loss + F.cross_entropy(F.linear(x, w).cumsum(0), t)
"""


def test_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    spec = importlib.util.spec_from_file_location("train", tmp_path / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    report = dataclasses.replace(explain(train.step, *inputs()), kernels=())
    expecttest.assert_expected_inline(
        str(report),
        """\
1 graph, 1 loss fused, 1 not fused, 1 cast
  fused: train.py:4 loss = F.cross_entropy(F.linear(x.half(), w), t): logits [4, 10], cross-entropy: log-probability of the label; gradients of weight in backward
    strategy: tiled, 4 rows and 10 classes at a time: 1 KiB of scratch; saved gradients would take more than the logits
  not fused: train.py:5 return loss + F.cross_entropy(F.linear(x, w).cumsum(0), t): %cumsum (cumsum) (aten.cumsum works along rows)
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
        logits = self.head(x)
        return logits.cumsum(0).sum() if labels is None else self.loss(logits, labels)


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
    rows = zip(x, target, strict=True)
    return sum(F.cross_entropy(F.linear(row, w).cumsum(0), t) for row, t in rows)


def test_equal_rejections_are_one_line():
    report = explain(in_a_loop, *inputs(16))
    assert len(report.rejections) == 16
    (line,) = (line for line in str(report).splitlines() if "not fused:" in line)
    assert line.endswith("what is made of its logits is not known (16 times)")
    assert "times)" not in str(explain(several, *inputs()))


@pytest.mark.parametrize("setting", ["chunked", "tiled"])
def test_the_kernels_are_those_of_the_strategy(monkeypatch, setting):
    monkeypatch.setenv("FUSEDCE_STRATEGY", setting)
    x, w, t = inputs()
    report = explain(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t, label_smoothing=0.1), x, w, t
    )
    ((call,),) = (head.calls for head in report.matches)
    assert call.choice.strategy == setting
    assert bool(call.spec.total) == (setting == "chunked")
    names = [kernel.name.rpartition("_")[0] for kernel in report.kernels]
    both = ["class_reductions", "class_reductions_backward"]
    assert names == {"chunked": both[:1], "tiled": both}[setting]
    assert f"strategy: {setting}, " in str(report)
