"""Every spelling of the loss, with eager's numbers; and what is none or cannot be fused."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import fxpass
from tests.support.programs import (
    B,
    S,
    V,
    check,
    head_of,
    inputs,
    last,
    reason_of,
    spec_of,
)

WEIGHTS = torch.linspace(0.5, 2, V)


def soft(t, z):
    return F.one_hot(t, V).to(z.dtype) * 0.9 + 0.01


# logits [B, S, V] and labels [B, S] -> a scalar
ACCEPTED = {
    "nll_loss of log_softmax": lambda z, t: F.nll_loss(last(F.log_softmax(z, -1)), t.view(-1)),
    "in f32": lambda z, t: F.nll_loss(last(F.log_softmax(z, dim=-1, dtype=z.dtype)), t.view(-1)),
    "nll_loss modules": lambda z, t: nn.NLLLoss()(nn.LogSoftmax(1)(last(z)), t.view(-1)),
    "nll_loss with class weights": lambda z, t: F.nll_loss(
        last(z).log_softmax(1), t.view(-1), WEIGHTS.to(z), ignore_index=3),
    "nll_loss of logits": lambda z, t: F.nll_loss(last(z), t.view(-1)),
    "nll_loss of shifted logits": lambda z, t: F.nll_loss(
        last(z) - 5, t.view(-1), WEIGHTS.to(z), ignore_index=3),
    "nll_loss of shifted logits, sum": lambda z, t: F.nll_loss(
        2 - last(z) * 3, t.view(-1), ignore_index=1, reduction="sum"),
    "scaled log-probabilities": lambda z, t: F.nll_loss(
        last(z.log_softmax(-1)) * 2, t.view(-1)),
    "nll_loss of a function of the softmax": lambda z, t: F.nll_loss(
        (last(z).softmax(-1) + 1e-3).log(), t.view(-1), ignore_index=3),
    "nll_loss, sum": lambda z, t: F.nll_loss(
        last(z.log_softmax(-1)).float().to(z.dtype), t.view(-1), reduction="sum"),
    "nll_loss of more dimensions": lambda z, t: F.nll_loss(
        torch.log_softmax(z.transpose(1, 2), 1), t),
    "nll_loss, one per row": lambda z, t: F.nll_loss(
        z.transpose(1, 2).log_softmax(1), t, reduction="none").square().sum(),
    "gather": lambda z, t: -z.log_softmax(-1).gather(-1, t.unsqueeze(-1)).squeeze(-1).mean(),
    "torch.gather": lambda z, t: -torch.gather(
        F.log_softmax(z, dim=-1), dim=-1, index=t[..., None]).square().sum(),
    "take_along_dim": lambda z, t: torch.take_along_dim(
        z.log_softmax(-1), t.unsqueeze(-1), dim=-1).square().mean(),
    "index": lambda z, t: -last(z).log_softmax(-1)[torch.arange(B * S), t.view(-1)].mean(),
    "index of three dimensions": lambda z, t: -z.log_softmax(-1)[
        torch.arange(z.shape[0])[:, None], torch.arange(t.shape[1]), t].mean(),
    "index by ranges of three dimensions": lambda z, t: z[
        torch.arange(len(t)).view(-1, 1), torch.arange(t.shape[1])[None], t - V].square().mean(),
    "logsumexp - gather": lambda z, t: (
        z.logsumexp(-1) - z.gather(-1, t[..., None])[..., 0]).square().mean(),
    "gather - logsumexp": lambda z, t: -(
        z.gather(-1, t.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(z, dim=-1)).mean(),
    "with the dimension kept": lambda z, t: (
        z.logsumexp(-1, keepdim=True) - z.gather(-1, t.unsqueeze(-1))).square().mean(),
    "logsumexp": lambda z, t: z.logsumexp(-1).square().mean(),
    "logsumexp over (1,)": lambda z, t: torch.logsumexp(last(z), (1,), True).square().mean(),
    "logsumexp of more dimensions": lambda z, t: z.transpose(1, 2).logsumexp(1).square().mean(),
    "probabilities of more dimensions": lambda z, t: F.cross_entropy(
        z.transpose(1, 2), soft(t, z).transpose(1, 2), label_smoothing=0.1),
    "probabilities of one row": lambda z, t: F.cross_entropy(z[0, 0], soft(t, z)[0, 0]),
    "more dimensions with everything": lambda z, t: F.cross_entropy(
        z.transpose(1, 2), t, WEIGHTS.to(z), ignore_index=2, label_smoothing=0.2),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepted(case):
    def program(x, weight, labels):
        return ACCEPTED[case](F.linear(x, weight) * 2, labels)

    x, weight, labels = inputs()
    head_of(program, x, weight, labels)
    check(program, labels, x, weight)


def test_all_together():
    """Smoothing, class weights and indices or probabilities, and a z-loss: one operator."""
    x, weight, labels = inputs()
    targets = (lambda t, z: (t.view(-1), WEIGHTS.to(z))), (lambda t, z: (soft(t.view(-1), z),))
    for target in targets:

        def program(x, weight, labels, target=target):
            z = last(F.linear(x, weight))
            loss = F.cross_entropy(z, *target(labels, z), label_smoothing=0.1)
            return loss + 1e-2 * z.logsumexp(-1).square().mean()

        assert "lse" in spec_of(program, x, weight, labels).outputs
        check(program, labels, x, weight)


def test_a_z_loss_that_is_read_before_the_loss():
    """Then it has a call of its own: the labels are computed from it."""

    def program(x, weight, labels):
        z = last(F.linear(x, weight))
        z_loss = z.logsumexp(-1).square()
        return F.cross_entropy(z, (labels.view(-1) + z_loss.detach().long()) % V) + z_loss.mean()

    x, weight, labels = inputs()
    calls = head_of(program, x, weight, labels).calls
    assert [(c.spec.outputs, c.spec.total) for c in calls] == [(("lse",), ()), ((), ("pick",))]
    check(program, labels, x, weight)


def test_a_difference_and_a_z_loss():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        lse = z.logsumexp(-1)
        loss = (lse - z.gather(-1, labels.unsqueeze(-1)).squeeze(-1)).mean()
        return loss + 1e-2 * lse.square().mean()

    x, weight, labels = inputs()
    assert spec_of(program, x, weight, labels).outputs == ("at", "lse")
    check(program, labels, x, weight)


def test_several_losses_over_one_head():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        shifted = F.cross_entropy(z[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1))
        return shifted + 0.3 * F.cross_entropy(last(z.float()), labels.view(-1) // 2)

    x, weight, labels = inputs()
    head = head_of(program, x, weight, labels)
    assert (head.logits_mode, head.losses, len(head.calls)) == ("never", 2, 2)
    check(program, labels, x, weight)


def test_a_log_sum_exp_of_logits_that_exist():
    """A router's z-loss: nothing would be saved."""

    def program(x, weight, labels):
        z = F.linear(x, weight)
        chosen = z.topk(2, -1).values.softmax(-1)
        return z.logsumexp(-1).square().mean() + chosen.square().sum()

    report = fxpass.explain(program, *inputs())
    assert not report.matches, str(report)
    assert not report.rejections, str(report)


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="from torch 2.13 on")
def test_a_module_of_linear_and_loss():
    module = nn.LinearCrossEntropyLoss(6, V, bias=True, label_smoothing=0.1)
    x, _, labels = inputs()
    spec = spec_of(lambda x: module(x.view(-1, 6), labels.view(-1)), x)
    assert spec.gradients == ("x", "weight", "bias")


