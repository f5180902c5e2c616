"""Programs that look like others: what distinguishes them has to be read.

Values and gradients are eager's, however a program is fused, and nothing fails inside of fxpass.
Where the sizes of rows, classes and hidden states are equal, a wrong dimension has the right shape.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.programs import (
    CLASS_REDUCTIONS,
    check,
    compiled,
    fused_as,
    head_of,
    inputs,
    same,
)

N = V = D = 6
T, U = torch.tensor([5, 3, 0, 1, 4, 3]), torch.tensor([1, 0, 2, 2, 5, 4])
VECTOR, GIVEN = torch.linspace(-1, 1, V), torch.linspace(-2, 2, N * V).view(N, V)
MASK = torch.tensor([1, 0, 1, 1, 1, 0]).bool()
X3 = torch.linspace(-1, 1, 2 * N * D).sin().view(2, N, D)
LOWEST = torch.finfo(torch.float32).min


def under_no_grad(program):
    with torch.no_grad():
        return program()


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


def changed_labels(z):
    labels = T.clone()
    lse = z[1:].logsumexp(-1)
    labels.copy_((labels + 1) % V)
    picked = (z + VECTOR).log_softmax(-1).gather(-1, labels[:, None])
    return lse.square().sum() + picked.square().sum() + (z[1:] + VECTOR).logsumexp(-1).sum()


def changed_behind_a_metric(z):
    labels, detached = T.clone(), z.detach()
    picked = detached.gather(1, labels[:, None])
    labels.fill_(1)
    rank = (detached - picked).gather(1, U[:, None])
    return F.cross_entropy(z, labels) + rank.sum()


def changed_index(z):
    rows = torch.arange(N)
    rows[0] = 1
    return z.log_softmax(-1)[rows, T].square().sum()


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


def ignored_and_counted_from_the_end(z, first):
    """An ignored label is class 0 of a loss, and a class counted from the end elsewhere."""
    labels = T.where(MASK, -3)
    rows = [F.cross_entropy(z, labels, ignore_index=-3)] if first else []
    rows.append(z.log_softmax(-1)[torch.arange(N), labels].square().sum())
    return rows[0] + (rows[1] if first else F.cross_entropy(z, labels, ignore_index=-3))


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


def masked_rows(z, mask):
    return F.cross_entropy(z + mask[:, None], T) + z.logsumexp(-1).mean()


def written_item(z):
    z = z * 1
    z[0] = 0
    return F.cross_entropy(z, T)


def written_and_read_before(z):
    z = z * 1
    largest = z.detach()
    z.mul_(2)
    return F.cross_entropy(z, T) + largest.amax()


def rank_of_the_target(z):
    """No logit is larger than itself."""
    z = F.hardsigmoid(z)
    return F.cross_entropy(z, T), (z > z.gather(1, T[:, None])).sum(1)


def kept_with_a_factor(z):
    y = z * torch.tensor(3.0)
    return torch.stack([F.cross_entropy(1.5 * y, T), F.nll_loss(y, T), y.sort().values[0, 0]])


# logits [N, V], of as many hidden values, to outputs
PROGRAMS = {
    "other rows are ignored": lambda z: F.cross_entropy(z, T) + F.cross_entropy(z, T, ignore_index=3),
    "labels change where rows are easy": mined,
    "labels change": changed_labels,
    "labels change behind a metric": changed_behind_a_metric,
    "atoms change": changed_atoms,
    "targets change": changed_targets,
    "an index changes": changed_index,
    "a label that is ignored, then counted from the end": lambda z: (
        ignored_and_counted_from_the_end(z, True)),
    "a label that is counted from the end, then ignored": lambda z: (
        ignored_and_counted_from_the_end(z, False)),
    "class weights from its losses": weighted_by_itself,
    "a gate from its lse": gated_by_its_lse,
    "weights from its loss": weights_from_its_loss,
    "the lse of a total": lse_of_a_total,
    "labels that are the largest of a softmax": lambda z: (
        F.cross_entropy(z, z.softmax(-1).argmax(-1), reduction="none") * z.amax(-1).ge(0.3)).sum(),
    "a row times itself": lambda z: (
        torch.mul(picked(z), other=picked(z)).sum() + torch.dot(picked(z), tensor=picked(z))),
    "rows that are repeated": repeated_rows,
    "rows in another order": lambda z: z[[*range(1, N), 0], T],
    "rows by a rounded index": lambda z: z.log_softmax(-1)[torch.arange(N).bool().long(), T],
    "rows in another order, less their lse": lambda z: (
        (z - z.logsumexp(-1, True)).view(2, 3, V).transpose(0, 1).gather(-1, T.view(3, 2, 1))),
    "rows in another order, with values": lambda z: (
        (z * GIVEN).view(2, 3, V).transpose(0, 1).sum(-1) * T.view(3, 2)),
    "rows as classes": lambda z: F.cross_entropy(z.t(), T),
    "a softmax over rows": lambda z: F.nll_loss(z.log_softmax(0), T),
    "one mask of both dimensions": one_mask_of_both_dimensions,
    "one target of both dimensions": one_target_of_both_dimensions,
    "classes flattened with rows": lambda z: F.cross_entropy(z.view(2, 3, V).mT.flatten(0, 1), T[:3].repeat(4) % 3),
    "one class": lambda z: F.cross_entropy(z.view(2, 3, V)[..., 0], T[:2] % 3),
    "a new dimension by True": lambda z: z[True].logsumexp(1).square().mean(),
    "an index of another dimension": lambda z: (
        z.view(2, 3, V)[:, :2][torch.arange(2), torch.arange(2)[:, None], T[:4].view(2, 2)]),
    "index tensors that are not adjacent": lambda z: F.cross_entropy(
        z[None][torch.zeros(4, dtype=torch.long), :, T[:1]], T[:4]),
    "small integers that are given": lambda z: (
        z.relu() + (F.one_hot(T, V).to(torch.uint8) - 1)).logsumexp(-1).sum(),
    "integers that divide": lambda z: F.cross_entropy(z / (T + 2)[:, None] / (T + 2)[:, None], T),
    "booleans of rows": lambda z: (
        (-z.log_softmax(-1) + (T > 2)[:, None] + (T < 5)[:, None]).gather(1, T[:, None]).sum()),
    "a gate of 0": lambda z: F.cross_entropy(z * (VECTOR.sum() * 0) + VECTOR, T),
    "a softmax behind a gate of 0": lambda z: (
        ((z * (VECTOR.sum() * 0)).softmax(-1) * z).gather(1, T[:, None]).sum()),
    "logits that cancel": lambda z: (z - z).softmax(-1).square().sum(-1),
    "a logarithm of two negative factors": lambda z: (
        (z.softmax(-1) * -VECTOR.exp().sum() * -VECTOR.exp().sum()).log().gather(1, T[:, None]).sum()),
    "a logarithm that is 0 times infinity": lambda z: (
        torch.xlogy(z.square(), z.softmax(-1)).sum(-1)),
    "a logarithm of logits": lambda z: torch.special.entr(z.square()).softmax(-1).square().sum(-1),
    "a rounded quotient": lambda z: (
        z.softmax(-1).div(z.amax(-1, keepdim=True), rounding_mode="floor").sum(-1)),
    "the largest logits alone": lambda z: (
        z.masked_fill(z < z.detach().topk(3).values[..., -1:], -9).logsumexp(-1)),
    "masked rows": lambda z: masked_rows(z, (1 - MASK.float()) * LOWEST),
    "rows at -inf": lambda z: masked_rows(z, torch.where(MASK, 0.0, -torch.inf)),
    "a cast to 8 bits": lambda z: z.to(torch.float8_e5m2).float().mean(-1),
    "an item that is written": written_item,
    "written, and read before": written_and_read_before,
    "a write without gradients": lambda z: under_no_grad(lambda: z.mul_(2)).sum(-1),
    "a view without gradients, and a softmax with": lambda z: (
        z.sum(-1)[0] + under_no_grad(lambda: z[0]).softmax(-1).square().sum(-1)),
    "the rank of a label": rank_of_the_target,
    "a factor that is made after the logits": kept_with_a_factor,
    "no classes": lambda z: (z.logsumexp(-1).sum() + z[..., V:].tanh().sum(), z[..., V:].mean(-1)),
    "a label of no classes": lambda z: z[..., V:].log_softmax(-1).gather(-1, T[:, None]),
    "a label below 0": lambda z: z.log_softmax(-1).gather(-1, T[:, None] - 200).sum(),
}  # fmt: skip


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("case", PROGRAMS)
def test_logits(case, trains):
    x, weight = (torch.randn(6, 6, requires_grad=trains) for _ in "xw")
    same(lambda x, w: PROGRAMS[case](F.linear(x, w)), x, weight, rtol=2e-5, atol=2e-5)


def operand_that_changes(name):
    """The linear cannot move down past the change."""

    def program(x, weight):
        x, weight = x * 1, weight * 1
        logits = F.linear(x, weight)
        {"x": x, "weight": weight, "view": x[0]}[name].detach().mul_(2)
        return F.cross_entropy(logits, T)

    return program


def other_write(x, weight):
    """Inside vmap a tensor shows no storage."""
    logits = F.linear(x, weight)
    doubled = torch.func.vmap(lambda row: row.clone().mul_(2))(GIVEN)
    return F.cross_entropy(logits, T) * doubled.sum()


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def classes_by_a_mask(x, weight):
    some = torch.arange(len(weight)) % 2 == 0
    return F.cross_entropy(F.linear(x, weight)[..., some], T // 2)


def twice_the_loss(x, weight):
    first = F.cross_entropy(F.linear(x, weight) * VECTOR.sum().exp(), T)
    return first + F.cross_entropy(F.linear(x * first, weight) * first, T)


def cond(x, weight):
    def branch(x, weight):
        return F.cross_entropy(F.linear(x, weight), T)

    return torch.cond(x.sum() > 0, branch, branch, (x, weight))


# x [N, D] and weight [V, D] -> outputs
PRODUCTS = {
    "x changes": operand_that_changes("x"),
    "the weight changes": operand_that_changes("weight"),
    "a view of x changes": operand_that_changes("view"),
    "what cannot be compared changes": other_write,
    "classes by a mask": classes_by_a_mask,
    "a factor that the loss depends on twice": twice_the_loss,
    "a loss in a nested graph": cond,
    "a product of hidden states": lambda x, w: F.cross_entropy(x @ x.t(), T),
    "logits that are no product": lambda x, w: F.cross_entropy(F.embedding(T, x), T),
    "logits from outside": lambda x, w: F.cross_entropy(x, T) + F.linear(x, w).logsumexp(-1).mean(),
    "addmm of a matrix": lambda x, w: F.cross_entropy(torch.addmm(GIVEN, x, w.t()), T),
    "a weight per batch": lambda x, w: (
        F.cross_entropy(torch.matmul(X3, torch.stack([w, w * 2]).mT).flatten(0, 1), T.repeat(2))),
    "an einsum that sums rows": lambda x, w: F.cross_entropy(
        torch.einsum("bnd,vd->bv", X3, w), T[:2]),
    "a contracted ellipsis": lambda x, w: torch.einsum("n...,v...->nv", X3, w).logsumexp(-1),
    "float64 by promotion": lambda x, w: F.cross_entropy(F.linear(x, w) + VECTOR.double(), T),
}  # fmt: skip


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("case", PRODUCTS)
def test_products(case, trains):
    """Of a write to an operand, autograd raises; without gradients, nothing does."""
    x, weight = (torch.randn(6, 6, requires_grad=trains) for _ in "xw")
    same(PRODUCTS[case], x, weight, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("bias", [(1,), (1, V), (N, 1), (N, V)], ids=str)
def test_a_bias_that_is_broadcast(bias):
    args = torch.randn(N, D), torch.randn(V, D), torch.randn(bias)
    same(lambda x, weight, bias: F.linear(x, weight, bias).logsumexp(-1).sum(), *args)


def test_a_dot_product_of_16_bit_losses():
    def program(x, weight, mask):
        return torch.dot(F.cross_entropy(F.linear(x, weight), T, reduction="none"), mask)

    args = [t.bfloat16() for t in (torch.randn(N, D), torch.randn(V, D), MASK)]
    same(program, args[0].requires_grad_(), *args[1:], rtol=2e-2, atol=2e-2)


def test_a_number_of_picks_that_varies():
    def program(x, weight, index):
        log = F.linear(x, weight).log_softmax(-1)
        return log.gather(1, index), log.gather(1, T[:, None])

    fused = torch.compile(
        program, backend="fusedce", options={"fusedce.inner": "eager"}, dynamic=True
    )
    x, weight = torch.randn(N, D), torch.randn(V, D)
    for count in (3, 5):
        args = x, weight, torch.stack([T] * count, 1)
        torch.testing.assert_close(fused(*args), program(*args))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_number_of_rows_that_depends_on_data():
    def program(x, weight, count):
        n = count.item()
        torch._check(n >= 1)
        torch._check(n <= N)
        z = F.linear(x, weight).narrow(0, 0, n)
        return F.cross_entropy(z, T[:n], reduction="none").sum()

    same(program, torch.randn(N, D), torch.randn(V, D), torch.tensor(3))


@pytest.mark.parametrize("largest", [100, 30000])
def test_large_logits_less_the_largest(largest):
    """Their lse is too large for the exponential, and so is the largest of them."""

    def program(x, weight, labels):
        z = F.linear(x, weight) * largest
        m = z.max(-1, keepdim=True).values.detach()
        return ((z - m).exp().sum(-1).log() + m.squeeze(-1)).sum()

    x, weight, labels = inputs()
    assert fused_as(program, x, weight, labels) == CLASS_REDUCTIONS
    check(program, labels, x, weight)


INCREASING = {
    "logits": lambda z: z,
    "a temperature": lambda z: z / 0.7,
    "a softcap": lambda z: 3 * (z / 3).tanh(),
    "logits and a row": lambda z: z / 2 + z.logsumexp(-1, keepdim=True),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("case", INCREASING)
def test_a_target_that_is_the_largest(case, trained):
    """Bit by bit, however both are computed."""

    def program(x, weight, labels):
        logits = F.linear(x, weight)
        z = INCREASING[case](logits)
        own = z.gather(-1, labels[:, None])
        largest = z.max(-1, keepdim=True).values if trained else z.amax(-1, keepdim=True)
        return largest == own, logits.logsumexp(-1)

    x, weight = torch.randn(64, 8), torch.randn(300, 8)
    labels = F.linear(x, weight).argmax(-1)
    args = *(t.requires_grad_(trained) for t in (x, weight)), labels
    assert head_of(program, *args).logits_mode == "never"
    assert compiled(program)(*args)[0].all()


@pytest.mark.parametrize("shape", [(2, 0, 5), (0, 0, 3)])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_rows_without_hidden_values(reduction, shape):
    n, d, v = shape
    operands = torch.zeros(n, d, requires_grad=True), torch.zeros(v, d, requires_grad=True)
    labels = torch.zeros(n, dtype=torch.long)
    same(lambda x, w, t: F.cross_entropy(x @ w.t(), t, reduction=reduction), *operands, labels)
