"""Deferred logits when somebody writes: to them, to their inputs, or an optimizer to the weights."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fxpass.deferred import tensor, values
from fxpass.deferred.tensor import DeferredLogits, StaleLogitsError
from tests.support.deferred_pairs import B, D, S, V, check, exact, head, pair, recipe_of, same

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
    with pytest.raises(StaleLogitsError, match="was freed"):
        logits.sum()


# ---- optimizers ----------------------------------------------------------------------------------


def held_memory(t: DeferredLogits) -> Tensor:
    run = t._part.run
    assert run
    return run.inputs[1].tensor


@pytest.mark.parametrize("fused", ["foreach", "master", "data"])
def test_an_optimizer_step_changes_nothing(fused):
    """Large logits: the weights are cloned, one clone for all, and gradients reach the weights."""
    p = pair(seq=40)
    recipe, runs = recipe_of()
    second = tensor.defer(recipe, (p.lazy_inputs[0] * 2, *p.lazy_inputs[1:]))
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
    same(last * 1, p.eager[:, -1])
    check(p, lambda t: t.exp(), bits=False)


def test_a_step_of_hidden_states_that_are_a_detached_parameter():
    recipe, _ = recipe_of()
    x, weight, bias = torch.randn(B, 40, D).requires_grad_(), torch.randn(V, D), torch.randn(V)
    logits = tensor.defer(recipe, (x.detach(), weight, bias))
    eager = head(x.detach(), weight, bias)
    x.grad = torch.ones_like(x)
    torch.optim.SGD([x], lr=0.1).step()
    same(logits * 1, eager)


VIEWS = {
    "detach": lambda t: t.detach(),
    "slice": lambda t: t[:1],
    "classes": lambda t: t[..., 3:5],
    "view": lambda t: t.view(2, 4, -1),
    "transpose": lambda t: t.transpose(0, 1),
    "cast": lambda t: t.double().float(),
}


def rows_read_before_a_step():
    """Deferred rows, the only ones of their logits that are alive, and eager's."""
    p = pair(seq=40)
    rows = p.logits[:, -1].detach()
    rows.argmax(-1)
    p.logits = None
    p.weight.grad = torch.ones_like(p.weight)
    torch.optim.SGD([p.weight], lr=1.0).step()
    want = p.eager[:, -1].detach().clone()
    return rows, want


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_rows_that_were_read_before_a_step(view):
    """Nothing else refers to the logits, so the step clones nothing."""
    rows, want = rows_read_before_a_step()
    same(VIEWS[view](rows) * 1, VIEWS[view](want))
    got = VIEWS[view](rows)
    same(got[:1] + 0, VIEWS[view](want)[:1])


def test_rows_that_were_read_before_a_step_are_written_to_after_it():
    """Nobody can read the other rows, which cannot be computed any more."""
    rows, want = rows_read_before_a_step()
    view = rows[1:]
    rows /= 2
    same(rows * 1, want / 2)
    same(view * 1, want[1:] / 2)


def test_views_of_rows_that_were_read_share_memory_with_the_logits():
    p = pair(seq=40)
    rows = p.logits[:, -1].detach()
    rows.argmax(-1)
    last = rows[1]
    last.argmax(-1)
    p.logits.detach().numpy()[1, -1] = 3
    assert (last == 3).all()
    last.mul_(2)
    assert (p.logits[1, -1] == 6).all()
    assert (rows[1] == 6).all()


MEMORY = {
    "unaligned": lambda t: t[1 : V * D + 1].view(V, D),
    "columns": lambda t: t.view(V, -1)[:, :D],
    "rows": lambda t: t.view(D, -1)[:, :V].t(),
}


@pytest.mark.parametrize("layout", MEMORY)
def test_a_step_with_a_weight_that_is_a_view(layout):
    """A part of a flat buffer, or of a larger weight: its clone has other strides."""
    base = exact(2 * V * D)
    weight = MEMORY[layout](base)
    recipe, _ = recipe_of()
    x, bias = exact(40, D), exact(V)
    want, logits = head(x, weight, bias), tensor.defer(recipe, (x, weight, bias))
    base.grad = torch.ones_like(base)
    torch.optim.SGD([base], lr=1.0).step()
    same(logits * 1, want)


def test_small_logits_are_computed_before_an_optimizer_step():
    gc.collect()  # the logits of other tests count too
    p = pair(seq=1)
    cast = p.logits.double()
    p.weight.grad = torch.ones_like(p.weight)
    torch.optim.SGD([p.weight], lr=0.1).step()
    assert p.runs == [(B, 1, D)]
    same(p.logits * 1, p.eager)
    same(cast * 1, p.eager.double())