def changed(index):
    index[0] = 1
    return index


OTHER_ROWS = {
    "in another order": lambda z, t: z[torch.arange(B)[:, None], torch.arange(S - 1, -1, -1), t],
    "some": lambda z, t: z[torch.arange(B)[:, None], torch.arange(S - 1), t[:, 1:]],
    "of the other dimension": lambda z, t: z[:, :B][torch.arange(B), torch.arange(B)[:, None], t[:, :B]],
    "labels that are repeated": lambda z, t: z[torch.arange(B)[:, None], torch.arange(S), t[:1]],
    "changed": lambda z, t: z[changed(torch.arange(B)[:, None]), torch.arange(S), t],
    "rounded": lambda z, t: z[torch.arange(B)[:, None], torch.arange(S).to(torch.bool).to(t.dtype), t],
}  # fmt: skip


@pytest.mark.parametrize("case", OTHER_ROWS)
def test_an_index_of_other_rows(case):
    def program(x, weight, labels):
        z = F.linear(x, weight)
        return OTHER_ROWS[case](z.log_softmax(-1), labels).square().mean()

    counters.clear()
    compiled = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    x, weight, labels = inputs()
    assert torch.allclose(compiled(x, weight, labels), program(x, weight, labels))
    assert not counters["fusedce"]["matched"]


