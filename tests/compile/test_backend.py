"""The backend as users meet it: by name, with settings, in several steps.

One step under every mode of torch.compile: the rows of tests/programs/rows/compiled.py.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.utils import counters

from fxpass.backend import fusedce
from fxpass.rewrite.inner import InnerBackend, compile_inner

V = 50


class Model(nn.Module):
    """A head over a small body; plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, V, bias=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean loss of ``x`` [B, S, 8] against ``labels`` [B, S]."""
        logits = self.head(self.body(x).tanh())
        return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def batch(b: int = 2, s: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(b, s, 8), torch.randint(V, (b, s))


def fused(fn, inner: str = "aot_eager", **kwargs):
    """``fn`` with fusedce over an inner backend."""
    options = {"fusedce.inner": inner}
    return torch.compile(fn, backend="fusedce", options=options, **kwargs)


def gradients(model, loss) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def assert_same(model, a, b) -> None:
    """Two losses and their gradients agree to f32's rounding."""
    torch.testing.assert_close(a, b)
    for x, y in zip(gradients(model, a), gradients(model, b), strict=True):
        torch.testing.assert_close(x, y)


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh process."""
    full = {**os.environ, **env}
    full.pop("TRITON_INTERPRET", None)
    return subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True)


PROGRAM = f"""
import json, torch, torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(2, 5, 8, requires_grad=True)
w = torch.randn({V}, 8, requires_grad=True)
t = torch.randint({V}, (2, 5))
def f(x, w):
    return F.cross_entropy(F.linear(x, w).view(-1, {V}), t.view(-1))
def result(backend):
    x.grad = w.grad = None
    loss = torch.compile(f, backend=backend)(x, w)
    loss.backward()
    return [loss.item(), x.grad.sum().item(), w.grad.norm().item()]
