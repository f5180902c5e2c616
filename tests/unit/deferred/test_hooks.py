"""Hooks on deferred logits that meet Dynamo again, compiled autograd, and what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpass.deferred.tensor import DeferredLogits
from tests.support.deferred_pairs import pair
from tests.support.recompiled import LABELS, D, N, V, assert_agrees, leaves, model, values_of

FUSED = partial(torch.compile, backend="fusedce", options={"fusedce.inner": "aot_eager"})
# Dynamo asks every tensor for its .grad, and hides the warning in a way that "error" is in.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(D, V)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return F.cross_entropy(logits, LABELS), logits


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_forward_hook"])
def test_module_hooks(register, whole):
    def program(compile):
        module, seen = Head(), []
        if register == "register_forward_hook":
            module.register_forward_hook(lambda m, args, out: (out[0], out[1] * 2))
        else:
            module.register_full_backward_hook(lambda m, given, grads: seen.append(grads[1]))
        if whole:
            fn = compile(module)
        else:
            module.forward = compile(module.forward)
            fn = module
        x, _ = leaves()
        loss, logits = fn(x)
        (loss + logits.square().sum()).backward()
        return logits, seen, x.grad, module.head.weight.grad

    assert_agrees(program)


@pytest.mark.parametrize("read", [lambda f: f, FUSED])
def test_compiled_autograd(read):
    x, w = leaves()
    loss, z = FUSED(model)(x, w)
    assert isinstance(z, DeferredLogits)
    loss = loss + read(lambda z: z.square().sum())(z)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    want = leaves()
    loss, z = model(*want)
    (loss + z.square().sum()).backward()
    torch.testing.assert_close([x.grad, w.grad], [t.grad for t in want])


def test_backward_in_compiled_functions_with_compiled_autograd():
    def in_another(compile):
        x, w = leaves()
        _, z = compile(model)(x, w)
        compile(lambda z: z.exp().sum().backward())(z)
        return x.grad, w.grad

    def after_a_break(compile):
        def step(x, w):
            loss, z = model(x, w)
            torch._dynamo.graph_break()
            (loss + z.square().mean()).backward()

        x, w = leaves()
        compile(step)(x, w)
        return x.grad, w.grad

    with torch._dynamo.config.patch(compiled_autograd=True):
        for program in (in_another, after_a_break):
            want, _ = values_of(program, "eager", "aot_eager")
            got, _ = values_of(program, "fusedce", "aot_eager")
            torch.testing.assert_close(got, want)


# before the step, f32 gradients of a master weight are not rounded to bf16, as eager's are
@pytest.mark.parametrize(
    ("autocast", "read", "sizes"),
    [
        (False, "before the step", (64, 16, 500)),
        (False, "after the step", (N, D, V)),
        (True, "after the step", (64, 16, 500)),
    ],
)
def test_the_weight_changes_before_the_backward_of_logits(autocast, read, sizes):
    """Of hidden states without gradients, as of a linear probe: eager's backward does not read the
    weight. The logits are in use, or are clones or values since the step."""
    n, d, v = sizes
    labels = torch.randint(v, (n,))
    hidden = torch.randn(n, d)

    def logits_of(x, w):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            z = F.linear(x, w)
        return F.cross_entropy(z, labels), z

    def program(compile):
        torch.manual_seed(0)
        w = torch.nn.Parameter(torch.randn(v, d))
        both, optimizer = compile(logits_of), torch.optim.SGD([w], lr=0.1)
        (_, first), (_, second) = both(hidden, w), both(2 * hidden, w)
        losses = [F.cross_entropy(z.float() / 2, labels) for z in (first, second)[: 1 + early]]
        losses[0].backward()
        optimizer.step()
        optimizer.zero_grad()
        (losses[1] if early else F.cross_entropy(second.float() / 2, labels)).backward()
        return w.grad

    early = read == "before the step"
    assert_agrees(program)


def test_data_is_not_assigned_in_compiled_code():
    """As in eager, an error that says what to do."""

    def assign(z):
        z.data = torch.ones(N, V)

    _, z = FUSED(model)(*leaves())
    torch.compile(assign, backend="aot_eager")(z)
    for use in (z.sum, lambda: z[0], z.tolist, lambda: repr(z)):
        with pytest.raises(RuntimeError, match=r"copy_.*FUSEDCE_LOGITS=keep"):
            use()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_graph_that_ends_without_gradients(inner):
    """What turned them off came after the logits, which have their gradient."""

    def program(x, w, labels):
        z = F.linear(x, w)
        loss = F.cross_entropy(z, labels)
        torch.set_grad_enabled(False)
        return z, loss

    args = torch.randn(6, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    labels = torch.randint(11, (6,))
    options = {"fusedce.inner": inner, "fusedce.logits": "defer"}
    grads = []
    for run in (program, torch.compile(program, backend="fusedce", options=options)):
        with torch.enable_grad():  # what it sets back afterwards
            z, loss = run(*args, labels)
            assert not torch.is_grad_enabled()
        assert z.requires_grad
        grads.append(torch.autograd.grad(z.square().sum() + loss, args))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("view", [False, True])
def test_a_hook_after_a_write_in_another_function(view):
    """For plain views torch itself ends the process."""
    p, seen = pair(), []
    for z in (p.logits, p.eager):
        written = torch.compile(lambda t: t.mul_(2).sum(), backend="aot_eager")
        total = written(z[1] if view else z)
        z.register_hook(seen.append)
        (total + z.square().sum()).backward()
    torch.testing.assert_close(*seen)