def test_an_index_that_would_be_ignored():
    """gather raises on a negative index, and so does the fused loss."""

    def program(x, weight, labels):
        return F.linear(x, weight).log_softmax(-1).gather(-1, labels.unsqueeze(-1) - 200).sum()

    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    with pytest.raises(IndexError, match="out of bounds"):
        fused(*inputs())


SILENT = {
    "gather of something else": lambda z, t: z.softmax(-1).gather(-1, t.unsqueeze(-1)).sum(),
    "gather of several": lambda z, t: z.log_softmax(-1).gather(-1, t.unsqueeze(-1) * 0 + 1)[..., 0:0].sum() + z.log_softmax(-1).gather(-1, t.unsqueeze(-1).expand(B, S, 2)).sum(),
    "logsumexp over rows": lambda z, t: z.logsumexp(1).sum(),
    "logsumexp over all": lambda z, t: z.logsumexp((0, 1, 2)),
    "a difference of halves": lambda z, t: (lambda a, b: (a.exp() - b).sum())(*z.chunk(2, -1)),
    "a difference of others": lambda z, t: (z.logsumexp(-1) - z.amax(-1)).sum() * z.sum(),
}  # fmt: skip


@pytest.mark.parametrize("case", SILENT)
def test_no_loss_and_nothing_said(case):
    """Nodes that could be a part of a loss, and are not, are nobody's business."""
    x, weight, labels = inputs()
    report = fxpass.explain(lambda x, w, t: SILENT[case](F.linear(x, w), t), x, weight, labels)
    assert not report.rejections, str(report)


def divergence(p, q):
    """Jensen and Shannon's."""
    mean = torch.logaddexp(p, q) - math.log(2)
    return sum(F.kl_div(mean, one, reduction="sum", log_target=True) for one in (p, q))


