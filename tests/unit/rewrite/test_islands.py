"""Parts of a program under ``no_grad``: no gradient flows through a view that is made there.

Such a view needs a gradient, as a leaf does, and the gradient goes no further. A tensor that is
computed there needs none, and must not be computed anew where gradients are on.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

N, V, D = 6, 9, 4
T = torch.tensor([5, 3, 0, 1, 4, 8])
Y = torch.linspace(-1, 2, N)


def temperature(x, w, other, s, q):
    with torch.no_grad():
        z = x @ w.t()
    return F.cross_entropy(z * s.sum(), T)


def vector(x, w, other, s, q):
    with torch.no_grad():
        z = x @ w.t()
    return F.cross_entropy(z + q[0], T)


def turned_weight(x, w, other, s, q):
    with torch.no_grad():
        turned = w.t()
    return F.cross_entropy(x @ turned, T)


def some_rows(x, w, other, s, q):
    losses = F.cross_entropy(x @ w.t(), T, reduction="none")
    with torch.no_grad():
        part = losses[:3]
    return (losses * Y).sum() + (part * Y[:3]).sum()


def view_of_the_largest(x, w, other, s, q):
    z = x @ w.t()
    largest = z.max(-1, keepdim=True).values
    with torch.no_grad():
        largest = largest.view(N, 1)
    return (z - largest).exp().sum(-1)


def weights_that_are_moved(x, w, other, s, q):
    losses = F.cross_entropy(x @ w.t(), T, reduction="none")
    with torch.no_grad():
        weights = s.flatten() * 2
    return (losses * weights).sum() + (weights * Y).sum()


def targets_that_are_moved(x, w, other, s, q):
    log = (x @ w.t()).log_softmax(-1)
    with torch.no_grad():
        target = q * 2
    return -(target * log).sum()


def deferred_cast(x, w, other, s, q):
    with torch.no_grad():
        narrow = w.bfloat16()
    z = F.linear(x.bfloat16(), narrow)
    return F.cross_entropy(z.float(), T), z


def deferred_view(x, w, other, s, q):
    with torch.no_grad():
        x = x.view(N, D)
    z = F.linear(x, w)
    return F.cross_entropy(z, T), z


PROGRAMS = [
    *(temperature, vector, turned_weight, some_rows, view_of_the_largest),
    *(weights_that_are_moved, targets_that_are_moved, deferred_cast, deferred_view),
]


def gradients(program, backend):
    torch.manual_seed(0)
    shapes = (N, D), (V, D), (V, D), (N, 1), (N, V)
    leaves = [(1 + torch.rand(shape)).requires_grad_() for shape in shapes]
    run = program
    if backend:
        run = torch.compile(program, backend=backend, options={"fusedce.inner": "aot_eager"})
    found = run(*leaves)
    found = found if isinstance(found, tuple) else (found,)
    sum(out.float().square().sum() for out in found).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients(program, caplog):
    fused, eager = gradients(program, "fusedce"), gradients(program, None)
    for got, wanted in zip(fused, eager, strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-4)
    assert "failed" not in caplog.text


def test_a_turned_weight_that_is_written_to(caplog):
    """PyTorch does not say what made such a view."""

    def program(x, w):
        z = x.mm(w.T)
        F.hardtanh(w, -1.0, 1.0, True)
        return z.logsumexp(-1)

    results = []
    for backend in (None, "fusedce"):
        torch.manual_seed(0)
        args = torch.randn(N, D).requires_grad_(), (2 * torch.randn(V, D)).requires_grad_()
        run = program
        if backend:
            run = torch.compile(program, backend=backend, options={"fusedce.inner": "eager"})
        with torch.no_grad():
            results.append((run(*args), args[1]))
    torch.testing.assert_close(*results)
    assert "failed" not in caplog.text
