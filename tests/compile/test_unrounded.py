"""f32 weights and hidden states under autocast: their gradients bypass the cast to 16 bits."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from fxpass.testing import rewritten
from tests.support.numerics import assert_close, error

BF16, F32 = torch.bfloat16, torch.float32
N, D, V = 48, 32, 120


class Model(nn.Module):
    """Linear, head and loss under autocast, with the features that a test asks for."""

    def __init__(self, what: str = ""):
        super().__init__()
        self.what = what
        self.embed, self.body, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        if what == "no bias":
            self.head.bias = None
        if what == "tied":
            self.head.weight = self.embed.weight
        if what == "frozen":
            self.head.weight.requires_grad_(False)

    def forward(self, ids, labels):
        exact = self.head.weight.dtype == torch.float64
        with torch.autocast("cpu", dtype=BF16, enabled=not exact):
            hidden = self.embed(ids)
            if self.what == "checkpoint":
                hidden = checkpoint(self.body, hidden, use_reentrant=False)
            else:
                hidden = self.body(hidden)
            hidden = F.layer_norm(hidden, (D,)) * 1.5
            hidden = hidden if exact else hidden.float()  # as of a final norm
            if self.what == "shifted":
                hidden, labels = hidden.view(4, -1, D)[:, :-1], labels.view(4, -1)[:, 1:]
            loss = F.cross_entropy(self.head(hidden).flatten(0, -2), labels.flatten())
            if self.what == "two losses":
                loss = loss + F.cross_entropy(self.head(hidden * 2), labels, reduction="sum") / 100
            if self.what == "another user":
                loss = loss + self.head.weight.square().mean()
            if self.what == "rows":
                loss = F.cross_entropy(self.head(hidden), labels, reduction="none")
                loss = (loss * torch.linspace(0, 1, N)).sum()
        return loss


WHAT = (
    *("", "no bias", "tied", "frozen", "shifted", "two losses", "another user", "rows"),
    "checkpoint",
)


def steps(model, fn, count=1, retain=False, set_to_none=True):
    """Losses, and the gradients after so many backward passes."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none)
    losses = []
    for _ in range(count):
        ids, labels = torch.randint(V, (N,)), torch.randint(V, (N,))
        labels[:3] = -100
        loss = fn(ids, labels)
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def made(what) -> Model:
    torch.manual_seed(1)
    return Model(what)


def check(what, strategy="auto", inner="aot_eager", **how):
    model, exact = made(what), made(what).double()
    options = {"fusedce.min_logits_mb": 0, "fusedce.strategy": strategy, "fusedce.inner": inner}
    compiled = torch.compile(model, backend="fusedce", options=options)
    got, eager = steps(model, compiled, **how), steps(model, model, **how)
    assert all(g.dtype == F32 for g in got)
    assert_close(got, eager, steps(exact, exact, **how), BF16)
    return got


def text_of(what, **options) -> str:
    ids = torch.randint(V, (N,))
    return rewritten(made(what), ids, ids)


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("strategy", ["auto", "tiled"])
def test_programs(what, strategy):
    check(what, strategy=strategy)
    text = text_of(what)
    assert "wide_x=" in text
    assert ("wide_weight=" in text) == (what != "frozen")
    assert "= to(%" in text  # the casts are nodes


@pytest.mark.parametrize("inner", ["inductor", "eager"])
@pytest.mark.parametrize("what", ["tied", "shifted", "rows"])
def test_inner_backends(what, inner):
    check(what, inner=inner)


@pytest.mark.parametrize("what", ["", "tied", "rows"])
def test_accumulated_gradients(what):
    check(what, count=3)


@pytest.mark.parametrize("what", ["", "tied", "rows"])
def test_retained_graphs(what):
    with torch._functorch.config.patch(donated_buffer=False):
        got = check(what, retain=True)
    once = check(what)
    for twice, one in zip(got[1:], once[1:], strict=True):
        assert error(twice, 2 * one) < 1e-6


def test_hooks_see_what_eager_gives_them():
    """One gradient of each parameter, in f32, as FSDP and DDP expect."""
    model = made("tied")
    seen = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((name, p.grad.dtype, p.grad.shape))
        )
    options = {"fusedce.min_logits_mb": 0}
    steps(model, torch.compile(model, backend="fusedce", options=options))
    fused = sorted(seen)
    seen.clear()
    steps(model, model)
    assert fused == sorted(seen)
    assert len(fused) == len(list(model.parameters()))


def test_what_the_program_casts_itself_is_rounded():
    """Its cast's gradient has 16 bits, as in eager."""

    def loss(x, weight, labels):
        return F.cross_entropy(F.linear(x.bfloat16(), weight.bfloat16()).float(), labels)

    x, weight = torch.randn(N, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    assert "wide_" not in rewritten(loss, x, weight, torch.randint(V, (N,)))


@pytest.fixture
def graphs():
    """AOTAutograd's graphs, forward and backward, of what is compiled with the backend "graphs"."""
    found = []

    def compiler(gm, _):
        found.append(gm.graph)
        return make_boxed_func(gm.forward)

    torch._dynamo.register_backend(aot_autograd(fw_compiler=compiler), name="graphs")
    yield found
    del torch._dynamo.backends.registry._BACKENDS["graphs"]
    del torch._dynamo.backends.registry._COMPILER_FNS["graphs"]


def test_nothing_has_the_weights_size_but_its_cast_and_its_gradient(graphs):
    """No gradient of 16 bits, no pass that casts one, and nothing reads the wide hidden states."""
    check("no bias", inner="graphs")

    def of_head(graph):
        return [
            (node.target, node.meta["val"].dtype)
            for node in graph.nodes
            if node.op == "call_function"
            and isinstance(node.meta.get("val"), torch.Tensor)
            and tuple(node.meta["val"].shape) == (V, D)
            and node.target is not torch.ops.aten.embedding_dense_backward.default
        ]

    forward, backward = graphs
    cast, gradient = of_head(forward)
    assert cast == (torch.ops.aten._to_copy.default, BF16)
    assert gradient == (operator.getitem, F32)
    # the product with the incoming gradient, of a small weight, is arithmetic
    assert {dtype for _, dtype in of_head(backward)} <= {F32, torch.bool}
    (call,) = forward.find_nodes(
        op="call_function", target=torch.ops.fxpass.class_reductions.default
    )
    assert not call.kwargs