# hidden states, weight and labels -> a number, and what stops the reading of the softmax
STOPPED = {
    "gather along rows": (
        lambda x, w, t: F.linear(x, w).log_softmax(-1).gather(1, t[:, :1, None] * 0).sum(),
        "(gather) is not over the classes alone"),
    "logsumexp of no linear": (
        lambda x, w, t: F.linear(x, w).softmax(-1).logsumexp(-1).sum(),
        "(logsumexp) of `exp(log_0)` is not known"),
    "a divergence of two heads": (
        lambda x, w, t: divergence(
            F.linear(x, w).log_softmax(-1), F.linear(x, w.detach()).log_softmax(-1)),
        "(logaddexp) of the logits is not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", STOPPED)
def test_where_there_is_no_loss_what_stopped_a_softmax_is_said(case):
    program, reason = STOPPED[case]
    report = fxpass.explain(program, *inputs())
    assert not report.matches, str(report)
    assert report.rejections, str(report)
    assert all(reason in r.reason for r in report.rejections), str(report)


REJECTED = {
    "log_softmax over rows": (
        lambda z, t: F.nll_loss(last(z.log_softmax(1)), t.view(-1)), "another dimension"),
    "log-probabilities that are also read": (
        lambda z, t: (lambda p: F.nll_loss(p, t.view(-1)) + p.exp().sum())(
            last(z).log_softmax(-1)), "is the number 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_rejected(case):
    program, reason = REJECTED[case]
    assert reason in reason_of(lambda x, w, t: program(F.linear(x, w), t), *inputs())


def test_log_softmax_twice():
    def program(x, weight, labels):
        z = F.linear(x, weight)
        return F.nll_loss(last(z.log_softmax(-1).log_softmax(-1)), labels.view(-1))

    x, weight, labels = inputs()
    assert head_of(program, x, weight, labels)
    check(program, labels, x, weight)


def weighted(x, weight, labels, class_weight):
    logits = last(F.linear(x, weight))
    return F.cross_entropy(logits, labels.view(-1), class_weight.to(x.device))


def weighted_nll(x, weight, labels, class_weight):
    logits = last(F.linear(x, weight))
    return F.nll_loss(logits.log_softmax(-1), labels.view(-1), class_weight)


OTHERS = {
    torch.float32: (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool),
    torch.bfloat16: (torch.float64, torch.float32, torch.float16, torch.int64),
    torch.float64: (torch.float32, torch.int64),
}


@pytest.mark.parametrize("program", [weighted, weighted_nll])
@pytest.mark.parametrize(("dtype", "other"), [(d, o) for d, some in OTHERS.items() for o in some])
def test_class_weights_of_another_dtype(dtype, other, program, caplog):
    """PyTorch raises, so the fused program does."""
    x, weight, labels = inputs(dtype)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    caplog.set_level("INFO", "fxpass")
    for run in (program, fused):
        with pytest.raises(RuntimeError, match="expected scalar type"):
            run(x, weight, labels, WEIGHTS.to(other))
    assert "for which PyTorch raises" in caplog.text


@pytest.mark.parametrize("operand", ["target", "class weights"])
@pytest.mark.parametrize("other", [torch.float8_e4m3fn, torch.complex64])
def test_probabilities_and_weights_that_are_not_real(other, operand):
    """PyTorch raises, or makes the loss complex."""

    def program(x, weight, soft, balance):
        return F.cross_entropy(last(F.linear(x, weight)), soft, balance)

    x, weight, labels = (t.detach() for t in inputs())
    soft, balance = F.one_hot(labels.view(-1), V) * 0.5, WEIGHTS
    if operand == "target":
        soft = soft.to(other)
    else:
        balance = balance.to(other)
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    try:
        expected = program(x, weight, soft, balance)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            fused(x, weight, soft, balance)
    else:
        torch.testing.assert_close(fused(x, weight, soft, balance), expected)
    assert not counters["fusedce"]["matched"]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_class_weights_that_autocast_casts(dtype, inside, caplog):
    """To f32, as it casts the logits; f64 it leaves alone."""

    def program(x, weight, labels, class_weight):
        with torch.autocast(
            "cpu", torch.bfloat16, enabled=inside or torch.is_autocast_enabled("cpu")
        ):
            return weighted(x, weight, labels, class_weight)

    x, weight, labels = inputs()
    caplog.set_level("INFO", "fxpass")
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        head_of(program, x, weight, labels, WEIGHTS.to(dtype))
        program(x, weight, labels, WEIGHTS.to(dtype))
        for run in (program, fused):
            with pytest.raises(RuntimeError, match="expected scalar type"):
                run(x, weight, labels, WEIGHTS.double())
    assert "its class weights are float64 and its logits bfloat16" in caplog.text


@pytest.mark.parametrize("other", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_float8_operands(other):
    """PyTorch multiplies them on some devices, in its own way."""

    def program(x, weight, labels):
        logits = F.linear(x.to(torch.float8_e4m3fn), weight.to(other))
        return F.cross_entropy(last(logits).float(), labels.view(-1))

    x, weight, labels = (t.detach() for t in inputs())
    fused = torch.compile(program, backend="fusedce", options={"fusedce.inner": "eager"})
    try:
        expected = program(x, weight, labels)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            fused(x, weight, labels)
    else:
        torch.testing.assert_close(fused(x, weight, labels), expected)
    assert not counters["fusedce"]["matched"]
