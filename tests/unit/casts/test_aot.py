"""Casts that only AOTAutograd's graphs show to be needed: the inside of composite operations."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.fx import GraphModule

from fxpass.casts.aot import casting
from fxpass.casts.casts import cast_aot_graph
from fxpass.report import explain
from tests.support.mixed_dtypes import BF16, F32, SAID, compiled, tensor
from tests.support.numerics import assert_close


@torch._dynamo.allow_in_graph
def opaque(x, w):
    return torch.mm(x, w)


def gru(x, w):
    """A composite operation: its matrix products show only in AOTAutograd's graph."""
    return torch.gru_cell(x, x, w, w)


AOT_ONLY = {
    "a function that Dynamo does not look into": (opaque, (4, 8), (8, 6)),
    "a composite operation": (gru, (4, 8), (24, 8)),
}


@pytest.mark.parametrize(
    ("case", "inner"),
    [
        pytest.param(AOT_ONLY["a function that Dynamo does not look into"], "aot_eager"),
        pytest.param(AOT_ONLY["a composite operation"], "aot_eager"),
        pytest.param(AOT_ONLY["a composite operation"], "inductor"),
    ],
)
def test_what_only_aot_shows(case, inner):
    function, *shapes = case
    x, w = tensor(*shapes[0], dtype=BF16), tensor(*shapes[1])
    with pytest.raises(RuntimeError, match=SAID):
        function(x, w)

    def program(x, w):
        return function(x, w).float().square().mean()

    compiled(program, inner=inner)(x, w).backward()
    assert torch._dynamo.utils.counters["fusedce"]["casts"] > 0
    alike = [t.detach().bfloat16().requires_grad_() for t in (x, w)]
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    program(*alike).backward()
    program(*exact).backward()
    assert (x.grad.dtype, w.grad.dtype) == (BF16, F32)
    assert_close(*([t.grad for t in ts] for ts in ((x, w), alike, exact)), BF16)


@torch._dynamo.register_backend(name="fxpass_test_of_a_user")
def of_a_user(gm, inputs):
    """Partitions and compiles with AOTAutograd, as projects outside torch do."""
    return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))(gm, inputs)


ON_AOT = ["aot_eager", "aot_eager_decomp_partition", "fxpass_test_of_a_user", "inductor"]


@pytest.mark.parametrize("inner", ON_AOT)
def test_casts_without_gradients_too(inner):
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(24, 8)
    with torch.no_grad():
        got = compiled(gru, inner=inner)(x, w)
    expected, exact = gru(x, w.bfloat16()), gru(x.double(), w.double())
    assert_close([got], [expected], [exact], BF16)


@pytest.mark.parametrize("inner", ON_AOT[:3])
def test_an_encoder_that_trains_but_for_its_gradients(inner):
    """Its attention is one call in Dynamo's graph: which products are in it, only AOT shows."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1).train()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        got = compiled(model, inner=inner)(x.bfloat16())
        expected = model(x.bfloat16().float())
    assert got.dtype == F32
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_other_threads_compile_as_without_us():
    """A backend of another thread meets AOTAutograd's functions, wrapped for ours."""
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(24, 8)
    raised = []

    def elsewhere():
        with torch.no_grad(), pytest.raises(RuntimeError, match=SAID) as caught:
            torch.compile(gru, backend=of_a_user)(x, w)
        raised.append(caught.value)

    before = graph_compile.aot_dispatch_base_graph
    with casting("cast", lambda casts: None):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(raised) == 1
    assert graph_compile.aot_dispatch_base_graph is before


@pytest.mark.parametrize("gradients", [True, False])
def test_the_report_has_what_only_aot_shows(gradients):
    x, w = torch.randn(4, 8).bfloat16(), torch.randn(24, 8, requires_grad=gradients)
    found = explain(gru, x, w).casts
    assert {(made.old, made.new) for made in found} == {(F32, BF16)}
    assert all("torch.gru_cell(x, x, w, w)" in made.source for made in found)


def test_the_error_is_raised_for_what_only_aot_shows():
    x, w = torch.randn(4, 8).bfloat16(), tensor(24, 8)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="meet outside autocast"):
        compiled(gru, inner="aot_eager", mixed_dtypes="error")(x, w)


def test_an_aot_graph_without_a_mismatch_is_left_alone():
    seen = []

    def look(joint: GraphModule, inputs):
        nodes, code = list(joint.graph.nodes), joint.code
        assert cast_aot_graph(joint.graph, "error") == []
        seen.append((list(joint.graph.nodes) == nodes, joint.code == code))
        return joint

    x, w = torch.randn(4, 8), tensor(24, 8)
    with torch._functorch.config.patch(joint_custom_pass=look):
        torch.compile(gru, backend="aot_eager")(x, w)
    assert seen == [(True, True)]


@pytest.mark.parametrize("name", ["joint_custom_pre_pass", "joint-custom-pre-pass"])
def test_the_users_own_joint_passes_still_run(name):
    called = []
    x, w = torch.randn(4, 8).bfloat16(), tensor(24, 8)
    options = {name: lambda graph: called.append("inductor")}
    torch.compile(gru, backend="fusedce", options=options)(x, w)
    torch._dynamo.reset()
    theirs = lambda joint, inputs: called.append("aot") or joint  # noqa: E731
    with torch._functorch.config.patch(joint_custom_pass=theirs):
        compiled(gru, inner="aot_eager")(x, w)
    assert called == ["inductor", "aot"]


class Times(torch.autograd.Function):
    """Its forward casts for itself, its backward does not."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), (x.t() @ g).to(w.dtype)


@torch._dynamo.allow_in_graph
def times(x, w):
    return Times.apply(x, w)


def test_a_cast_for_backward_is_in_the_backward_graph():
    counts, found = [], []

    def count(graph: GraphModule, inputs):
        target = torch.ops.prims.convert_element_type.default
        counts.append(len(graph.graph.find_nodes(op="call_function", target=target)))
        return make_boxed_func(graph.forward)

    x, w = tensor(4, 8, dtype=BF16), tensor(8, 6)
    with pytest.raises(RuntimeError, match=SAID):
        times(x, w).sum().backward()
    with casting("cast", found.extend):
        inner = aot_autograd(fw_compiler=count, bw_compiler=count)
        torch.compile(times, backend=inner)(x, w).sum().backward()
    assert [(made.old, made.new) for made in found] == [(F32, BF16)]
    assert counts == [0, 1]
    torch.testing.assert_close(x.grad, torch.ones(4, 6).bfloat16() @ w.bfloat16().t())


# ---------------------------------------------------------------- an encoder layer


def encoder() -> torch.nn.Module:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    ).eval()


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_evaluation_of_an_encoder_under_autocast(inner):
    model, x = encoder(), torch.randn(2, 5, 64)
    with torch.no_grad(), torch.autocast("cpu", BF16):
        with pytest.raises(RuntimeError, match=SAID):
            torch.compile(model, backend=inner)(x)
        torch._dynamo.reset()
        got = compiled(model, inner=inner)(x)
        expected = model(x)
    exact = model.double()(x.double())
    assert_close([got], [expected], [exact], BF16)
