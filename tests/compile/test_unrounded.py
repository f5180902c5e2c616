"""f32 weights and hidden states under autocast: what their graphs hold, and several passes.

The values of one pass are held by tests/programs/rows/unrounded.py.
"""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from fxpass.testing import rewritten
from tests.programs.catalog import catalog
from tests.support.numerics import assert_close, error

# in float64
pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")
BF16, F32 = torch.bfloat16, torch.float32
ROWS = {row.name: row for row in catalog(kinds=["f32 under autocast"], libraries=False)}


def with_fusedce(program, inner):
    options = {"fusedce.min_logits_mb": 0, "fusedce.inner": inner}
    return torch.compile(program, backend="fusedce", options=options)


def steps(row, inner=None, count=1, retain=False, wide=False):
    """Losses, and the gradients after so many backward passes."""
    tensors, program = row.tensors(wide=wide), row.program(wide)
    program = with_fusedce(program, inner) if inner else program
    losses = []
    for _ in range(count):
        loss = program(*tensors)
        if retain:
            loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(t.grad for t in tensors if t.grad is not None)]


def as_accurate(row, inner="aot_eager", **how):
    got = steps(row, inner, **how)
    assert_close(got, steps(row, **how), steps(row, wide=True, **how), BF16)
    assert all(g.dtype == F32 for g in got)
    return got


@pytest.mark.parametrize("name", ROWS)
def test_gradients_bypass_the_casts(name):
    row = ROWS[name]
    text = rewritten(row.program(), *row.tensors())
    assert "wide_x=" in text
    assert ("wide_weight=" in text) == (name != "frozen")
    assert "= to(%" in text  # the casts are nodes


def test_what_the_program_casts_itself_is_rounded():
    """Its cast's gradient has 16 bits, as in eager."""

    def loss(x, weight, labels):
        return F.cross_entropy(F.linear(x.bfloat16(), weight.bfloat16()).float(), labels)

    x, weight = torch.randn(48, 32, requires_grad=True), torch.randn(97, 32, requires_grad=True)
    assert "wide_" not in rewritten(loss, x, weight, torch.randint(97, (48,)))


@pytest.mark.parametrize("name", ["no bias", "tied", "rows"])
def test_accumulated_gradients(name):
    as_accurate(ROWS[name], count=3)


@pytest.mark.parametrize("name", ["no bias", "tied", "rows"])
def test_retained_graphs(name):
    with torch._functorch.config.patch(donated_buffer=False):
        got = as_accurate(ROWS[name], retain=True)
    once = as_accurate(ROWS[name])
    for twice, one in zip(got[1:], once[1:], strict=True):
        assert error(twice, 2 * one) < 1e-6


def test_hooks_see_what_eager_gives_them():
    """One gradient of each parameter, in f32, as FSDP and DDP expect."""
    row, seen = ROWS["another linear"], []
    for program in (row.program(), with_fusedce(row.program(), "inductor")):
        found, tensors = [], row.tensors()
        for name, tensor in zip(row.names, tensors, strict=True):
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(
                    lambda p, name=name, found=found: found.append((name, p.grad.dtype, p.shape))
                )
        program(*tensors).backward()
        seen.append(sorted(found))
    assert seen[0] == seen[1]
    assert len(seen[0]) == len(row.gradients)


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
    row = ROWS["no bias"]
    as_accurate(row, inner="graphs")

    def of_head(graph):
        return [
            (node.target, node.meta["val"].dtype)
            for node in graph.nodes
            if node.op == "call_function"
            and isinstance(node.meta.get("val"), torch.Tensor)
            and tuple(node.meta["val"].shape) == (row.sizes.v, row.sizes.d)
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
