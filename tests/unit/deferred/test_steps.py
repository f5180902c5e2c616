"""Deferred logits when an optimizer writes to the weights: they keep the values of before the step."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor

from fxpass.deferred import tensor, values
from fxpass.deferred.tensor import DeferredLogits, StaleLogitsError
from tests.support.deferred_pairs import B, D, V, check, exact, head, pair, recipe_of, same
from tests.support.pairs import in_pairs

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


@in_pairs(name=OPTIMIZERS, seq=[1, 40], keyword=[False, True])
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
