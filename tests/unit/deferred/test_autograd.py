"""Gradients of deferred logits by their recipe, rows of products, and logits that are dropped."""

from __future__ import annotations

import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxpass.deferred import run, tensor
from fxpass.deferred.tensor import DeferredLogits
from tests.support.deferred_pairs import B, D, S, V, check, exact, pair, recipe_of, same

INNER = {"fusedce.inner": "aot_eager"}


# ---- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_the_dtypes_of_the_inputs(dtype):
    check(pair(dtype), lambda t: t.float().logsumexp(-1), bits=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_many_rows_are_computed_in_parts(dtype, monkeypatch):
    monkeypatch.setattr(run, "CHUNK", 30 * V * dtype.itemsize)
    p, exactly = pair(dtype, seq=50), pair(torch.float64, seq=50)
    for logits in (p.logits, p.eager, exactly.eager):
        logits.double().logsumexp(-1).sum().backward()
    assert p.runs == [(2, 50, D), (1, 30, D), (1, 30, D), (1, 30, D), (1, 10, D)]
    every = zip(p.lazy_inputs, p.eager_inputs, exactly.eager_inputs, strict=True)
    for mine, theirs, of_exact in every:
        assert mine.grad.dtype == dtype
        error, of_eager = ((t.grad - of_exact.grad).abs().max() for t in (mine, theirs))
        assert error <= max(2 * of_eager, 1e-11)  # f64 is its own oracle


@pytest.mark.parametrize(("seq", "rows"), [(50, ()), (3, (0,))])
def test_gradients_that_gain_nothing_from_parts(seq, rows, monkeypatch):
    """The rows are unknown; the sums of the parts would take more memory than the logits."""
    monkeypatch.setattr(run, "CHUNK", V * 4)
    p = pair(seq=seq, rows=rows)
    check(p, lambda t: t.logsumexp(-1), bits=False)
    assert p.runs == [(2, seq, D)] * 2


def test_backward_of_the_logits_themselves():
    p = pair()
    grad = torch.randn(B, S, V)
    p.logits.backward(grad)
    p.eager.backward(grad)
    for mine, theirs in zip(p.lazy_inputs, p.eager_inputs, strict=True):
        same(mine.grad, theirs.grad, bits=False)


def test_autograd_grad_and_hooks():
    p = pair()
    seen = []
    for t in (p.logits, p.eager):
        t.retain_grad()
        t.register_hook(lambda g: seen.append(g) or g * 2)
        t[:, 1:].exp().sum().backward()
    same(seen[0], seen[1], bits=False)
    same(p.logits.grad, p.eager.grad, bits=False)
    same(p.weight.grad, p.eager_inputs[1].grad, bits=False)
    p = pair()
    got = torch.autograd.grad(p.logits.exp().sum(), [p.logits, *p.lazy_inputs])
    want = torch.autograd.grad(p.eager.exp().sum(), [p.eager, *p.eager_inputs])
    same(got, want, bits=False)


def test_backward_twice_and_frozen_weights():
    p = pair()
    for _ in range(2):
        p.logits.sum().backward(retain_graph=True)
        p.eager.sum().backward(retain_graph=True)
    same(p.weight.grad, p.eager_inputs[1].grad, bits=False)
    recipe, _ = recipe_of()
    x = torch.randn(3, D, requires_grad=True)
    frozen = tensor.defer(recipe, (x, torch.randn(V, D), torch.randn(V)))
    frozen.sum().backward()
    assert x.grad is not None
    assert not tensor.defer(recipe, (x.detach(), torch.randn(V, D), torch.randn(V))).requires_grad


def test_second_derivatives_are_refused():
    p = pair()
    (grad,) = torch.autograd.grad(p.logits.pow(2).sum(), p.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_logits_without_gradient_may_start_one():
    with torch.no_grad():
        p = pair()
    for t in (p.logits, p.eager):
        t.requires_grad_()
        t[:, 1].exp().sum().backward()
    same(p.logits.grad, p.eager.grad, bits=False)


def test_graph_inputs_that_are_numbers():
    recipe, _ = recipe_of(lambda x, weight, n: F.linear(x, weight) * n)
    x, weight = exact(3, D), exact(V, D).requires_grad_()
    logits = tensor.defer(recipe, (x, weight, 3))
    same(logits * 1, F.linear(x, weight) * 3)
    logits.sum().backward()
    assert weight.grad is not None


def test_an_error_of_a_read_prints_nothing_and_the_next_read_works(capfd):
    """Out of memory, which the program catches."""
    recipe, _ = recipe_of(lambda x, weight, size: x @ weight.t() + x.new_zeros(size).sum())
    x, weight = torch.randn(3, D), torch.randn(V, D, requires_grad=True)
    logits: Any = tensor.defer(recipe, (x, weight, 2**60))
    for read in (lambda: logits[0].argmax(), lambda: logits.backward(torch.ones(3, V))):
        with pytest.raises(RuntimeError, match=r"memory|Storage size"):
            read()
    assert capfd.readouterr() == ("", "")
    logits._part.run.inputs[2] = 1  # now there is enough
    same(logits.detach() * 1, x @ weight.detach().t())


def test_gradients_of_an_einsum_in_parts(monkeypatch):
    monkeypatch.setattr(run, "CHUNK", 5 * V * 4)
    recipe, runs = recipe_of(lambda x, w: 3 * torch.tanh(torch.einsum("bsd,dv->bsv", x, w)))
    x, weight = torch.randn(2, 30, D, requires_grad=True), torch.randn(D, V, requires_grad=True)
    want = torch.autograd.grad(recipe(x, weight).square().mean(), (x, weight))
    del runs[:]
    got = torch.autograd.grad(tensor.defer(recipe, (x, weight)).square().mean(), (x, weight))
    assert runs[1:] == [(1, 5, D)] * 12
    torch.testing.assert_close(got, want)


# ---- drop ----------------------------------------------------------------------------------------


def test_drop_answers_for_the_shape_and_raises_for_values():
    recipe, runs = recipe_of()
    x, weight, bias = torch.randn(B, S, D), torch.randn(V, D, requires_grad=True), torch.randn(V)
    held = weakref.ref(x)
    logits: Any = tensor.defer(recipe, (x, weight, bias), drop=True)
    del x
    assert held() is None
    assert logits.float()[:, -1].shape == (B, V)
    assert logits.requires_grad
    assert "lm_head" in repr(logits)
    weight.grad = torch.zeros_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()
    for use in (
        lambda: logits.sum(),
        lambda: logits.float()[:, -1].argmax(),
        lambda: logits.detach().numpy(),
        lambda: logits.tolist(),
        lambda: logits.mul_(2),
        lambda: pickle.dumps(logits),
        lambda: logits.backward(torch.ones(B, S, V)),
    ):
        with pytest.raises(RuntimeError, match=r"lm_head.*FUSEDCE_LOGITS=drop"):
            use()
    assert runs == []


# ---- rows of products ----------------------------------------------------------------------------

# the head of x [..., 4] and a weight [11, 4] or [4, 11]: the shapes, and rows
PRODUCTS: dict[str, tuple[Any, ...]] = {
    # its equation wants as many dimensions for some rows as for all
    "einsum": (
        *(lambda x, w: torch.einsum("bsd,dv->bsv", x, w), (2, 3, 4), (4, 11)),
        *(0, slice(0, 0), (0, slice(1, 3)), (slice(None), -1)),
    ),
    # an operand as any other
    "transposed": (lambda x, w: x @ w.t(), (8, 4), (11, 4), 2),
    # all rows are the weight of each
    "linear of itself": (lambda x, w: F.linear(x, x), (8, 5), (1,), 0, slice(1, 3), (1, 2)),
    "product with itself": (lambda x, w: x @ x.t(), (8, 5), (1,), 0, slice(1, 3), (1, 2)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_of_a_product(name):
    product, of_x, of_weight, *every = PRODUCTS[name]

    def program(x, weight, labels):
        logits = product(x, weight)
        return F.cross_entropy(logits.flatten(0, -2), labels), logits

    x, weight = (torch.randn(shape, requires_grad=True) for shape in (of_x, of_weight))
    args = x, weight, torch.arange(x.shape[:-1].numel())
    for rows in every:
        _, logits = torch.compile(program, backend="fusedce", options=INNER)(*args)
        assert isinstance(logits, DeferredLogits)
        same(logits[rows].clone(), program(*args)[1][rows], bits=False)


def test_a_row_of_a_transposed_weight_is_computed_alone():
    def program(x, weight, labels):
        logits = x @ weight.t()
        return F.cross_entropy(logits, labels), logits

    x, weight = torch.randn(8, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    labels = torch.randint(11, (8,))
    loss, logits = torch.compile(program, backend="fusedce", options=INNER)(x, weight, labels)
    want = program(x, weight, labels)[1].detach()
    same(logits[2].detach().clone(), want[2], bits=False)
    assert logits._part.buffer.value is None
    loss.backward()
    torch.optim.SGD([x, weight], lr=1.0).step()
    same(logits.detach().clone(), want, bits=False)
