"""Deferred logits that meet Dynamo again: after a graph break, in hooks, in another function.

Every program runs in eager, with the inner backend alone and with fusedce, which must give what
eager or the inner backend gives, in as many graphs.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.support.recompiled import LABELS, D, assert_agrees, leaves, model

# Dynamo asks every tensor for its .grad, and hides the warning in a way that "error" is in.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),
]


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

    assert_agrees(program)


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
        # eager raises for logits that were written to, or reads what was written through .data; what
        # is deferred computes the logits as they were
        if not bumped and before != "data":
            older.sum().backward()
        return *shown, w.grad

    assert_agrees(program)


# ---- programs ------------------------------------------------------------------------------------


def a_view_that_was_written_to_before(compile):
    """Autograd replays the view, to find its history, when the other function gets it."""
    x, w = leaves()
    _, z = compile(model)(x, w)
    given = z[1:]
    with torch.no_grad():
        given.mul_(2)
    rows = compile(CONSUMERS["views"], fullgraph=True)(given, None)
    sum(row.square().sum() for row in rows).backward()
    return rows, given, w.grad


def a_cast_that_is_written_to(compile):
    x, w = leaves()
    loss, z = compile(model)(x, w)
    cast = z.double()
    result = compile(lambda z, row: (write_alias(z, row), z[:-1], z[1:]))(cast, cast[0])
    sum((r.exp().sum() for r in (*result, cast)), loss).backward()
    return result, z, cast, w.grad


def dynamic_sizes(compile):
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


def hooks_that_see_the_gradient_from_another_function(compile):
    x, w = leaves()
    _, z = compile(model)(x, w)
    seen = []
    z.register_hook(seen.append)
    z.retain_grad()
    compile(lambda z: z.exp().sum(), fullgraph=True)(z).backward()
    return seen, z.grad, w.grad


def a_transform_of_torch_func_in_another_function(compile):
    """Dynamo asks for the logits inside of it; their values are those of no level."""
    _, z = compile(model)(*leaves())
    slope = compile(lambda z: torch.func.grad(lambda a: a.exp().sum())(z))
    return slope(z.detach()), z.detach().sum(), slope(z.detach())


PROGRAMS = {
    a_view_that_was_written_to_before: "aot_eager",
    a_cast_that_is_written_to: "inductor",
    dynamic_sizes: "aot_eager",
    hooks_that_see_the_gradient_from_another_function: "aot_eager",
    a_transform_of_torch_func_in_another_function: "aot_eager",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program(program):
    assert_agrees(program, PROGRAMS[program])


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

    assert_agrees(program)
    _, z = torch.compile(model, backend="fusedce", options={"fusedce.inner": "eager"})(*leaves())
    with pytest.raises(RuntimeError, match="Can't detach views in-place"):
        z[0].detach_()
