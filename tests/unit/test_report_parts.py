"""explain() of functions that call what is compiled, and of what is behind a graph break."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fxpass import messages
from fxpass.report import explain
from tests.support.reported import (
    NON_LEAF,
    Model,
    compiled_in_place,
    counts,
    fused,
    inputs,
    rejected,
    wrapped,
)

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
    report = explain(lambda: model(x).cumsum(0).cumsum(1).mean())
    (computed,) = report.computed
    assert messages.ALONG_ROWS in computed.why
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
