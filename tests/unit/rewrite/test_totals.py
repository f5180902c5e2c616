"""Sums over the rows with known coefficients: which are read, and that forward's gradients are
eager's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.programs import B, S, V, check, inputs, last, report_of

MASK = torch.tensor([[1.0, 0, 1, 1], [0, 1, 1, 0]])
ADVANTAGES = torch.linspace(-1, 2, B * S).view(B, S)
LENGTHS = torch.tensor([3.0, 2.0])
WEIGHT = torch.linspace(0.5, 1.5, V)
IGNORED = torch.tensor([[1, -100, 3, 9], [-100, 0, 2, -100]])


def picked(z, t):
    return z.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1)


def entropy(z):
    return torch.special.entr(z.softmax(-1)).sum(-1)


def accuracy(z, t):
    return (z.detach().argmax(-1) == t).float().mean()


# logits [B, S, V] and labels [B, S] -> a scalar with gradients, and metrics; the call's text
KNOWN = {
    "several classes": (
        lambda z, t: z.log_softmax(-1).gather(-1, torch.stack([t, t], -1)).mean() + accuracy(z, t),
        "outputs=argmax gradients=x,weight total=pick"),
    "masked mean": (
        lambda z, t: -(picked(z, t) * MASK + 0).sum() / MASK.sum() + entropy(z).detach().mean(),
        "outputs=moment(1,1) gradients=x,weight total=pick"),
    "mean of means of sequences": (
        lambda z, t: ((picked(z, t) * MASK).sum(-1) / LENGTHS).mean() + entropy(z).mean(),
        "gradients=x,weight total=moment(1,1);pick"),
    "advantages, rows flattened": (
        lambda z, t: -(picked(last(z), t.view(-1)) * ADVANTAGES.flatten()).mean() + entropy(z).sum(),
        "gradients=x,weight total=moment(1,1);pick"),
    "where": (
        lambda z, t: torch.where(MASK.bool(), -entropy(z), 0.5).sum(),
        "gradients=x,weight total=moment(1,1)"),
    "loss and accuracy": (
        lambda z, t: (F.cross_entropy(last(z), t.view(-1)), accuracy(z, t)),
        "outputs=argmax gradients=x,weight total=pick"),
    "loss of weighted classes, sum, and accuracy": (
        lambda z, t: (
            F.cross_entropy(last(z), IGNORED.view(-1), WEIGHT.to(z.dtype), reduction="sum"), accuracy(z, t)),
        "outputs=argmax gradients=x,weight total=pick"),
    "smoothed loss and accuracy": (
        lambda z, t: (
            F.cross_entropy(last(z), IGNORED.view(-1), label_smoothing=0.1), accuracy(z, t)),
        "outputs=argmax gradients=x,weight total=moment(0,1);pick"),
    "rows of losses, and their log": (
        lambda z, t: (
            (rows := F.cross_entropy(last(z), IGNORED.view(-1), reduction="none")).mean(),
            rows.detach(), z.detach().amax(-1)),
        "outputs=max;pick gradients=x,weight total=pick"),
    "losses of two targets": (
        lambda z, t: (picked(z, t) - 2 * picked(z, t.clamp(min=2))).mean() + entropy(z).detach().max(),
        "outputs=moment(1,1) gradients=x,weight total=pick"),
    "an entropy that is detached later": (
        lambda z, t: (h := -entropy(z), -picked(z, t).mean(), h.detach())[1:],
        "outputs=moment(1,1) gradients=x,weight total=pick"),
    "stacked": (
        lambda z, t: torch.stack([picked(z, t), entropy(z)]).mean(),
        "gradients=x,weight total=moment(1,1);pick"),
    "rows and a constant": (
        lambda z, t: ((entropy(z) - 2.5) * MASK).sum() + picked(z + 0.5, t).mean(),
        "gradients=x,weight total=moment(1,1);pick"),
    "no row counts": (
        lambda z, t: (F.cross_entropy(last(z), t.view(-1) * 0 - 100), accuracy(z, t)),
        "outputs=argmax gradients=x,weight total=pick"),
    "a loss scaled, beside another": (
        lambda z, t: (3 * F.cross_entropy(last(z), t.view(-1)) + 1, accuracy(z, t)),
        "outputs=argmax gradients=x,weight total=pick"),
}  # fmt: skip


def specs_of(report):
    return [call.spec.text() for head in report.matches for call in head.calls]


def first(found):
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", KNOWN)
def test_known(case, dtype):
    function, wanted = KNOWN[case]

    def program(x, weight, labels):
        return function(F.linear(x, weight), labels)

    x, weight, labels = inputs(dtype)
    specs = specs_of(report_of(program, x, weight, labels))
    if wanted is not None:
        assert specs == [f"r6 {wanted}"]
    else:
        assert specs
        assert all("total=" in text for text in specs)
    check(lambda *args: first(program(*args)), labels, x, weight)
    if case != "no row counts":  # the loss is nan: eager multiplies its gradient by 0
        check(lambda *args: first(program(*args)).square(), labels, x, weight)


def test_metrics_beside_a_total():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        loss = F.cross_entropy(last(z), labels.view(-1))
        return loss, accuracy(z, labels), picked(z, labels).detach()

    x, weight, labels = inputs()
    fused = torch.compile(
        program, backend="fusedce", options={"fusedce.inner": "eager", "fusedce.min_logits_mb": 0}
    )
    for one, other in zip(fused(x, weight, labels), program(x, weight, labels), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
        assert one.requires_grad == other.requires_grad


# the incoming gradients are not known before the outputs, or the total would miss some
UNKNOWN = {
    "a square": lambda z, t: picked(z, t).square().sum() + accuracy(z, t),
    "a ratio": lambda z, t: (picked(z, t) - picked(z, t).detach()).exp().sum() + accuracy(z, t),
    "two scalars of which one is squared": (
        lambda z, t: picked(z, t).sum() + entropy(z).sum().square()),
    "the rows are an output": lambda z, t: (picked(z, t) - entropy(z)).exp() + accuracy(z, t),
    "the largest logit": lambda z, t: z.max(-1).values.mean() + accuracy(z, t),
    "a quotient": lambda z, t: (1 / picked(z, t)).sum() + accuracy(z, t),
    "a rounded quotient": (
        lambda z, t: picked(z, t).div(2, rounding_mode="floor").sum() + entropy(z).sum()),
    "a write to the mask": (
        lambda z, t: ((mask := MASK.clone()).sum() + (rows := picked(z, t))
        + mask.mul_(2) + rows.detach()).sum() + accuracy(z, t)),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown(case):
    def program(x, weight, labels):
        return UNKNOWN[case](F.linear(x, weight), labels).sum()

    x, weight, labels = inputs()
    specs = specs_of(report_of(program, x, weight, labels))
    assert specs
    assert not any("total=" in text for text in specs)
    check(program, labels, x, weight)


def test_a_mask_that_has_a_gradient():
    def program(x, weight, mask, labels):
        z = F.linear(x, weight)
        return (picked(z, labels) * mask).sum() + accuracy(z, labels)

    x, weight, labels = inputs()
    mask = MASK.clone().requires_grad_()
    assert "total=" not in str(specs_of(report_of(program, x, weight, mask, labels)))
    check(program, labels, x, weight, mask)


def test_a_temperature_that_has_a_gradient():
    def program(x, weight, temperature, labels):
        z = F.linear(x, weight) / temperature
        return picked(z, labels).sum() + entropy(z).sum()

    x, weight, labels = inputs()
    temperature = torch.tensor(0.7, requires_grad=True)
    (text,) = specs_of(report_of(program, x, weight, temperature, labels))
    assert text.endswith("gradients=x,weight,scale")
    check(program, labels, x, weight, temperature)
    (text,) = specs_of(report_of(program, x, weight, temperature.detach(), labels))
    assert text.endswith("gradients=x,weight total=moment(1,1);pick")
    check(program, labels, x, weight, temperature.detach())


def test_a_number_of_rows_that_varies():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        mask = (labels != 3).float()
        rows = (picked(z, labels) * mask).sum(-1) / mask.sum(-1)
        return rows.mean() + entropy(z).mean()

    _, weight, _ = inputs()
    options = {"fusedce.inner": "eager", "fusedce.min_logits_mb": 0}
    fused = torch.compile(program, backend="fusedce", options=options, dynamic=True)
    for b, s in ((2, 5), (3, 7), (4, 2)):
        x, labels = torch.randn(b, s, weight.shape[1], requires_grad=True), torch.randint(V, (b, s))
        loss = fused(x, weight, labels)
        wanted = program(x, weight, labels)
        assert torch.allclose(loss, wanted, atol=1e-5)
        leaves = (x, weight)
        grads = torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, leaves)
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*grads, strict=True))


def test_a_mask_that_is_written_after_the_first_reduction():
    def program(x, weight, labels):
        mask = torch.ones_like(MASK)
        z = F.linear(x, weight)
        rows = picked(z, labels)
        mask.zero_()  # what the coefficients read before the call is not what the sum reads
        return (rows + mask).sum() + entropy(z).detach().sum()

    x, weight, labels = inputs()
    assert "total=" not in str(specs_of(report_of(program, x, weight, labels)))
    check(program, labels, x, weight)


def test_a_gradient_that_leaves_by_a_write_to_an_input():
    """It reaches the entropy, which nothing that is returned reads."""

    def program(x, weight, labels, held):
        z = F.linear(x, weight)
        rows = picked(z, labels)
        held.add_(entropy(z).square().mean())
        return rows

    x, weight, labels = inputs()
    found = []
    fused = torch.compile(
        program,
        backend="fusedce",
        options={"fusedce.inner": "aot_eager", "fusedce.min_logits_mb": 0},
    )
    for run in (program, fused):
        held = torch.zeros(())
        rows = run(x, weight, labels, held)
        found.append(torch.autograd.grad(held + rows.sum(), (x, weight)))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
