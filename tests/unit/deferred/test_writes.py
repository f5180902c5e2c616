"""Deferred logits when somebody writes: to them, to their inputs, or an optimizer to the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fxpass import messages
from fxpass.deferred import tensor
from fxpass.deferred.tensor import StaleLogitsError
from tests.support.deferred_pairs import B, D, S, V, check, pair, recipe_of, same

# ---- writes --------------------------------------------------------------------------------------


class Subclass(Tensor):
    pass


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
    "apply_": lambda t: t.detach()[0].apply_(lambda v: v * 2 + 1),
    "map_": lambda t: t.detach().map_(torch.ones(V), lambda v, w: v + w),
    "set_": lambda t: torch.empty(0).set_(t.detach()).zero_(),
    "set_ to a row": lambda t: torch.empty(0).set_(t.detach()[0]).zero_(),
    "as_subclass": lambda t: t.as_subclass(Subclass).mul_(2),
    "map2_": lambda t: t.detach().map2_(t.detach(), torch.ones(V), lambda v, w, u: v + w + u),
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
        same(*results)
        if results[1][0].requires_grad and name not in ("copy_",):
            finite = [torch.where(r[0].isfinite(), r[0], 0).sum() for r in results]
            got = torch.autograd.grad(finite[0], p.lazy_inputs)
            want = torch.autograd.grad(finite[1], p.eager_inputs)
            same(got, want, bits=False)


@pytest.mark.parametrize("write", [torch._foreach_zero_, lambda t: torch._foreach_mul_(t, 2)])
def test_writes_to_lists_are_counted_for_autograd(write):
    p = pair()
    for t in (p.logits, p.eager):
        squares = t.square()  # saves the logits
        with torch.no_grad():
            write([t[0], t[1]])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            squares.sum().backward()
    same(p.logits.detach() * 1, p.eager.detach())


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
    logits, early = tensor.defer(recipe, inputs), tensor.defer(recipe, inputs)
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


def test_the_advice_fits_the_cause(alone):
    recipe, _ = recipe_of()

    def error_after(change):
        weight = torch.nn.Parameter(torch.randn(V, D))
        x = torch.randn(3, D, requires_grad=True) * 1
        logits = tensor.defer(recipe, (x, weight, torch.randn(V)))
        change(x.detach(), weight)
        with pytest.raises(
            StaleLogitsError, match=r'options=\{"fusedce.logits": "keep"\}'
        ) as error:
            logits.sum()
        return str(error.value)

    def load(x, weight):
        module = torch.nn.Linear(D, V, bias=False)
        module.weight = weight
        module.load_state_dict({"weight": torch.zeros(V, D)})

    changes = {
        "load_state_dict()": load,
        "an update by hand": lambda x, weight: weight.data.sub_(1),
        "an optimizer that is no torch.optim.Optimizer": lambda x, weight: weight.detach().sub_(1),
        "the program writes to this tensor": lambda x, weight: x.sub_(1),
        "before this": lambda x, weight: weight.untyped_storage().resize_(0),
    }
    for advice, change in changes.items():
        error = error_after(change)
        assert advice in error
        assert "FSDP" not in error
    sharded = fully_shard(torch.nn.Linear(D, V), mesh=init_device_mesh("cpu", (1,)))
    assert "before backward(): FSDP frees" in error_after(changes["before this"])
    assert "with FSDP before backward()" in error_after(changes["an update by hand"])
    assert "FSDP" not in error_after(load)
    del sharded


def test_a_weight_that_is_replaced_keeps_its_old_values():
    p = pair()
    p.weight.data = torch.zeros(V, D)
    check(p, lambda t: t * 1)


def test_freed_memory_is_an_error():
    recipe, _ = recipe_of()
    weight = torch.randn(V, D)
    logits = tensor.defer(recipe, (torch.randn(3, D), weight, torch.randn(V)))
    weight.untyped_storage().resize_(0)
    with pytest.raises(StaleLogitsError, match=messages.FREED):
        logits.sum()
