"""Programs that look like others: what distinguishes them has to be read.

Each was fused once as the program that it looks like. The sizes of rows, classes and hidden states
are equal, so that a wrong dimension has the right shape.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

N = V = D = 6
T, U = torch.tensor([5, 3, 0, 1, 4, 3]), torch.tensor([1, 0, 2, 2, 5, 4])
VECTOR, GIVEN = torch.linspace(-1, 1, V), torch.linspace(-2, 2, N * V).view(N, V)
MASK = torch.tensor([1, 0, 1, 1, 1, 0]).bool()
X3 = torch.linspace(-1, 1, 2 * N * D).sin().view(2, N, D)


def mined(z):
    labels = T.clone()
    with torch.no_grad():
        easy = F.cross_entropy(z, labels, reduction="none") < 2
        labels.masked_fill_(easy, -100)
    return F.cross_entropy(z, labels)


def changed_atoms(z):
    p, atoms = z.softmax(-1), VECTOR.clone()
    with torch.no_grad():
        first = (p * atoms).sum(-1)
        atoms.mul_(3)
    return (p * atoms).sum() + first.sum()


def changed_targets(z):
    q = GIVEN.softmax(-1)
    with torch.no_grad():
        first = F.cross_entropy(z, q, reduction="none")
    q.mul_(0.5)
    return first.square().sum() + F.cross_entropy(z, q)


def weighted_by_itself(z):
    with torch.no_grad():
        losses = F.cross_entropy(z, T, reduction="none")
    return F.cross_entropy(z, T, weight=losses.sigmoid(), label_smoothing=0.1)


def gated_by_its_lse(z):
    with torch.no_grad():
        gate = (GIVEN * z.logsumexp(-1, keepdim=True)).sigmoid()
    return (z.softmax(-1) * gate).sum()


def picked(z):
    return z.log_softmax(-1).gather(1, T[:, None]).squeeze(1)


def times_itself(z):
    found = picked(z)
    return torch.mul(found, other=found).sum() + torch.dot(found, tensor=found)


def over_itself(z):
    found = picked(z)
    return (found / found).mean() + found.sum()


def with_a_mask(z, mask):
    return (z.relu() + mask).logsumexp(-1).sum()


def masked_rows(z, mask):
    return F.cross_entropy(z + mask[:, None], T) + z.logsumexp(-1).mean()


def changed_behind_a_metric(z):
    labels, detached = T.clone(), z.detach()
    picked = detached.gather(1, labels[:, None])
    labels.fill_(1)
    rank = (detached - picked).gather(1, U[:, None])
    return F.cross_entropy(z, labels) + rank.sum()


def weights_from_its_loss(z):
    loss = F.cross_entropy(z, T)
    with torch.no_grad():
        weight = (VECTOR * loss).sigmoid()
        other = F.cross_entropy(z, T, weight=weight, label_smoothing=0.1)
    return loss + 0.5 * other


def lse_of_a_total(z):
    loss = z.logsumexp(-1).mean()
    with torch.no_grad():
        weight = (VECTOR * loss).sigmoid()
        other = (z.log_softmax(-1) * weight).sum(-1)
    return loss + other.sum()


def repeated_rows(z):
    both, factor = z.view(2, 3, V), GIVEN[:3, :1].exp()
    return (both * factor).logsumexp(-1).sum() + (both[0] * factor).logsumexp(-1).sum()


def one_mask_of_both_dimensions(z):
    mask = GIVEN > 0
    rows, columns = z.masked_fill(mask, -9.0), z.T.masked_fill(mask, -9.0)
    return (rows.logsumexp(-1) - columns.logsumexp(0)).square().sum()


def one_target_of_both_dimensions(z):
    q = GIVEN.softmax(-1)
    return F.cross_entropy(z, q) + (z.T.log_softmax(0) * q).sum()


LOWEST = torch.finfo(torch.float32).min

PROGRAMS = {
    "other rows are ignored": lambda z: F.cross_entropy(z, T) + F.cross_entropy(z, T, ignore_index=3),
    "labels change": mined,
    "atoms change": changed_atoms,
    "targets change": changed_targets,
    "class weights from its losses": weighted_by_itself,
    "a gate from its lse": gated_by_its_lse,
    "a row times itself": times_itself,
    "a row over itself": over_itself,
    "small integers that are given": lambda z: with_a_mask(
        z, F.one_hot(T, V).to(torch.uint8) - 1
    ),
    "labels change behind a metric": changed_behind_a_metric,
    "weights from its loss": weights_from_its_loss,
    "the lse of a total": lse_of_a_total,
    "rows that are repeated": repeated_rows,
    "one mask of both dimensions": one_mask_of_both_dimensions,
    "one target of both dimensions": one_target_of_both_dimensions,
    "small integers of rows": lambda z: (z - T[:, None].to(torch.uint8)).logsumexp(-1).sum(),
    "integers that divide": lambda z: F.cross_entropy(z / (T + 2)[:, None] / (T + 2)[:, None], T),
    "booleans of rows": lambda z: (
        (-z.log_softmax(-1) + (T > 2)[:, None] + (T < 5)[:, None]).gather(1, T[:, None]).sum()
    ),
    "a gate of 0": lambda z: F.cross_entropy(z * (VECTOR.sum() * 0) + VECTOR, T),
    "a softmax behind a gate of 0": lambda z: (
        ((z * (VECTOR.sum() * 0)).softmax(-1) * z).gather(1, T[:, None]).sum()
    ),
    "a logarithm of two negative factors": lambda z: (
        (z.softmax(-1) * -VECTOR.exp().sum() * -VECTOR.exp().sum()).log().gather(1, T[:, None]).sum()
    ),
    "masked rows": lambda z: masked_rows(z, (1 - MASK.float()) * LOWEST),
    "rows at -inf": lambda z: masked_rows(z, torch.where(MASK, 0.0, -torch.inf)),
}  # fmt: skip


def kept_with_a_factor(z):
    y = z * torch.tensor(3.0)
    return torch.stack([F.cross_entropy(1.5 * y, T), F.nll_loss(y, T), y.sort().values[0, 0]])


def results(program, backend, trains=True):
    torch.manual_seed(0)
    x, weight = torch.randn(N, D), torch.randn(V, D)
    leaves = [t.requires_grad_(trains) for t in (x, weight)]

    def of_logits(x, weight):
        return program(F.linear(x, weight))

    if backend:
        of_logits = torch.compile(of_logits, backend=backend, options={"fusedce.inner": "eager"})
    found = of_logits(*leaves)
    if trains:
        found.backward()
    return [found.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("case", PROGRAMS)
def test_loss_and_gradients(case, caplog):
    fused, eager = results(PROGRAMS[case], "fusedce"), results(PROGRAMS[case], None)
    torch.testing.assert_close(fused, eager, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert "failed" not in caplog.text


def test_a_factor_that_is_made_after_the_logits_which_are_kept(caplog):
    fused, eager = (results(kept_with_a_factor, backend, False) for backend in ("fusedce", None))
    torch.testing.assert_close(fused, eager)
    assert "failed" not in caplog.text


def test_a_dot_product_of_16_bit_losses(caplog):
    def program(x, weight, mask):
        return torch.dot(F.cross_entropy(F.linear(x, weight), T, reduction="none"), mask)

    args = [t.bfloat16() for t in (torch.randn(N, D), torch.randn(V, D), MASK)]
    args[0].requires_grad_()
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    torch.testing.assert_close(fused(*args), program(*args), rtol=2e-2, atol=2e-2)
    assert "failed" not in caplog.text


def test_a_number_of_picks_that_varies():
    def program(x, weight, index):
        log = F.linear(x, weight).log_softmax(-1)
        return log.gather(1, index), log.gather(1, T[:, None])

    options = {"fusedce.inner": "eager"}
    fused = torch.compile(program, backend="fusedce", options=options, dynamic=True)
    x, weight = torch.randn(N, D), torch.randn(V, D)
    for count in (3, 5):
        args = x, weight, torch.stack([T] * count, 1)
        torch.testing.assert_close(fused(*args), program(*args))


def test_float64_by_promotion():
    def program(x, weight):
        return F.cross_entropy(F.linear(x, weight) + VECTOR.double(), T)

    args = torch.randn(N, D), torch.randn(V, D)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    torch.testing.assert_close(fused(*args), program(*args), rtol=1e-12, atol=1e-12)


def test_a_contracted_ellipsis():
    def program(weight):
        return torch.einsum("n...,v...->nv", X3, weight).logsumexp(-1)

    weight = torch.randn(V, D)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    torch.testing.assert_close(fused(weight), program(weight))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_of_rows_that_depends_on_data(caplog):
    def program(x, weight, count):
        n = count.item()
        torch._check(n >= 1)
        torch._check(n <= N)
        z = F.linear(x, weight).narrow(0, 0, n)
        return F.cross_entropy(z, T[:n], reduction="none").sum()

    args = torch.randn(N, D), torch.randn(V, D), torch.tensor(3)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    torch.testing.assert_close(fused(*args), program(*args))
    assert "failed" not in caplog.text


def test_a_boolean_of_python(caplog):
    def program(x, weight):
        return (F.linear(x, weight) * True).logsumexp(-1).sum()

    args = torch.randn(N, D), torch.randn(V, D)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    torch.testing.assert_close(fused(*args), program(*args))
    assert "failed" not in caplog.text


@pytest.mark.parametrize("bias", [(1,), (1, V), (N, 1), (N, V)], ids=str)
def test_a_bias_that_is_broadcast(bias, caplog):
    def program(x, weight, bias):
        return F.linear(x, weight, bias).logsumexp(-1).sum()

    args = torch.randn(N, D), torch.randn(V, D), torch.randn(bias)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    torch.testing.assert_close(fused(*args), program(*args))
    assert "failed" not in caplog.text