def test_logits_that_take_less_memory_than_their_hidden_states():
    gc.collect()
    recipe, runs = recipe_of(lambda x, weight, bias: head(x, weight, bias)[..., :1])
    inputs = [exact(B, 200, D), exact(V, D), exact(V)]
    logits = tensor.defer(recipe, inputs)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
    assert runs == [(B, 200, D)]
    same(logits * 1, head(*inputs)[..., :1])


def test_logits_of_earlier_steps_are_no_reason_to_clone():
    """They hold a clone already, and do not need another one."""
    gc.collect()
    p = pair(seq=40)
    optimizer = torch.optim.SGD([p.weight], lr=0.1)
    p.weight.grad = torch.ones_like(p.weight)
    optimizer.step()
    recipe, runs = recipe_of()
    x, want = exact(1, D), head(p.eager_inputs[0].detach(), *p.eager_inputs[1:]).detach()
    small, values_now = tensor.defer(recipe, (x, *p.lazy_inputs[1:])), p.weight.detach().clone()
    optimizer.step()
    assert (p.runs, runs) == ([], [(1, D)])
    same(small * 1, head(x, values_now, p.lazy_inputs[2]))
    same(p.logits * 1, want)


def test_two_optimizer_steps_and_logits_of_each():
    p = pair(seq=40)
    optimizer = torch.optim.SGD(p.lazy_inputs, lr=0.1)
    recipe, _ = recipe_of()
    kept, wanted = [], []
    for _ in range(3):
        kept.append(tensor.defer(recipe, [p.lazy_inputs[0] * 1, *p.lazy_inputs[1:]]))
        wanted.append(head(*p.lazy_inputs).detach())
        kept[-1][:, 0].sum().backward()
        optimizer.step()
    for got, want in zip(kept, wanted, strict=True):
        same(got.detach() * 1, want, bits=False)


def test_logits_that_are_not_alive_cost_nothing_at_a_step():
    before = set(values.pending())  # a failed test may hold logits in its traceback
    p = pair(seq=40)
    assert set(values.pending()) > before
    p.logits = None
    assert set(values.pending()) <= before


def test_a_changed_weight_does_not_break_the_optimizer():
    for seq in (1, 40):
        p = pair(seq=seq)
        p.weight.data.mul_(2)
        p.weight.grad = torch.zeros_like(p.weight)
        torch.optim.SGD([p.weight], lr=0.1).step()
        with pytest.raises(StaleLogitsError):
            p.logits.sum()


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4),
}


@pytest.mark.parametrize("keyword", [False, True])
@pytest.mark.parametrize("seq", [1, 40])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_logits_made_in_the_closure_of_a_step(name, seq, keyword):
    """Each call of the closure has logits of its own; they are read after the step."""
    p = pair(seq=seq)
    recipe, _ = recipe_of()
    results = []
    for make, inputs in (
        (lambda *given: tensor.defer(recipe, given), p.lazy_inputs),
        (head, p.eager_inputs),
    ):
        optimizer, kept = OPTIMIZERS[name](inputs[1:]), []

        def closure(make=make, inputs=inputs, optimizer=optimizer, kept=kept):
            optimizer.zero_grad()
            logits = make(inputs[0] * 1, *inputs[1:])
            kept.append(logits)
            loss = head(inputs[0], *inputs[1:]).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        results.append([t.detach() * 1 for t in kept])
    assert len(results[0]) == len(results[1]) > 1
    same(*results, bits=False)


def test_the_first_step_whose_closure_makes_the_first_logits():
    """Hooks that are registered inside a step come too late for it: a process of its own."""
    program = textwrap.dedent("""
        import torch
        import torch.nn.functional as F

        @torch.compile(backend="fusedce", options={"fusedce.inner": "eager"})
        def model(x, w):
            z = F.linear(x, w)
            return F.cross_entropy(z, torch.arange(6)), z

        x, w = torch.randn(6, 8), torch.randn(10, 8, requires_grad=True)
        optimizer, kept = torch.optim.SGD([w], lr=0.1), []
        before = F.linear(x, w).detach()

        def closure():
            loss, z = model(x, w)
            loss.backward()
            kept.append(z)
            return loss

        optimizer.step(closure)
        torch.testing.assert_close(kept[0].detach() * 1, before)
    """)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
