"""Deferred logits that meet Dynamo again: after a graph break, in hooks, in another function.

Every program runs in eager, with the inner backend alone and with fusedce, which must give what
eager or the inner backend gives, in as many graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from fxpass.deferred.tensor import DeferredLogits
from tests.support.deferred_pairs import pair

N, D, V = 6, 8, 10
LABELS = torch.arange(N) % V

# Dynamo asks every tensor for its .grad, and hides the warning in a way that "error" is in.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]


def model(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(x, w)
    return F.cross_entropy(logits, LABELS), logits


def leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(N, D).requires_grad_(), torch.randn(V, D).requires_grad_()


def outcome(program: Callable[..., Any], backend: str, inner: str) -> tuple[list[Any], int]:
    """The values of a program, whose ``compile`` uses this backend, and its graph breaks."""
    options = {"fusedce.inner": inner} if backend == "fusedce" else None
    torch._dynamo.reset()
    counters.clear()

    def compile(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Any]:
        name = inner if backend == "inner" else backend
        return fn if name == "eager" else torch.compile(fn, backend=name, options=options, **kwargs)

    try:
        found = pytree.tree_leaves(program(compile))
        values = [v.detach().clone() if isinstance(v, Tensor) else v for v in found]
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        values = ["modified in place"]
    return values, sum(counters["graph_break"].values())


def agree(got: list[Any], want: list[Any]) -> bool:
    return len(got) == len(want) and all(map(alike, got, want))


def alike(got: Any, want: Any) -> bool:
    # a small gradient may be the difference of large ones
    is_float = isinstance(want, Tensor) and want.is_floating_point() and want.numel()
    largest = want.detach().abs().max().item() if is_float else 1
    try:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6 * max(10, largest))
    except AssertionError:
        return False
    except TypeError:  # strings and None
        return got == want
    return True


def check(program: Callable[..., Any], inner: str = "aot_eager") -> None:
    got, breaks = outcome(program, "fusedce", inner)
    alone, breaks_alone = outcome(program, "inner", inner)
    if not agree(got, alone):
        eager, _ = outcome(program, "eager", "eager")
        assert agree(got, eager), (got, eager, alone)
    assert breaks <= breaks_alone


# ---- after a break in the same function ----------------------------------------------------------


def hook_doubles(z: Tensor) -> Tensor:
    z.register_hook(lambda grad: grad * 2)
    return z


def setitem(z: Tensor) -> Tensor:
    z[0] = 1.0
    return z


def data_mul(z: Tensor) -> Tensor:
    z.data.mul_(2)
    return z


def no_grad_write(z: Tensor) -> Tensor:
    with torch.no_grad():
        z[1:].mul_(2)
    return z


def retain_grad(z: Tensor) -> Tensor:
    z.retain_grad()
    return z


def shadow(z: Tensor) -> Tensor:
    for row in z.detach():
        row.zero_()
    return z


AFTER_A_BREAK = {
    "backward": lambda z: z.square().sum().backward(retain_graph=True) or z.sum(),
    "setitem": setitem,
    "data": data_mul,
    "no_grad": no_grad_write,
    "hook": hook_doubles,
    "retain_grad": retain_grad,
    "shadow": shadow,
    "contains": lambda z: z * 2 if 1.5 in z else z,
    "tensor_in": lambda z: z * 2 if z[0, 0] in z else z,
    "format": lambda z: z + len(f"{z.shape} {z.dtype} {z.sum().item():.1f}"),
    "nonzero": lambda z: z[z > 0].sum() + z.nonzero().sum(),
    "mask": lambda z: z[LABELS > 3].softmax(-1),
    "is_pinned": lambda z: z * (1 + z.is_pinned()),
    "assert_close": lambda z: torch.testing.assert_close(z, z + 0) or z * 1,
    "tolist": lambda z: torch.tensor(z.tolist()) + z,
    "numpy": lambda z: z * float(z.detach().numpy().sum()),
    "casts": lambda z: z.double().half().float().to(torch.bfloat16).type(torch.float32),
    "type_as": lambda z: z.type_as(LABELS.double()),
    "isinstance": lambda z: z * (2 if isinstance(z, Tensor) else 3),
    "clone": lambda z: z.clone().mul_(2),
    "views": lambda z: (z[::2], z[1::2]),
    "overlapping": lambda z: (z[:-1], z[1:]),
    "itself": lambda z: (z, z.detach(), z.T),
    "in_place": lambda z: z.mul_(2) + z,
    "list": lambda z: torch.cat(list(z)),
    "grad": lambda z: torch.autograd.grad(z.exp().sum(), z, retain_graph=True)[0] + z,
}


@pytest.mark.parametrize("name", AFTER_A_BREAK)
def test_after_a_break(name):
    def program(compile):
        def fn(x, w):
            loss, logits = model(x, w)
            torch._dynamo.graph_break()
            return loss, AFTER_A_BREAK[name](logits), logits

        x, w = leaves()
        loss, result, logits = compile(fn)(x, w)
        results = pytree.tree_leaves(result)
        total = sum((r.float().square().sum() for r in results), loss)
        total.backward()
        grad = logits.grad if logits.retains_grad else None
        return loss, result, logits, x.grad, w.grad, grad

    check(program)


# ---- in another function -------------------------------------------------------------------------


def write_alias(z: Tensor, row: Tensor) -> Tensor:
    z.mul_(2)
    return row * 1


def write_row(z: Tensor, row: Tensor) -> Tensor:
    row.add_(1)
    return z.sum(-1)


def no_grad_fill(z: Tensor, row: Tensor) -> None:
    with torch.no_grad():
        z.mul_(2)


CONSUMERS = {
    "write_alias": write_alias,
    "write_row": write_row,
    "no_grad_fill": no_grad_fill,
    "views": lambda z, row: (z[::2], z[1::2]),
    "overlapping": lambda z, row: (z[:-1], z[1:], row),
    "detached": lambda z, row: z[0].detach().zero_(),
    "in_place": lambda z, row: z.mul_(2).square().sum(),
    "reads": lambda z, row: z.logsumexp(-1) + row.max(),
}
BEFORE = {
    "logits": lambda z: z,
    "cast": lambda z: z.double(),
    "detached": lambda z: z.detach(),
    "data": lambda z: z.data,
    "slice": lambda z: z[1:],
    "cast_slice": lambda z: z.to(torch.float64)[:, 1:],
}


@pytest.mark.parametrize(
    ("before", "name"),
    [
        *(("logits", name) for name in CONSUMERS),
        *((before, "write_alias") for before in BEFORE if before != "logits"),
        ("cast_slice", "overlapping"),
        ("detached", "no_grad_fill"),
    ],
)
def test_in_another_function(name, before):
    def program(compile):
        x, w = leaves()
        loss, z = compile(model)(x, w)
        older = z.cumprod(0)  # backward needs the logits as they are now
        given = BEFORE[before](z)
        row = given[0]
        version = z._version
        result = compile(CONSUMERS[name], fullgraph=True)(given, row)
        shown = [r for r in pytree.tree_leaves((result, given, row)) if isinstance(r, Tensor)]
        sum((r.square().sum() for r in shown if r.requires_grad), loss).backward(retain_graph=True)
        bumped = z._version > version
        shown = result, z, given, row, x.grad.clone(), w.grad.clone(), bumped
        if bumped:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                older.sum().backward()
        else:
            older.sum().backward()
        return *shown, w.grad

    check(program)


def test_a_view_that_was_written_to_before():
    """Autograd replays the view, to find its history, when the other function gets it."""

    def program(compile):
        x, w = leaves()
        _, z = compile(model)(x, w)
        given = z[1:]
        with torch.no_grad():
            given.mul_(2)
        rows = compile(CONSUMERS["views"], fullgraph=True)(given, None)
        sum(row.square().sum() for row in rows).backward()
        return rows, given, w.grad

    check(program)


def test_inductor():
    def program(compile):
        x, w = leaves()
        loss, z = compile(model)(x, w)
        cast = z.double()
        result = compile(lambda z, row: (write_alias(z, row), z[:-1], z[1:]))(cast, cast[0])
        sum((r.exp().sum() for r in (*result, cast)), loss).backward()
        return result, z, cast, w.grad

    check(program, "inductor")


def test_dynamic_sizes():
    def program(compile):
        step = compile(lambda x, w: (F.linear(x, w).logsumexp(-1).sum(), F.linear(x, w)))
        read = compile(lambda z: z.mul_(2).softmax(-1).cumsum(-1), fullgraph=True)
        _, w = leaves()
        out = []
        for n in (3, 5, 4):
            x = torch.arange(n * D).reshape(n, D) / 7
            loss, z = step(x, w)
            out += [read(z), z.sum()]
            loss.backward()
        return out, w.grad

    check(program)


# ---- hooks ---------------------------------------------------------------------------------------


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

    check(program)


def test_hooks_on_logits_see_the_gradient_from_another_function():
    def program(compile):
        x, w = leaves()
        _, z = compile(model)(x, w)
        seen = []
        z.register_hook(seen.append)
        z.retain_grad()
        compile(lambda z: z.exp().sum(), fullgraph=True)(z).backward()
        return seen, z.grad, w.grad

    check(program)


OPTIONS = {"fusedce.inner": "aot_eager"}


@pytest.mark.parametrize("read", [lambda f: f, torch.compile(backend="fusedce", options=OPTIONS)])
def test_compiled_autograd(read):
    x, w = leaves()
    loss, z = torch.compile(model, backend="fusedce", options=OPTIONS)(x, w)
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
            want, _ = outcome(program, "eager", "aot_eager")
            got, _ = outcome(program, "fusedce", "aot_eager")
            torch.testing.assert_close(got, want)


def test_a_transform_of_torch_func_in_another_function():
    """Dynamo asks for the logits inside of it; their values are those of no level."""

    def program(compile):
        _, z = compile(model)(*leaves())
        slope = compile(lambda z: torch.func.grad(lambda a: a.exp().sum())(z))
        return slope(z.detach()), z.detach().sum(), slope(z.detach())

    check(program)


@pytest.mark.parametrize("sizes", [(N, D, V), (64, 16, 500)], ids=str)
@pytest.mark.parametrize("read", ["before the step", "after the step"])
@pytest.mark.parametrize("autocast", [False, True])
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
    check(program)


def test_data_is_not_assigned_in_compiled_code():
    """As in eager, an error that says what to do."""

    def assign(z):
        z.data = torch.ones(N, V)

    options = {"fusedce.inner": "aot_eager"}
    _, z = torch.compile(model, backend="fusedce", options=options)(*leaves())
    torch.compile(assign, backend="aot_eager")(z)
    for use in (z.sum, lambda: z[0], z.tolist, lambda: repr(z)):
        with pytest.raises(RuntimeError, match=r"copy_.*FUSEDCE_LOGITS=keep"):
            use()


@pytest.mark.parametrize("before", ["logits", "cast"])
def test_detach_in_place(before):
    """Of what is no view in eager; a slice is, and cannot be detached in place."""

    def program(compile):
        x, w = leaves()
        loss, z = compile(model)(x, w)
        given = BEFORE[before](z)
        row = given[0]
        given.detach_()
        (loss + row.sum()).backward()
        return given.requires_grad, given * 1, given.mul_(2), z, w.grad

    check(program)
    _, z = torch.compile(model, backend="fusedce", options={"fusedce.inner": "eager"})(*leaves())
    with pytest.raises(RuntimeError, match="Can't detach views in-place"):
        z[0].detach_()


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
