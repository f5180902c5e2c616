"""Ways to write a head and its loss: each is fused, and is as accurate as eager at the same dtype.

How a call is spelled is the dispatcher's business (:mod:`fxpass.capture` reads ATen calls): a few of
each kind stand for all.
"""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.programs import (
    CLASS_REDUCTIONS,
    DECLINED,
    ROW_FUNCTION,
    B,
    D,
    S,
    V,
    check,
    fused_as,
    inputs,
    last,
)

BIAS, WEIGHTS = torch.linspace(-1, 1, V), torch.linspace(0.5, 2, V)
ROWS, CLASSES = torch.tensor([3, 0, 5]), torch.tensor([7, 2, 9, 0])


def soft(t, z):
    return F.one_hot(t, V).to(z.dtype) * 0.9 + 0.01


# x [B, S, D] and weight [V, D] -> logits
LINEARS = {
    "with a bias": lambda x, w: F.linear(x, w, BIAS.to(x)),
    "@ T": lambda x, w: x @ w.T,
    "matmul transpose by the end": lambda x, w: x.matmul(w.transpose(-1, -2)),
    "a weight [D, V]": lambda x, w: x @ w.T.contiguous(),
    "addmm": lambda x, w: torch.addmm(BIAS.to(x), x.view(-1, D), w.t()),
    "addmm of a weight [D, V]": lambda x, w: torch.addmm(BIAS.to(x), x.view(-1, D), w.T.clone()),
    "addmm with beta": lambda x, w: torch.addmm(BIAS.to(x), x.view(-1, D), w.t(), beta=2),
    "of strided hidden states": lambda x, w: F.linear(torch.cat([x, x], 1)[:, :S], w),
    "of strided hidden states, bias": lambda x, w: F.linear(
        torch.cat([x, x], 1)[:, :S], w, BIAS.to(x)
    ),
    "@ of transposed hidden states": lambda x, w: (
        (x.transpose(0, 1) @ w.T).transpose(0, 1).contiguous()
    ),
    "einsum": lambda x, w: torch.einsum("bsd,vd->bsv", x, w),
    "einsum, weight [D, V]": lambda x, w: torch.einsum("bsd, dv -> bsv", x, w.T.clone()),
    "einsum, weight first": lambda x, w: torch.einsum("vd,bsd->bsv", w, x),
    "einsum with dots": lambda x, w: torch.einsum("...d,vd->...v", x, w),
    "einsum in another order": lambda x, w: torch.einsum("bsd,vd->vbs", x, w).permute(1, 2, 0),
    "einsum of three": lambda x, w: torch.einsum("bsd,vd,v->bsv", x, w, BIAS.to(x)),
    "weight of several": lambda x, w: x.matmul(torch.cat([w[:4], w[4:]]).t()),
}
# logits [B, S, V] -> logits [N, V]
BETWEEN = {
    "view with the rows spelled out": lambda z: z.view(B * S, -1),
    "flatten by keyword": lambda z: z.flatten(start_dim=0, end_dim=-2),
    "float twice": lambda z: last(z.float()).float().to(z.dtype),
    "index of everything": lambda z: last(z[:, :, :]),
    "scale from the left": lambda z: last(0.125 * z),
    "shift": lambda z: last(z - 1 + 3),
    "square": lambda z: last(z * z),
    "subtraction from a number": lambda z: last(1 - z),
    "methods": lambda z: last(z.mul(2).add(1).sub(3).div(4).neg()),
    "torch functions": lambda z: last(torch.neg(torch.div(torch.sub(torch.mul(z, 2), 3), 4))),
    "soft-cap": lambda z: last(30 * torch.tanh(z / 30)),
    "clamp": lambda z: last(z.clamp(-1, 1)),
    "square root of a softplus": lambda z: last(F.softplus(z).sqrt()),
    "in place": lambda z: last(z.mul_(2).add_(1)),
    "in place by operator": lambda z: last(operator.itruediv(z, 2)),
    "in place on a view": lambda z: last(z).mul_(2),
    "in place, its result thrown away": lambda z: (F.relu(z, inplace=True), last(z))[1],
    "in place on logits, and a copy before": lambda z: (lambda a: last(z.mul_(2) + a))(z * 1),
    "a softmax": lambda z: last(z.softmax(-1)),
    "running sums": lambda z: last(torch.cumsum(z, -1)),
    "rounding division": lambda z: last(z.div(2, rounding_mode="floor")) + last(z),
    "classes in reverse": lambda z: z.flip(-1).view(-1, V),
    "float64": lambda z: last(z).double(),
}
# logits [B, S, V] and labels [B, S] -> what the loss is given
VIEWS = {
    "transpose": lambda z, t: (z.transpose(1, 2), t),
    "mT, as Dynamo of torch 2.14 writes it": lambda z, t: (torch.ops.aten.mT(z), t),
    "H": lambda z, t: (z[0].H.H, t[0]),
    "permute, another order": lambda z, t: (z.permute((1, 2, 0)), t.T),
    "a dimension of one flattened with the classes": lambda z, t: (
        z.unsqueeze(2).flatten(2).transpose(1, 2), t),
    "there and back": lambda z, t: (last(z.transpose(0, 1).contiguous()), t.T.reshape(-1)),
    "unsqueeze": lambda z, t: (last(z).unsqueeze(-1), t.view(-1, 1)),
    "squeeze": lambda z, t: (last(z.unsqueeze(1)).unsqueeze(2).squeeze(2), t.view(-1)),
    "squeeze of nothing": lambda z, t: (last(z).squeeze(), t.view(-1)),
    "classes split": lambda z, t: (last(z).unflatten(1, (V, 1)), t.view(-1, 1)),
    "new dimension by index": lambda z, t: (last(z[:, None]), t.view(-1)),
    "view behind the classes": lambda z, t: (z.transpose(1, 2).reshape(B, V, S), t),
    "number by index": lambda z, t: (z[:, -1], t[:, -1]),
    "rows by two tensors": lambda z, t: (z[ROWS % B, ROWS % S], t[ROWS % B, ROWS % S]),
    "rows by a number and a tensor": lambda z, t: (z[0, ROWS % S], t[0, ROWS % S]),
    "one row": lambda z, t: (z[0, 0], t[0, 0]),
    "a slice of the classes, then rows": lambda z, t: (
        z[:, 1:, 2:9].flatten(0, 1), t[:, 1:].flatten() % 7),
    "classes by a tensor, then rows": lambda z, t: (
        z[..., CLASSES][:, 1:].flatten(0, 1), t[:, 1:].flatten() % 4),
    "a class twice": lambda z, t: (last(z)[:, CLASSES % 3], t.view(-1) % 4),
    "every other class": lambda z, t: (last(z[..., ::2]), t.view(-1) % 5),
}  # fmt: skip
# logits [B, S, V] and labels [B, S] -> a number
LOSSES = {
    "a module": lambda z, t: nn.CrossEntropyLoss(label_smoothing=0.1)(last(z), t.view(-1)),
    "by position": lambda z, t: F.cross_entropy(
        last(z), t.view(-1), None, None, 3, None, "sum", 0.1),
    "everything, of more dimensions": lambda z, t: F.cross_entropy(
        z.transpose(1, 2), t, WEIGHTS.to(z), ignore_index=2, label_smoothing=0.2),
    "labels that are padded": lambda z, t: F.cross_entropy(
        last(z), F.pad(t, (0, 1), value=-100)[..., 1:].reshape(-1), ignore_index=-100),
    "probabilities of more dimensions": lambda z, t: F.cross_entropy(
        z.transpose(1, 2), soft(t, z).transpose(1, 2), label_smoothing=0.1),
    "probabilities of one row": lambda z, t: F.cross_entropy(z[0, 0], soft(t, z)[0, 0]),
    "probabilities, class weights and a z-loss": lambda z, t: (
        F.cross_entropy(last(z), soft(t.view(-1), z), WEIGHTS.to(z), label_smoothing=0.1)
        + 1e-2 * z.logsumexp(-1).square().mean()),
    "nll_loss modules": lambda z, t: nn.NLLLoss()(nn.LogSoftmax(1)(last(z)), t.view(-1)),
    "nll_loss with class weights": lambda z, t: F.nll_loss(
        last(z).log_softmax(1), t.view(-1), WEIGHTS.to(z), ignore_index=3),
    "nll_loss of logits": lambda z, t: F.nll_loss(last(z), t.view(-1)),
    "nll_loss of shifted logits": lambda z, t: F.nll_loss(
        2 - last(z) * 3, t.view(-1), WEIGHTS.to(z), ignore_index=3),
    "nll_loss of scaled log-probabilities": lambda z, t: F.nll_loss(
        last(z.log_softmax(-1)) * 2, t.view(-1)),
    "nll_loss of a function of the softmax": lambda z, t: F.nll_loss(
        (last(z).softmax(-1) + 1e-3).log(), t.view(-1), ignore_index=3),
    "nll_loss of a log_softmax of a log_softmax": lambda z, t: F.nll_loss(
        last(z.log_softmax(-1).log_softmax(-1)), t.view(-1)),
    "nll_loss, one per row": lambda z, t: F.nll_loss(
        z.transpose(1, 2).log_softmax(1), t, reduction="none").square().sum(),
    "log-probabilities that are also read": lambda z, t: (
        lambda p: F.nll_loss(p, t.view(-1)) + p.exp().square().sum())(last(z).log_softmax(-1)),
    "take_along_dim": lambda z, t: torch.take_along_dim(
        z.log_softmax(-1), t.unsqueeze(-1), dim=-1).square().mean(),
    "index": lambda z, t: -last(z).log_softmax(-1)[torch.arange(B * S), t.view(-1)].mean(),
    "index by a range": lambda z, t: last(z).log_softmax(-1)[
        range(len(last(z))), t.flatten()].mean(),
    "index of three dimensions": lambda z, t: -z.log_softmax(-1)[
        torch.arange(z.shape[0])[:, None], torch.arange(t.shape[1]), t].mean(),
    "index from the end": lambda z, t: z[
        torch.arange(len(t)).view(-1, 1), torch.arange(t.shape[1])[None], t - V].square().mean(),
    "gather - logsumexp": lambda z, t: -(
        z.gather(-1, t.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(z, dim=-1)).mean(),
    "logsumexp - gather, the dimension kept": lambda z, t: (
        z.logsumexp(-1, keepdim=True) - z.gather(-1, t.unsqueeze(-1))).square().mean(),
    "logsumexp of more dimensions": lambda z, t: z.transpose(1, 2).logsumexp(1).square().mean(),
}  # fmt: skip
# logits [B, S, V], a vector [V], a number, a number per row [B, S, 1], all trained -> logits
OPERANDS = {
    "a bias of more dimensions": lambda z, b, s, r: z + b[None, None],
    "taken away from a bias": lambda z, b, s, r: b - z,
    "a bias in place": lambda z, b, s, r: z.add_(b),
    "two biases": lambda z, b, s, r: z + b - b * 3,
    "a bias that cancels": lambda z, b, s, r: (z + b).relu() - b + b,
    "a bias before a function": lambda z, b, s, r: torch.tanh(z + b) * 2,
    "a bias of transposed logits": lambda z, b, s, r: (z.mT + b[:, None]).mT,
    "a multiple of a bias": lambda z, b, s, r: torch.add(z, b, alpha=2),
    "a temperature with a shape": lambda z, b, s, r: z * s.view(1, 1, 1),
    "a temperature after a bias": lambda z, b, s, r: (z + b) / s,
    "a temperature before a bias": lambda z, b, s, r: z * s + b,
    "a shift and a temperature": lambda z, b, s, r: (z + 1) * s,
    "a temperature in a function": lambda z, b, s, r: (z * s).tanh(),
    "a temperature of a function": lambda z, b, s, r: z.relu() * s,
    "a factor that cancels": lambda z, b, s, r: z * s / s,
    "in the denominator": lambda z, b, s, r: s / (z.square() + 1),
    "divided by a number per row": lambda z, b, s, r: z / r,
    "a number per row added": lambda z, b, s, r: z + r,
    "a number per row, then a bias": lambda z, b, s, r: z * r + b,
    "a maximum with a tensor": lambda z, b, s, r: torch.clamp(z, min=b),
}


def loss_of(logits, labels):
    return F.cross_entropy(last(logits), labels.view(-1))


PROGRAMS = {
    "linear": {k: (lambda x, w, t, f=f: loss_of(f(x, w), t)) for k, f in LINEARS.items()},
    "between": {
        k: (lambda x, w, t, f=f: loss_of(f(F.linear(x, w)), t)) for k, f in BETWEEN.items()
    },
    "view": {
        k: (lambda x, w, t, f=f: F.cross_entropy(*f(F.linear(x, w).tanh() * 3, t)))
        for k, f in VIEWS.items()
    },
    "loss": {k: (lambda x, w, t, f=f: f(F.linear(x, w) * 2, t)) for k, f in LOSSES.items()},
    "operands": {
        k: (lambda x, w, b, s, r, t, f=f: loss_of(f(F.linear(x, w), b, s, r), t))
        for k, f in OPERANDS.items()
    },
}
# What is a row function without a normal form.
NOT_LOWERED = {
    "a softmax",
    "running sums",
    "rounding division",
    "classes in reverse",
    "float64",
    "probabilities, class weights and a z-loss",
    "a temperature before a bias",
    "a temperature in a function",
    "a factor that cancels",
    "a number per row added",
    "a number per row, then a bias",
    "a maximum with a tensor",
}
NOT_FUSED = {"addmm with beta", "probabilities of one row"}


@pytest.mark.parametrize(("kind", "case"), [(k, c) for k, some in PROGRAMS.items() for c in some])
def test_a_spelling(kind, case):
    program = PROGRAMS[kind][case]
    x, weight, labels = inputs()
    tensors = [x, weight]
    if kind == "operands":
        tensors += [torch.randn(V), torch.tensor(0.7), torch.rand(B, S, 1) + 0.5]
    tensors = [t.requires_grad_() for t in tensors]
    expected = ROW_FUNCTION if case in NOT_LOWERED else CLASS_REDUCTIONS
    expected = DECLINED if case in NOT_FUSED else expected
    assert fused_as(program, *tensors, labels) == expected
    check(program, labels, *tensors)
