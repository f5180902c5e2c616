"""Deferred logits that are read, against the same program with logits that were computed at once."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxpass.deferred import values
from fxpass.deferred.tensor import DeferredLogits, defer
from tests.support.deferred_pairs import B, D, S, V, check, pair, recipe_of, same

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
    "no_rows": lambda t: t[:, S:],
    "no_classes": lambda t: t[..., V:].double(),
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
    check(p, LAZY[name])


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
        (lambda t: t.transpose(0, 1)[0], (B,)),
        (lambda t: t.transpose(1, 2)[:, :, 1], (B,)),
        (lambda t: t.float().transpose(1, 2).double()[:, 3], (B, S)),  # one class of all rows
        (lambda t: t[:, 1:].double().view(-1, V)[2:5], (3,)),
        (lambda t: t.view(B, S, 4, 4)[1, 2:4, 1:3], (2,)),
    ],
)
def test_only_the_rows_that_are_used_are_computed(fn, rows):
    p = pair()
    same(fn(p.logits).argmax(-1), fn(p.eager).argmax(-1))
    same(fn(p.logits).clone(), fn(p.eager).clone())
    assert math.prod(p.runs[0][:-1]) == math.prod(rows)


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


@pytest.mark.parametrize("rows", [(slice(None), -1), (1,), (0, 1), (slice(None), slice(1, 3))])
def test_rows_of_a_cast_are_cast_from_the_computed_logits(rows):
    p = pair()
    cast = p.logits.double()
    p.logits.sum()
    same(cast[rows] * 1, p.eager.double()[rows])
    assert p.runs == [(B, S, D)]


def test_many_rows_one_by_one_become_one_run():
    p = pair(seq=40)
    for i in range(40):
        same(p.logits[0, i].max(), p.eager[0, i].max())
    assert len(p.runs) == values.MOST_SEPARATE + 1
    assert p.runs[-1] == (B, 40, D)


# ---- both the loss and the logits are paid for ---------------------------------------------------


@torch.compile(backend="eager")
def best(logits):
    return logits.argmax(-1)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.argmax(-1),
        lambda t: t.detach().float().sum(),
        lambda t: t[:, :-1].max(),
        lambda t: t.detach().numpy(),
        lambda t: t[:, -1].detach().numpy(),  # an alias of the memory of all rows
        lambda t: t.clone(),
        lambda t: best(t),
        lambda t: t.detach().add_(1),
    ],
)
# Dynamo itself looks at the .grad of logits that enter a graph
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_line_that_computes_the_logits_is_named_once(read, caplog):
    for _ in range(2):
        p = pair()
        read(p.logits)
        assert p.runs == [(B, S, D)] or p.runs == [(1, B * (S - 1), D)]
    (record,) = (r for r in caplog.records if r.name.startswith("fxpass"))
    line = read.__code__.co_firstlineno
    assert record.levelname == "WARNING"
    assert f"tests/unit/deferred/test_reads.py:{line} lambda t: " in record.getMessage()
    assert "float32[2, 5, 16] of `logits = self.lm_head(x)`, which were" in record.getMessage()


def test_nothing_is_said_where_little_is_computed_or_nobody_asked(caplog):
    gc.collect()  # what others left would be computed at the step, too
    p = pair()
    for fn in LAZY.values():
        fn(p.logits)
    assert p.logits.shape == (B, S, V)
    repr(p.logits)
    p.logits[:, -1].argmax(-1)
    assert len(p.runs) == 1
    torch.optim.SGD(p.lazy_inputs, lr=1.0).step()
    assert p.runs[1:] == [(B, S, D)]  # they take less memory than what they are computed from
    p.logits.sum()
    with torch.no_grad():  # evaluation under FUSEDCE_LOGITS=defer
        recipe, runs = recipe_of()
        recipe = dataclasses.replace(recipe, requires_grad=False)
        defer(recipe, [t.detach() for t in p.lazy_inputs]).sum()
    assert runs
    assert not caplog.records


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
    "sparse": lambda t: t.to_sparse().to_dense(),
    "sparse of rows": lambda t: t[:, 1].to_sparse().to_dense(),
    "onednn": lambda t: t.to_mkldnn().to_dense(),
    "jagged": lambda t: (
        torch.nested.as_nested_tensor([t[0], t[1, :3]], layout=torch.jagged).values().clone()
    ),
    "list": lambda t: torch.stack(torch._foreach_mul([t[0], t[1]], 2)),
    "copied": lambda t: torch.zeros(B, S, V).copy_(t),
}


@pytest.mark.parametrize("name", OPS)
def test_operations_and_their_gradients(name):
    check(pair(), OPS[name], bits=False)
    if name == "reentrant":
        return  # warns where nothing requires a gradient
    with torch.no_grad():
        p = pair()
        assert not p.logits.requires_grad
        check(p, OPS[name], bits=False)
    with torch.inference_mode():
        check(pair(), OPS[name], bits=False)


def test_explicit_dtypes_hold_under_autocast():
    p = pair()
    with torch.autocast("cpu", torch.bfloat16):
        same(p.logits * 1, p.eager)  # would be wrong in the third digit
        grads = torch.autograd.grad(p.logits.sum(), p.lazy_inputs)
    same(grads, torch.autograd.grad(p.eager.sum(), p.eager_inputs), bits=False)


def test_logits_made_in_inference_mode_are_used_outside_and_the_other_way_round():
    with torch.inference_mode():
        inside = pair()
    same(inside.logits * 1, inside.eager)
    p = pair()
    with torch.inference_mode():
        same(p.logits.sum(), p.eager.sum(), bits=False)
        same(p.logits.detach() * 1, p.eager.detach())
        row, lazy_row = p.eager[:, -1], p.logits[:, -1]
    assert lazy_row.is_inference() == row.is_inference()
    same(lazy_row * 1, row)
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
    assert repr(p.logits).endswith("grad_fn=<AliasBackward0>)")
    torch.testing.assert_close(p.logits, p.eager)
    torch.testing.assert_close(p.eager, p.logits)
    assert p.logits.amax().item() == p.eager.amax().item()


def test_a_view_that_was_written_to_in_another_mode_is_shown():
    p = pair()
    with torch.no_grad():
        view = p.logits[0]
    p.logits.zero_()
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        _ = view.grad_fn
    assert repr(view).endswith("grad_fn=<Invalid>)")


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
    for to_dlpack in (torch.to_dlpack, torch.utils.dlpack.to_dlpack):
        same(torch.from_dlpack(to_dlpack(pair().logits.detach())), eager)
    logits.numpy()[0] = 7  # memory is shared, as in eager
    assert (p.logits[0] == 7).all()


def test_copies():
    with torch.inference_mode():
        p = pair()
        same(p.logits.detach_() * 1, p.eager)  # reaches the dispatcher there
    p = pair()
    for t in (p.logits, p.logits.detach(), p.logits[:, 1]):
        buffer = io.BytesIO()
        torch.save({"logits": t}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)["logits"]
        assert type(loaded) is type(pickle.loads(pickle.dumps(t))) is Tensor
        assert loaded.requires_grad == t.requires_grad
        same(loaded, t * 1)
        same(pickle.loads(pickle.dumps(t)), t * 1)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(p.logits)
    detached = p.logits.detach()
    deep, shallow = copy.deepcopy([detached, detached]), copy.copy(detached)
    assert deep[0] is deep[1]
    assert type(deep[0]) is type(shallow) is Tensor
    detached.zero_()
    same(deep[0], p.eager.detach())
    same(shallow, torch.zeros_like(p.eager))
