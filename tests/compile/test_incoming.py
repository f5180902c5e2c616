"""The loss's incoming gradient, nearly always 1: no pass over a large gradient of the weight."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._inductor.custom_graph_pass import CustomGraphPass

from tests.support.numerics import assert_close

N, D, V = 40, 1024, 1024  # a weight that is worth the operator


def loss_of(x, weight, labels):
    return F.cross_entropy(F.linear(torch.tanh(x), weight), labels)


def two_equal_losses(x, weight, labels):
    return loss_of(x, weight, labels) + 2 * loss_of(x, weight, labels)


def logits_beside(x, weight, labels):
    """A saved gradient is no output, whatever else is."""
    return loss_of(x, weight, labels), x * 2


class Kept(CustomGraphPass):
    """The user's own pass, after fxpass's: keeps the graphs of all compilations."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph):
        self.graphs.append(graph)

    def uuid(self):
        return None  # nothing is cached, so that it runs


def with_fusedce(program, kept=None, **options):
    torch._dynamo.reset()
    options = {"fusedce.min_logits_mb": 0, **options}
    if kept is not None:
        options["post_grad_custom_post_pass"] = kept
    return torch.compile(program, backend="fusedce", options=options)


def step(fn, x, weight, labels, factor, retain=0):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = fn(x, weight, labels)
    loss = (loss[0] if isinstance(loss, tuple) else loss) * factor
    found = [loss.detach()]
    for left in range(retain, -1, -1):
        found += torch.autograd.grad(loss, (x, weight), retain_graph=left > 0)
    return found


def as_accurate(fn, program, factor, dtype=torch.float32, retain=0):
    torch.manual_seed(0)
    x, weight, labels = torch.randn(N, D), torch.randn(V, D) * 0.1, torch.randint(V, (N,))
    labels[:5] = -100
    tensors = x.to(dtype), weight.to(dtype), labels
    exact = step(program, *(t.double() for t in tensors[:2]), labels, factor, retain)
    eager = step(program, *tensors, factor, retain)
    assert_close(step(fn, *tensors, factor, retain), eager, exact, dtype)


def calls(graph, name):
    return graph.find_nodes(op="call_function", target=getattr(torch.ops.fxpass, name).default)


FACTORS = (1.0, 0.25, torch.tensor(3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", [loss_of, logits_beside])
def test_the_saved_gradient_is_multiplied_in_place(program, dtype):
    """By an operator that ends at once if the factor is 1; nothing else reads it."""
    kept = Kept()
    fn = with_fusedce(program, kept)
    for factor in FACTORS:
        as_accurate(fn, program, factor, dtype)
    _, backward = kept.graphs
    (call,) = calls(backward, "scale_")
    saved, _ = call.args
    assert saved.op == "placeholder"
    assert tuple(saved.meta["val"].shape) == (V, D)
    assert set(saved.users) == {call, backward.output_node()}
    assert not calls(backward, "scaled")


def test_a_gradient_that_two_losses_share_is_not_overwritten():
    kept = Kept()
    fn = with_fusedce(two_equal_losses, kept)
    for factor in FACTORS:
        as_accurate(fn, two_equal_losses, factor)
    _, backward = kept.graphs
    saved = [call.args[0] for call in calls(backward, "scale_")]
    assert all(len(node.users) == 2 for node in saved)  # the call, and what it is returned as


def test_nor_is_one_that_is_retained():
    kept = Kept()
    with torch._functorch.config.patch(donated_buffer=False):
        fn = with_fusedce(loss_of, kept)
        for factor in FACTORS:
            as_accurate(fn, loss_of, factor, retain=2)
    _, backward = kept.graphs
    assert len(calls(backward, "scaled")) == 1
    assert not calls(backward, "scale_")


@pytest.mark.parametrize("inner", ["aot_eager", "eager"])
@pytest.mark.parametrize("retain", [0, 2])
def test_other_inner_backends(inner, retain):
    with torch._functorch.config.patch(donated_buffer=not retain):
        fn = with_fusedce(loss_of, **{"fusedce.inner": inner})
        for factor in FACTORS:
            as_accurate(fn, loss_of, factor, retain=retain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_compiled_autograd(inner):
    """One graph of forward's saved tensors, none of which it may overwrite."""
    torch.manual_seed(0)
    x, weight, labels = torch.randn(N, D), torch.randn(V, D) * 0.1, torch.randint(V, (N,))
    weight.requires_grad_()
    found = []
    for fn in (loss_of, with_fusedce(loss_of, **{"fusedce.inner": inner})):
        weight.grad = None
        loss = fn(x, weight, labels) * 0.5
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=inner)):
            loss.backward()
        found.append(weight.grad)
    torch.testing.assert_close(*found)
