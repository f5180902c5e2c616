"""Deferred logits against the same program with logits that were computed at once."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutputWithPast

from fxpass import deferred, deferred_values
from fxpass.deferred import DeferredLogits, Recipe, StaleLogitsError
from fxpass.deferred_inputs import fingerprint

B, S, D, V = 2, 5, 8, 16


def head(x, weight, bias):
    logits = F.linear(x, weight, bias)
    return 30 * torch.tanh(logits / 30)


def recipe_of(fn=head, rows=(0,)) -> tuple[Recipe, list[torch.Size]]:
    """A recipe and the shapes of the hidden states each time that it really ran."""
    graph, runs = torch.fx.symbolic_trace(fn), []
    forward = graph.forward

    def counted(*inputs):
        if not inputs[0].is_meta and type(inputs[0]) is Tensor:  # not to find the shape
            runs.append(inputs[0].shape)
        return forward(*inputs)

    graph.forward = counted
    return Recipe(graph, rows, "logits = self.lm_head(x)"), runs


@dataclass
class Pair:
    """The same logits twice: deferred and eager, each with leaves of its own."""

    logits: Any
    eager: Tensor
    runs: list[torch.Size]
    lazy_inputs: list[Tensor]
    eager_inputs: list[Tensor]

    @property
    def weight(self) -> Tensor:
        return self.lazy_inputs[1]


def pair(dtype=torch.float32, rows=(0,), seq=S, classes=V, weight_first=False) -> Pair:
    torch.manual_seed(0)
    values = [
        torch.randn(B, seq, D).to(dtype),
        torch.randn(classes, D).to(dtype),
        torch.randn(classes).to(dtype),
    ]
    lazy = [torch.nn.Parameter(v.clone()) for v in values]
    eager = [torch.nn.Parameter(v.clone()) for v in values]
    recipe, runs = recipe_of(rows=rows)
    logits = deferred.defer(recipe, (lazy[0] * 1, *lazy[1:]))
    return Pair(logits, head(eager[0] * 1, *eager[1:]), runs, lazy, eager)


def same(a, b, exact=True):
    if exact:
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    else:
        torch.testing.assert_close(a, b)


def check(p: Pair, fn, exact=True):
    """``fn`` gives the same values, and the same gradients of all inputs."""
    got, want = fn(p.logits), fn(p.eager)
    assert type(got) in (Tensor, DeferredLogits)
    assert got.requires_grad == want.requires_grad
    same(got * 1, want * 1, exact)
    if want.requires_grad:
        got.float().pow(2).sum().backward()
        want.float().pow(2).sum().backward()
        for mine, theirs in zip(p.lazy_inputs, p.eager_inputs, strict=True):
            assert mine.grad.dtype == mine.dtype
            same(mine.grad, theirs.grad, exact)


# ---- laziness ------------------------------------------------------------------------------------


def test_it_looks_like_the_logits_and_nothing_is_computed():
    p = pair()
    logits = p.logits
    assert isinstance(logits, Tensor)
    assert torch.is_tensor(logits)
    assert logits.shape == (B, S, V)
    assert logits.size(-1) == V
    assert len(logits) == B
    assert logits.stride() == p.eager.stride()
    assert logits.dtype is torch.float32
    assert logits.device == p.eager.device
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits.is_contiguous()
    assert "logits = self.lm_head(x)" in repr(logits)
    assert "not computed" in f"{logits}"
    same(torch.zeros_like(logits), torch.zeros_like(p.eager))
    assert logits.new_zeros(3).shape == (3,)
    assert p.runs == []


LAZY = {
    "float": lambda t: t.float(),
    "double": lambda t: t.double(),
    "half": lambda t: t.half(),
    "to": lambda t: t.to(torch.bfloat16),
    "type": lambda t: t.type(torch.float64),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "slice": lambda t: t[:, :-1],
    "strided": lambda t: t[:, ::2, :],
    "select": lambda t: t[:, -1, :],
    "one": lambda t: t[1, 2],
    "ellipsis": lambda t: t[..., 1:, :],
    "classes": lambda t: t[..., :7],
    "cell": lambda t: t[0, 1, 2],
    "view": lambda t: t.view(-1, V),
    "reshape": lambda t: t[:1].reshape(-1, V),
    "view_slice": lambda t: t.view(-1, V)[3:7],
    "split_classes": lambda t: t.view(B, S, 4, 4)[:, :, 1],
    "unsqueeze": lambda t: t[:, -1].unsqueeze(1),
    "squeeze": lambda t: t[:, -1:].squeeze(1),
    "transpose": lambda t: t.transpose(1, 2),
    "transposed_slice": lambda t: t.transpose(1, 2)[:, 3],
    "cast_slice": lambda t: t.half()[:, -1].float()[1:],
    "none": lambda t: t[None, :, -1],
    "flatten": lambda t: t.flatten(0, 1),
    "narrow": lambda t: t.narrow(1, 1, 2),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("rows", [(0,), ()])
def test_casts_and_views_stay_lazy(name, rows):
    p = pair(rows=rows)
    got, want = LAZY[name](p.logits), LAZY[name](p.eager)
    assert type(got) is DeferredLogits
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert got.storage_offset() == want.storage_offset()
    assert p.runs == []
    # rows alone go through another kernel than all of them
    check(p, LAZY[name], exact=not rows or name in ("float", "detach", "view"))


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (lambda t: t[:, -1, :], (B,)),
        (lambda t: t.float()[:, -1].half(), (B,)),
        (lambda t: t[:, -1].float(), (B,)),
        (lambda t: t.detach()[1][2:4], (2,)),
        (lambda t: t.view(-1, V)[3:7], (4,)),
        (lambda t: t.unsqueeze(0)[0, :, -2:], (B, 2)),
        (lambda t: t[..., :7], (B, S)),
        (lambda t: t[:, -1, :7], (B,)),
        (lambda t: t.transpose(0, 1)[0], (B, S)),  # not a step on rows: everything
    ],
)
def test_only_the_rows_that_are_used_are_computed(fn, rows):
    p = pair()
    same(fn(p.logits).argmax(-1), fn(p.eager).argmax(-1))
    same(fn(p.logits).clone(), fn(p.eager).clone(), exact=False)
    assert p.runs[0] == (*rows, D)


def test_without_rows_everything_is_computed_once():
    p = pair(rows=())
    p.logits[:, -1].argmax(-1)
    p.logits[:, 0].argmax(-1)
    p.logits.sum()
    assert p.runs == [(B, S, D)]


def test_computed_once():
    p = pair()
    first, second = p.logits.float(), p.logits.detach()
    for t in (p.logits, second, p.logits[:, 1], first, first.double()):
        t.sum()
        t.argmax()
    assert p.runs == [(B, S, D)]


def test_many_rows_one_by_one_become_one_run():
    p = pair(seq=40)
    for i in range(40):
        same(p.logits[0, i].max(), p.eager[0, i].max(), exact=False)
    assert len(p.runs) == deferred_values.CUTS + 1
    assert p.runs[-1] == (B, 40, D)


# ---- every other operation -----------------------------------------------------------------------

LABELS = torch.arange(B * S).view(B, S) % V
OPS = {
    "cross_entropy": lambda t: F.cross_entropy(t.view(-1, V), LABELS.view(-1)),
    "shifted": lambda t: F.cross_entropy(
        t[..., :-1, :].contiguous().view(-1, V).float(), LABELS[..., 1:].reshape(-1)
    ),
    "padded": lambda t: F.pad(t, (0, 3), value=-1.0),
    "softmax": lambda t: torch.softmax(t, -1),
    "log_softmax": lambda t: t.log_softmax(-1),
    "last": lambda t: t[:, -1].softmax(-1),
    "argmax": lambda t: t.argmax(-1),
    "last argmax": lambda t: t[:, -1].argmax(-1),
    "stack": lambda t: torch.stack([t, t * 2]),
    "cat": lambda t: torch.cat((t[:, :1], t[:, -1:]), 1),
    "left": lambda t: 2 - t,
    "right": lambda t: t / 3,
    "tensor left": lambda t: torch.ones(V) * t,
    "self": lambda t: t * t + t,
    "matmul": lambda t: t @ torch.ones(V, 3),
    "einsum": lambda t: torch.einsum("bsv,v->bs", t, torch.ones(V)),
    "mask": lambda t: t[LABELS > 3],
    "index": lambda t: t[torch.arange(B), torch.tensor([1, 2])],
    "gather": lambda t: t.gather(-1, LABELS[..., None]),
    "where": lambda t: torch.where(t > 0, t, torch.zeros(())),
    "compare": lambda t: t > 0,
    "topk": lambda t: t.topk(3).values,
    "unbind": lambda t: t.unbind(1)[2],
    "chunk": lambda t: t.chunk(2, -1)[1],
    "split of rows": lambda t: t[:, 1].split(4, -1)[1],
    "expand": lambda t: t[:, :1].expand(B, 3, V),
    "diagonal": lambda t: t.diagonal(0, 1, 2),
    "contiguous": lambda t: t[:, 1:].contiguous(),
    "clone": lambda t: t.clone(),
    "mean": lambda t: t.mean(),
    "norm": lambda t: torch.linalg.vector_norm(t),
    "cpu": lambda t: t.cpu(),
    "as_strided": lambda t: t.as_strided((2, 3), (1, 7), 4),
    "rows as_strided": lambda t: t[:, 1].as_strided((2, 3), (1, 7), 4),
    "dropout": lambda t: F.dropout(t, 0.0),
    "checkpoint": lambda t: checkpoint(lambda a: a.exp().sum(-1), t, use_reentrant=False),
    "reentrant": lambda t: checkpoint(lambda a: a.exp().sum(-1), t, use_reentrant=True),
    "vmap": lambda t: torch.vmap(lambda a: a.sum(-1))(t),
}


@pytest.mark.parametrize("name", OPS)
def test_operations_and_their_gradients(name):
    exact = name not in ("shifted", "last", "split of rows", "expand", "cat", "contiguous")
    check(pair(), OPS[name], exact)
    if name == "reentrant":
        return  # warns where nothing requires a gradient
    with torch.no_grad():
        p = pair()
        assert not p.logits.requires_grad
        check(p, OPS[name], exact)
    with torch.inference_mode():
        check(pair(), OPS[name], exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_have_the_dtypes_of_the_inputs(dtype):
    check(pair(dtype), lambda t: t.float().logsumexp(-1))


def test_explicit_dtypes_hold_under_autocast():
    p = pair()
    with torch.autocast("cpu", torch.bfloat16):
        same(p.logits * 1, p.eager)  # would be wrong in the third digit
        grads = torch.autograd.grad(p.logits.sum(), p.lazy_inputs)
    same(grads, torch.autograd.grad(p.eager.sum(), p.eager_inputs))


def test_logits_made_in_inference_mode_are_used_outside_and_the_other_way_round():
    with torch.inference_mode():
        inside = pair()
    same(inside.logits * 1, inside.eager)
    p = pair()
    with torch.inference_mode():
        same(p.logits.sum(), p.eager.sum())
    p.logits.mul_(2)  # the values are no inference tensors
    p.eager.mul_(2)
    check(p, lambda t: t * 3)


def test_python_protocols():
    p = pair()
    for mine, theirs in zip(p.logits, p.eager, strict=True):
        same(mine, theirs)
    assert f"{p.logits[0, 0, 3]:.4f}" == f"{p.eager[0, 0, 3]:.4f}"
    assert float(p.logits.detach()[0, 0, 3]) == float(p.eager.detach()[0, 0, 3])
    assert p.logits.tolist() == p.eager.tolist()
    assert bool((p.logits == p.eager).all())
    assert repr(p.logits.detach()) == repr(p.eager.detach())  # computed by now, so shown
    assert repr(p.logits).endswith("grad_fn=<_AttachBackward>)")
    torch.testing.assert_close(p.logits, p.eager)
    torch.testing.assert_close(p.eager, p.logits)
    assert p.logits.sum().item() == p.eager.sum().item()


def test_numpy_and_other_ways_to_the_memory():
    p = pair()
    with pytest.raises(RuntimeError, match="requires grad"):
        p.logits.numpy()
    logits, eager = p.logits.detach(), p.eager.detach()
    for got, want in [
        (logits.numpy(), eager.numpy()),
        (np.asarray(logits), eager.numpy()),
        (p.logits.numpy(force=True), eager.numpy()),
        (np.from_dlpack(logits), eager.numpy()),
        (logits.cpu().numpy(), eager.numpy()),
        (logits[:, 1].numpy(), eager[:, 1].numpy()),
    ]:
        np.testing.assert_array_equal(got, want)
    assert logits.data_ptr() == p.logits.data_ptr() == logits.untyped_storage().data_ptr()
    assert logits[:, 1].data_ptr() == logits.data_ptr() + V * 4
    same(torch.from_dlpack(logits), eager)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(pair().logits.detach())  # C++ that asks for memory
    logits.numpy()[0] = 7  # memory is shared, as in eager
    assert (p.logits[0] == 7).all()


def test_copies():
    p = pair()
    for t in (p.logits, p.logits.detach(), p.logits[:, 1]):
        buffer = io.BytesIO()
        torch.save({"logits": t}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)["logits"]
        assert type(loaded) is type(pickle.loads(pickle.dumps(t))) is Tensor
        assert loaded.requires_grad == t.requires_grad
        same(loaded, t * 1, exact=False)
        same(pickle.loads(pickle.dumps(t)), t * 1, exact=False)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(p.logits)
    detached = p.logits.detach()
    deep, shallow = copy.deepcopy([detached, detached]), copy.copy(detached)
    assert deep[0] is deep[1]
    assert type(deep[0]) is type(shallow) is Tensor
    detached.zero_()
    same(deep[0], p.eager.detach())
    same(shallow, torch.zeros_like(p.eager))


# ---- autograd ------------------------------------------------------------------------------------


def test_backward_of_the_logits_themselves():
    p = pair()
    grad = torch.randn(B, S, V)
    p.logits.backward(grad)
    p.eager.backward(grad)
    for mine, theirs in zip(p.lazy_inputs, p.eager_inputs, strict=True):
        same(mine.grad, theirs.grad)


def test_autograd_grad_and_hooks():
    p = pair()
    seen = []
    for t in (p.logits, p.eager):
        t.retain_grad()
        t.register_hook(lambda g: seen.append(g) or g * 2)
        t[:, 1:].exp().sum().backward()
    same(seen[0], seen[1])
    same(p.logits.grad, p.eager.grad)
    same(p.weight.grad, p.eager_inputs[1].grad)
    p = pair()
    got = torch.autograd.grad(p.logits.exp().sum(), [p.logits, *p.lazy_inputs])
    want = torch.autograd.grad(p.eager.exp().sum(), [p.eager, *p.eager_inputs])
    same(got, want)


def test_backward_twice_and_frozen_weights():
    p = pair()
    for _ in range(2):
        p.logits.sum().backward(retain_graph=True)
        p.eager.sum().backward(retain_graph=True)
    same(p.weight.grad, p.eager_inputs[1].grad)
    recipe, _ = recipe_of()
    x = torch.randn(3, D, requires_grad=True)
    frozen = deferred.defer(recipe, (x, torch.randn(V, D), torch.randn(V)))
    frozen.sum().backward()
    assert x.grad is not None
    assert not deferred.defer(recipe, (x.detach(), torch.randn(V, D), torch.randn(V))).requires_grad


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
    same(p.logits.grad, p.eager.grad, exact=False)


def test_graph_inputs_that_are_numbers():
    recipe, _ = recipe_of(lambda x, weight, n: F.linear(x, weight) * n)
    x, weight = torch.randn(3, D), torch.randn(V, D, requires_grad=True)
    logits = deferred.defer(recipe, (x, weight, 3))
    same(logits * 1, F.linear(x, weight) * 3)
    logits.sum().backward()
    assert weight.grad is not None


# ---- writes --------------------------------------------------------------------------------------

WRITES = {
    "mul_": lambda t: t.mul_(2),
    "setitem": lambda t: t.__setitem__((..., 3), -float("inf")),
    "mask": lambda t: t.__setitem__(t > 1, 0.5),
    "row": lambda t: t[0].zero_(),
    "cell": lambda t: t[0, 1, 2].fill_(9),
    "view": lambda t: t.view(-1, V)[2:4].add_(1),
    "plain view": lambda t: t.unbind(0) and t.diagonal(0, 1, 2).zero_(),
    "copy_": lambda t: t.copy_(torch.ones(V)),
    "augmented": lambda t: t.__imul__(3),
    "detached": lambda t: t.detach().mul_(3),
    "data": lambda t: t.data.mul_(3),
    "foreach": lambda t: torch._foreach_mul_([t.detach()], 2),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_are_seen_by_every_alias_and_no_copy(name):
    """Relatives that were made before, lazy or computed, and the gradients after."""
    for touched in (False, True):
        p = pair()
        results = []
        for t in (p.logits, p.eager):
            alias, last, cast = t.detach(), t[:, -1], t.double()
            row = t.detach()[0]
            if touched:
                assert last.detach().argmax(-1).shape == (B,)  # computed apart
                cast.detach()[0].sum()
            WRITES[name](t)
            results.append([t * 1, alias * 1, last * 1, row * 1, cast * 1])
        same(*results, exact=not touched)
        if results[1][0].requires_grad and name not in ("copy_",):
            finite = [torch.where(r[0].isfinite(), r[0], 0).sum() for r in results]
            got = torch.autograd.grad(finite[0], p.lazy_inputs)
            want = torch.autograd.grad(finite[1], p.eager_inputs)
            same(got, want, exact=False)


def test_out_argument():
    with torch.no_grad():
        p = pair()
        alias = p.logits[0]
        result = torch.mul(torch.ones(B, S, V), 4, out=p.logits)
        assert result is p.logits
        assert (alias == 4).all()


def test_a_cast_keeps_its_values_when_its_source_is_written_to_through_numpy():
    p = pair()
    cast, detached = p.logits.double(), p.logits.detach()
    detached.numpy()[:] = 0
    same(cast * 1, p.eager.double())
    assert not detached.any()


def test_rows_that_were_seen_keep_their_bits_when_the_rest_is_computed():
    p = pair()
    last = p.logits[:, -1]
    before = last.clone()
    whole = p.logits.detach().numpy()
    last.detach().mul_(2)
    same(last * 1, before * 2)
    np.testing.assert_array_equal(whole[:, -1], (before * 2).detach().numpy())


def test_writes_that_change_the_shape_are_refused():
    with torch.no_grad():
        p = pair()
    with pytest.raises(RuntimeError, match="FUSEDCE_LOGITS=keep"):
        p.logits.t_() if p.logits.dim() == 2 else p.logits.transpose_(0, 1)
    with pytest.raises(RuntimeError, match="FUSEDCE_LOGITS=keep"):
        p.logits.resize_(3)
    with pytest.raises(RuntimeError, match="FUSEDCE_LOGITS=keep"):
        p.logits.data = torch.zeros(3)


# ---- changes of the inputs -----------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.detach().mul_(2),
        lambda t: t.data.mul_(2),
        lambda t: t.data.neg_(),
        lambda t: t.data.copy_(t.data.flip(0).clone()),
        lambda t: t.data.view(-1)[3].add_(1e-5),
        lambda t: t.data.numpy().fill(0),
    ],
)
def test_a_changed_input_is_an_error_that_says_what_to_do(index, change):
    recipe, _ = recipe_of()
    inputs = [torch.randn(3, D), torch.randn(V, D), torch.randn(V)]
    inputs = [t.requires_grad_() for t in inputs]
    logits, early = deferred.defer(recipe, inputs), deferred.defer(recipe, inputs)
    late, want = early[0], early.clone()
    change(inputs[index])
    shape = str(list(inputs[index].shape)).replace("[", r"\[").replace("]", r"\]")
    message = rf"(?s)lm_head.*float32 tensor of shape {shape}.*clone\(\).*FUSEDCE_LOGITS=keep"
    for use in (
        lambda: logits.sum(),
        lambda: logits[0].argmax(),
        lambda: logits.float().double()[:1] + 1,
        lambda: logits.backward(torch.ones(3, V)),
        lambda: early.sum().backward(),
    ):
        with pytest.raises(StaleLogitsError, match=message):
            use()
    same(early * 1, want)  # they were computed in time
    same(late * 1, want[0])


def test_a_weight_that_is_replaced_keeps_its_old_values():
    p = pair()
    p.weight.data = torch.zeros(V, D)
    check(p, lambda t: t * 1)


def test_freed_memory_is_an_error():
    recipe, _ = recipe_of()
    weight = torch.randn(V, D)
    logits = deferred.defer(recipe, (torch.randn(3, D), weight, torch.randn(V)))
    weight.untyped_storage().resize_(0)
    with pytest.raises(StaleLogitsError, match="was freed"):
        logits.sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t,
        lambda t: t.t(),
        lambda t: t[:, 1:],
        lambda t: t[::2],
        lambda t: t[1:],
        lambda t: t[0],
        lambda t: t[0, 0],
        lambda t: t[:0],
    ],
)
@pytest.mark.parametrize("columns", [32, 33])
def test_fingerprints(dtype, layout, columns):
    base = torch.randn(130, columns).to(dtype)
    t = layout(base)
    before = fingerprint(t)
    assert torch.equal(before, fingerprint(t))
    for position in {0, t.numel() // 2, t.numel() - 1} if t.numel() else ():
        changed = layout(base.clone())
        where = np.unravel_index(position, t.shape)
        changed[where] = changed[where].mul(2) + 1
        assert not torch.equal(before, fingerprint(changed))
    if t.dim() == 2 and t.numel():
        assert not torch.equal(before, fingerprint(-t))
        assert not torch.equal(before, fingerprint(t.flip(0)))
    assert before.numel() <= max(t.numel() // 8 + 8 * 256, 130)


# ---- optimizers ----------------------------------------------------------------------------------


def held_memory(t: DeferredLogits) -> Tensor:
    origin = t._part.origin
    assert origin
    return origin.held[1].tensor


@pytest.mark.parametrize("fused", ["foreach", "master", "data"])
def test_an_optimizer_step_changes_nothing(fused):
    """Large logits: the weights are cloned, one clone for all, and gradients reach the weights."""
    p = pair(seq=40)
    recipe, runs = recipe_of()
    second = deferred.defer(recipe, (p.lazy_inputs[0] * 2, *p.lazy_inputs[1:]))
    cast, last = p.logits.double(), p.logits[:, -1]
    for t in p.lazy_inputs:
        t.grad = torch.ones_like(t)
    x, *stepped = p.lazy_inputs
    if fused == "foreach":
        torch.optim.AdamW(stepped, lr=0.1, foreach=True).step()
    else:
        masters = [t.detach().double() for t in stepped]
        for t in masters:
            t.grad = torch.ones_like(t)
        torch.optim.SGD(masters, lr=0.1).step()  # does not hold the weights
        for t, master in zip(stepped, masters, strict=True):
            (t.data if fused == "data" else t.detach()).copy_(master)
    x.grad = None
    for t in stepped:
        t.grad = None
    assert p.runs == runs == []
    assert held_memory(p.logits) is held_memory(second) is held_memory(cast)
    same(cast * 1, p.eager.double())
    same(last * 1, p.eager[:, -1], exact=False)
    check(p, lambda t: t.exp())


def test_small_logits_are_computed_before_an_optimizer_step():
    p = pair(seq=1)
    cast = p.logits.double()
    p.weight.grad = torch.ones_like(p.weight)
    torch.optim.SGD([p.weight], lr=0.1).step()
    assert p.runs == [(B, 1, D)]
    same(p.logits * 1, p.eager)
    same(cast * 1, p.eager.double())


def test_two_optimizer_steps_and_logits_of_each():
    p = pair(seq=40)
    optimizer = torch.optim.SGD(p.lazy_inputs, lr=0.1)
    recipe, _ = recipe_of()
    kept, wanted = [], []
    for _ in range(3):
        kept.append(deferred.defer(recipe, [p.lazy_inputs[0] * 1, *p.lazy_inputs[1:]]))
        wanted.append(head(*p.lazy_inputs).detach())
        kept[-1][:, 0].sum().backward()
        optimizer.step()
    for got, want in zip(kept, wanted, strict=True):
        same(got.detach() * 1, want)


def test_logits_that_are_not_alive_cost_nothing_at_a_step():
    p = pair(seq=40)
    p.logits = None
    assert not [q for q in deferred_values.pending() if q.like.shape == (B, 40, V)]


def test_a_changed_weight_does_not_break_the_optimizer():
    for seq in (1, 40):
        p = pair(seq=seq)
        p.weight.data.mul_(2)
        p.weight.grad = torch.zeros_like(p.weight)
        torch.optim.SGD([p.weight], lr=0.1).step()
        with pytest.raises(StaleLogitsError):
            p.logits.sum()


# ---- lifetime ------------------------------------------------------------------------------------


def test_unused_logits_are_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        p = pair()
        recipe, _ = recipe_of()
        x = p.lazy_inputs[0] * 1
        hidden, logits = weakref.ref(x), deferred.defer(recipe, (x, *p.lazy_inputs[1:]))
        storage = x.untyped_storage()
        held = weakref.ref(logits._part.origin.held[0])
        relatives = [logits.float(), logits[:, -1], logits.detach(), logits.double().view(-1, V)]
        relatives += [relatives[1].argmax(-1), relatives[3][1:].sum(), *logits.unbind(0)]
        relatives[2].mul_(2)
        part = weakref.ref(logits._part)
        del x, storage, logits, relatives
        assert part() is None
        assert held() is None
        assert hidden() is None
    finally:
        gc.enable()


def test_hidden_states_are_released_once_the_logits_are_computed():
    with torch.no_grad():
        p = pair()
    held = weakref.ref(p.logits._part.origin.held[0])
    alias, row = p.logits.detach(), p.logits[0]
    p.logits.sum()
    assert held() is None
    same(alias * 1, p.eager)
    same(row * 1, p.eager[0])


def test_threads():
    """Many at once make, use, drop and settle; the same values as one after the other."""
    p = pair(seq=40)
    recipe, _ = recipe_of()
    inputs = [t.detach() for t in p.lazy_inputs]
    want, errors = p.eager.detach(), []
    shared = deferred.defer(recipe, inputs)

    def work():
        try:
            for i in range(20):
                own = deferred.defer(recipe, inputs)
                same(own[:, i % 40].double() * 1, want[:, i % 40].double(), exact=False)
                torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
                same(own * 1, want)
                same(shared * 1, want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert shared._part.origin is None


# ---- what frameworks do with the output ----------------------------------------------------------


def test_in_a_model_output():
    p = pair()
    out = CausalLMOutputWithPast(loss=torch.zeros(()), logits=p.logits)
    assert out.logits is out["logits"] is out[1] is p.logits
    converted = pytree.tree_map(lambda t: t.float() if t.is_floating_point() else t, dict(out))
    half = CausalLMOutputWithPast(logits=p.logits.half())
    # accelerate's ConvertOutputsToFp32
    upcast = type(half)({k: v.float() for k, v in half.items()})
    assert converted["logits"] is p.logits
    repr(out)
    pytree.tree_leaves(out)
    assert p.runs == []
    same(upcast.logits * 1, p.eager.half().float())


def test_distributed_data_parallel_finds_it(tmp_path):
    from torch.nn.parallel.distributed import _find_tensors

    p = pair()
    assert any(t is p.logits for t in _find_tensors({"logits": p.logits}))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        gathered = [torch.zeros(B, S, V)]
        torch.distributed.all_gather(gathered, p.logits.detach())
        same(gathered[0], p.eager.detach())
        double = p.logits.detach().double()
        torch.distributed.all_reduce(double)
        same(double * 1, p.eager.detach().double())
    finally:
        torch.distributed.destroy_process_group()


def test_subclasses_among_the_inputs_are_computed_at_once():
    p = pair()
    recipe, _ = recipe_of(lambda x: x * 2)
    again = deferred.defer(recipe, (p.logits,))
    assert type(again) is Tensor
    same(again, p.eager * 2)


def test_layout_follows_dynamic_shapes():
    recipe, runs = recipe_of()
    weight, bias = torch.randn(V, D), torch.randn(V)
    for rows in (*range(1, 300), 5):
        assert deferred.defer(recipe, (torch.randn(rows, D), weight, bias)).shape == (rows, V)
    assert runs == []


# ---- drop ----------------------------------------------------------------------------------------


def test_drop_answers_for_the_shape_and_raises_for_values():
    recipe, runs = recipe_of()
    x, weight, bias = torch.randn(B, S, D), torch.randn(V, D, requires_grad=True), torch.randn(V)
    held = weakref.ref(x)
    logits: Any = deferred.drop(recipe, (x, weight, bias))
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


# ---- the next compiled function ------------------------------------------------------------------

# Dynamo asks every tensor for its .grad, and hides the warning in a way that "error" is in.
asks_grad = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

COMPILED = {
    "loss": lambda t: F.cross_entropy(
        t.view(-1, V).float(), torch.zeros(t.shape[0] * t.shape[1], dtype=torch.long)
    ),
    "rows": lambda t: t[:, -1].float().logsumexp(-1),
    "view": lambda t: t[:, 1:],
    "itself": lambda t: t,
    "detach": lambda t: t.detach(),
    "cast": lambda t: t.half(),
}
BEFORE = {
    "whole": lambda t: t,
    "slice": lambda t: t[:, -2:],
    "cast": lambda t: t.double(),
    "computed": lambda t: (t.sum(), t)[1],
}


@asks_grad
@pytest.mark.parametrize(
    ("before", "name", "dynamic", "grad"),
    [
        *(("whole", name, None, True) for name in COMPILED),
        ("slice", "rows", None, True),
        ("slice", "view", True, True),
        ("slice", "itself", True, False),
        ("cast", "loss", True, True),
        ("cast", "view", None, False),
        ("computed", "rows", True, True),
        ("computed", "itself", None, False),
    ],
)
def test_compiled_functions_take_it(before, name, dynamic, grad):
    fn = torch.compile(COMPILED[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        for seq in (5, 7):  # the second is compiled with a symbolic size
            p = pair(seq=seq)
            got, want = fn(BEFORE[before](p.logits)), COMPILED[name](BEFORE[before](p.eager))
            assert got.requires_grad == want.requires_grad
            same(got * 1, want * 1)
            if want.requires_grad:
                got.float().pow(2).sum().backward()
                want.float().pow(2).sum().backward()
                same(p.weight.grad, p.eager_inputs[1].grad)


@asks_grad
def test_inductor_takes_it():
    p = pair()
    fn = torch.compile(COMPILED["loss"], fullgraph=True)
    got, want = fn(p.logits), COMPILED["loss"](p.eager)
    same(got, want, exact=False)
    got.backward()
    want.backward()
    same(p.weight.grad, p.eager_inputs[1].grad, exact=False)


def test_compiled_functions_check_the_inputs():
    recipe, _ = recipe_of()
    weight = torch.randn(V, D)
    fn = torch.compile(lambda t: t * 2, backend="aot_eager", fullgraph=True)
    for compiled in (False, True):
        inputs = torch.randn(3, D), weight, torch.randn(V)
        logits = deferred.defer(recipe, inputs)
        if compiled:
            weight.data.mul_(2)
            with pytest.raises(RuntimeError, match="FUSEDCE_LOGITS=keep"):
                fn(logits)
        else:
            same(fn(logits), head(*inputs) * 2)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_functions_write_to_it(dynamic):
    def fn(t, alias):
        t.mul_(2)
        return alias * 1

    with torch.no_grad():
        p = pair()
        got = torch.compile(fn, backend="aot_eager", dynamic=dynamic)(p.logits, p.logits[:, -1])
        same(got, fn(p.eager, p.eager[:, -1]))
        same(p.logits * 1, p.eager)


@asks_grad
def test_use_between_the_graphs_of_a_compiled_function():
    def fn(t):
        total = t.sum()
        torch._dynamo.graph_break()
        return total, t.detach().numpy().copy(), t.float()[:, 0].argmax(-1), torch.softmax(t, -1)

    p = pair()
    got, want = torch.compile(fn, backend="aot_eager")(p.logits), fn(p.eager)
    np.testing.assert_array_equal(got[1], want[1])
    same((got[0], *got[2:]), (want[0], *want[2:]))


def test_a_compiled_optimizer_step_changes_nothing():
    p = pair(seq=40)
    optimizer = torch.optim.SGD([p.weight], lr=torch.tensor(0.1))
    p.weight.grad = torch.ones_like(p.weight)
    torch.compile(optimizer.step, backend="aot_eager")()
    assert not torch.equal(p.weight, p.eager_inputs[1])
    same(p.logits * 1, p.eager)
