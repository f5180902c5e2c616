"""Deferred logits handed on: how long they live, frameworks, the next compiled function."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast

from fxpass.deferred import tensor
from tests.support.deferred_pairs import B, D, S, V, exact, head, pair, recipe_of, same

# ---- lifetime ------------------------------------------------------------------------------------


def test_unused_logits_are_freed_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        p = pair()
        recipe, _ = recipe_of()
        x = p.lazy_inputs[0] * 1
        hidden, logits = weakref.ref(x), tensor.defer(recipe, (x, *p.lazy_inputs[1:]))
        storage = x.untyped_storage()
        held = weakref.ref(logits._part.run.inputs[0])
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


READ = {"all": lambda t: t, "some": lambda t: t[1:], "a cast": lambda t: t.double()}


@pytest.mark.parametrize("view", READ.values(), ids=READ)
@pytest.mark.parametrize("trains", [True, False])
def test_logits_that_a_graph_has_read_are_freed(view, trains):
    with torch.set_grad_enabled(trains):
        p = pair()
        read = view(p.logits)
        assert read.plain is read.plain
        freed = [weakref.ref(t) for t in (read, read.plain, p.logits)]
        del read, p
        gc.collect()
        assert [t() is None for t in freed] == [True] * 3


def test_hidden_states_are_released_once_the_logits_are_computed():
    with torch.no_grad():
        p = pair()
    held = weakref.ref(p.logits._part.run.inputs[0])
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
    shared = tensor.defer(recipe, inputs)

    def work():
        try:
            for i in range(20):
                own = tensor.defer(recipe, inputs)
                same(own[:, i % 40].double() * 1, want[:, i % 40].double())
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
    assert shared._part.run is None


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


def test_distributed_data_parallel_finds_it(alone):
    from torch.nn.parallel.distributed import _find_tensors

    p = pair()
    assert any(t is p.logits for t in _find_tensors({"logits": p.logits}))
    gathered = [torch.zeros(B, S, V)]
    torch.distributed.all_gather(gathered, p.logits.detach())
    same(gathered[0], p.eager.detach())
    double = p.logits.detach().double()
    torch.distributed.all_reduce(double)
    same(double * 1, p.eager.detach().double())


def test_subclasses_among_the_inputs_are_computed_at_once():
    recipe, _ = recipe_of(lambda x: x * 2)
    x = TwoTensor(exact(3, D), exact(3, D))
    logits = tensor.defer(recipe, (x,))
    assert type(logits) is TwoTensor
    same(logits.a, x.a * 2)


def test_layout_follows_dynamic_shapes():
    recipe, runs = recipe_of()
    weight, bias = torch.randn(V, D), torch.randn(V)
    for rows in (*range(1, 300), 5):
        assert tensor.defer(recipe, (torch.randn(rows, D), weight, bias)).shape == (rows, V)
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
            same(got * 1, want * 1, bits=False)
            if want.requires_grad:
                got.float().pow(2).sum().backward()
                want.float().pow(2).sum().backward()
                same(p.weight.grad, p.eager_inputs[1].grad, bits=False)


@asks_grad
def test_inductor_takes_it():
    p = pair()
    fn = torch.compile(COMPILED["loss"], fullgraph=True)
    got, want = fn(p.logits), COMPILED["loss"](p.eager)
    same(got, want, bits=False)
    got.backward()
    want.backward()
    same(p.weight.grad, p.eager_inputs[1].grad, bits=False)


def test_compiled_functions_check_the_inputs():
    recipe, _ = recipe_of()
    weight = exact(V, D)
    fn = torch.compile(lambda t: t * 2, backend="aot_eager", fullgraph=True)
    for compiled in (False, True):
        inputs = exact(3, D), weight, exact(V)
        logits = tensor.defer(recipe, inputs)
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
    same((got[0], *got[2:]), (want[0], *want[2:]), bits=False)


def test_a_compiled_optimizer_step_changes_nothing():
    p = pair(seq=40)
    optimizer = torch.optim.SGD([p.weight], lr=torch.tensor(0.1))
    p.weight.grad = torch.ones_like(p.weight)
    torch.compile(optimizer.step, backend="aot_eager")()
    assert not torch.equal(p.weight, p.eager_inputs[1])
    same(p.logits * 1, p.eager)


def test_hidden_states_with_the_negative_bit():
    recipe, _ = recipe_of()
    weight, bias = exact(V, D), exact(V)
    x = torch.complex(exact(3, D), exact(3, D)).conj().imag
    assert x.is_neg()
    for read in (lambda z: z * 1, lambda z: z[1] * 1):
        same(read(tensor.defer(recipe, (x, weight, bias))), read(head(x, weight, bias)))