"""


# ---------------------------------------------------------------- by name


@pytest.mark.full  # a compile cache of its own
def test_found_by_name_without_an_import(tmp_path):
    """The second process hits the compile caches of the first, and is right."""
    code = PROGRAM + (
        "import sys; assert not any(m.startswith('fxpass') for m in sys.modules)\n"
        "assert 'fusedce' in torch._dynamo.list_backends()\n"
        "out = {'fused': result('fusedce')}\n"
        "c = torch._dynamo.utils.counters\n"
        "out['matched'] = c['fusedce']['matched']\n"
        "out['hits'] = c['aot_autograd']['autograd_cache_hit']\n"
        "torch._dynamo.reset()\n"
        "print(json.dumps(out | {'eager': result('eager')}))"
    )
    answers = []
    for _ in range(2):
        done = python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert [a["matched"] for a in answers] == [1, 1]  # remembered, beside the cached code
    for answer in answers:
        assert answer["fused"] == pytest.approx(answer["eager"], rel=1e-5)
    assert [a["hits"] for a in answers] == [0, 1]
    assert answers[0]["fused"] == answers[1]["fused"]


@pytest.mark.full  # a compile cache of its own
def test_switched_off_it_is_the_inner_backend_bit_for_bit(tmp_path):
    code = PROGRAM + (
        "print(json.dumps([result('fusedce'), torch._dynamo.utils.counters['fusedce'],"
        " (torch._dynamo.reset(), result('inductor'))[1]]))"
    )
    done = python(code, FUSEDCE="0", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    fused, counted, inductor = json.loads(done.stdout)
    assert fused == inductor
    assert counted == {}


@pytest.mark.full  # a compile cache of its own
def test_without_a_compiler_the_user_is_told_what_to_do(tmp_path):
    code = PROGRAM + (
        "import os, traceback\n"
        "try:\n"
        "    result('fusedce')\n"
        "except Exception:\n"
        "    traceback.print_exc()\n"
        "torch._dynamo.reset()\n"
        "os.environ['FUSEDCE_INNER'] = 'aot_eager'\n"
        "print(result('fusedce'))"  # and that helps
    )
    done = python(code, CXX=str(tmp_path / "none"), TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert "apt-get install g++" in done.stderr
    assert "FUSEDCE_INNER=aot_eager" in done.stderr
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusedce.nonsense": 1}, "fusedce.nonsense"),
        ({"fusedce.inner": "nobody"}, "nobody"),
        ({"fusedce.strategy": "fast"}, "auto, chunked"),
    ],
)
def test_a_wrong_option_says_so(options, message):
    model = Model()
    with pytest.raises(Exception, match=message) as caught:
        torch.compile(model, backend="fusedce", options=options)(*batch())
    cause = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(cause, ValueError)


def test_other_options_and_mode_reach_the_inner_backend():
    seen = {}

    @torch._dynamo.register_backend(name="fxpass_test_spy")
    def spy(gm, inputs, **kwargs):
        seen.update(kwargs)
        return gm.forward

    options = {"fusedce.inner": "fxpass_test_spy", "max_autotune": True}
    torch.compile(Model(), backend="fusedce", options=options)(*batch())
    assert seen == {"options": {"max_autotune": True}}
    torch._dynamo.reset()
    seen.clear()
    os.environ["FUSEDCE_INNER"] = "fxpass_test_spy"
    try:
        torch.compile(Model(), backend="fusedce", mode="max-autotune")(*batch())
    finally:
        del os.environ["FUSEDCE_INNER"]
    assert seen == {"mode": "max-autotune"}
    assert not counters["fusedce"]["matched"]  # of its joint graph there is no pass


@pytest.mark.parametrize("enabled", [True, False])
def test_the_name_of_a_region_reaches_an_inner_backend_that_takes_one(enabled, monkeypatch):
    """Newer releases of torch pass ``torch.compile(name=...)`` to backends as a keyword."""
    seen = []

    def takes(gm, inputs, *, name):
        seen.append(name)
        return gm.forward

    def takes_none(gm, inputs):
        seen.append(None)
        return gm.forward

    class Wrapper(torch._TorchCompileInductorWrapper):
        def __call__(self, gm, inputs):
            seen.append(self.name)
            return gm.forward

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Wrapper)
    for function in (takes, takes_none):
        monkeypatch.setitem(registry._BACKENDS, function.__name__, None)
        monkeypatch.setitem(registry._COMPILER_FNS, function.__name__, function)
        function._tags = ()
    for inner in ("takes", "takes_none", "inductor"):
        torch._dynamo.reset()
        options = {"fusedce.inner": inner, "fusedce.enabled": int(enabled)}
        backend = functools.partial(fusedce, options=options, name="head")
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert seen == ["head", None, "head"]


def test_an_option_that_inductor_does_not_know_is_inductors_own_error():
    inner = InnerBackend("inductor", options={"nothing": 1})
    with pytest.raises(Exception, match="Unexpected optimization option"):
        compile_inner(inner, torch.fx.symbolic_trace(Model().body), [])


# ---------------------------------------------------------------- several steps


@pytest.mark.parametrize(
    ("inner", "dynamic", "graphs"),
    [("aot_eager", True, 2), ("aot_eager", None, 2), ("inductor", True, 1)],
)
def test_varying_batch_and_length_compile_at_most_twice(inner, dynamic, graphs):
    model = Model()
    step = fused(model, inner, fullgraph=True, dynamic=dynamic)
    for b, s in [(2, 5), (3, 7), (4, 6), (7, 2), (5, 9)]:
        inputs = batch(b, s)
        assert_same(model, step(*inputs), model(*inputs))
    assert counters["stats"]["unique_graphs"] <= graphs
    assert counters["fusedce"]["matched"] == counters["stats"]["unique_graphs"]
    assert counters["fusedce"]["rejected"] == 0


def test_gradient_accumulation():
    model = Model()
    step = fused(model)
    sums = []
    for run in (step, model):
        torch.manual_seed(1)
        model.zero_grad()
        for _ in range(3):
            (run(*batch()) / 3).backward()
        sums.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*sums, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", "inductor"])
@torch._functorch.config.patch(donated_buffer=False)  # as torch says when a graph is retained
def test_a_retained_graph(inner):
    model, inputs = Model(), batch()
    step = fused(model, inner)
    eager = gradients(model, model(*inputs))
    for _ in range(2):  # once with a backward that is compiled now, once with the one from before
        loss = step(*inputs)
        model.zero_grad()
        for times in (1, 2, 3):
            loss.backward(retain_graph=times < 3)
            for p, b in zip(model.parameters(), eager, strict=True):
                torch.testing.assert_close(p.grad, times * b)


def retained(step) -> str:
    """How two backwards of a step end whose graph is retained."""
    model, inputs = Model(), batch()
    loss = step(model)(*inputs)
    try:
        loss.backward(retain_graph=True)
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@torch._inductor.config.patch(fx_graph_cache=False)  # torch leaves the setting out of its keys
@torch._functorch.config.patch(enable_autograd_cache=False)
def test_a_retained_graph_is_refused_where_the_inner_backend_refuses_it(inner):
    """Buffers that a backward graph donates to itself; torch says how to keep them."""
    alone = retained(lambda model: torch.compile(model, backend=inner))
    torch._dynamo.reset()
    assert retained(lambda model: fused(model, inner)) == alone


@pytest.mark.full  # a compile cache of its own
def test_buffers_stay_donated(tmp_path):
    """Compiling changes no setting of AOTAutograd, and the head's gradient is scaled in place."""
    code = PROGRAM + (
        "from torch._functorch import config\n"
        "from torch._inductor.utils import run_and_get_code\n"
        "before = config.save_config_portable()\n"
        "_, (_, backward) = run_and_get_code(result, 'fusedce')\n"
        "assert config.save_config_portable() == before\n"
        "print(backward.split('def call(')[1].count('empty_strided'))"
    )
    done = python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0"]


# torch 2.11 raises only where the backward graph reads a parameter; else its gradients have no graph
@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_second_derivative_is_refused(inner):
    message = "double backward|element 0 of tensors does not require grad"
    model, inputs = Model(), batch()
    loss = fused(model, inner)(*inputs)

    def penalty():
        (grad,) = torch.autograd.grad(loss, model.body.weight, create_graph=True)
        grad.sum().backward()

    with pytest.raises(RuntimeError, match=message):
        penalty()


def test_a_target_out_of_range_is_named():
    model, (x, labels) = Model(), batch()
    labels[0, 0] = V
    with pytest.raises(IndexError, match=f"class {V} is out of bounds"):
        fused(model)(x, labels)
