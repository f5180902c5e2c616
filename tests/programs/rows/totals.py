"""Sums over the rows with known coefficients, whose gradients forward computes, and sums that
are not known before the outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.row import BOTH, REGION, Row

KIND = "totals"


def picked(z: Tensor, labels: Tensor) -> Tensor:
    return z.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)


def entropy(z: Tensor) -> Tensor:
    return torch.special.entr(z.softmax(-1)).sum(-1)


def accuracy(z: Tensor, labels: Tensor) -> Tensor:
    return (z.detach().argmax(-1) == labels).float().mean()


# fmt: off
KNOWN = (
    Row("several classes",
        "s.log_softmax(-1).gather(-1, torch.stack([tokens, tokens], -1)).mean() + accuracy(s, "
        "tokens)",
        ways=("bf16",)),
    Row("masked mean",
        "-(picked(s, tokens) * mask + 0).sum() / mask.sum() + entropy(s).detach().mean()", REGION,
        ways=("bf16",)),
    Row("mean of means of sequences",
        "lengths = mask.sum(-1).float(); "
        "((picked(s, tokens) * mask).sum(-1) / lengths).mean() + entropy(s).mean()", REGION,
        ways=("bf16",)),
    Row("advantages, rows flattened",
        "-(picked(z, labels) * advantages).mean() + entropy(z).sum()", REGION, ways=("bf16",)),
    Row("where", "torch.where(mask, -entropy(s), 0.5).sum()", REGION, ways=("bf16",)),
    Row("loss and accuracy", "(F.cross_entropy(z, labels), accuracy(z, labels))", ways=("bf16",)),
    Row("loss of weighted classes, sum, and accuracy",
        "(F.cross_entropy(z, ignored, class_weight, reduction='sum'), accuracy(z, labels))",
        ways=("bf16",)),
    Row("smoothed loss and accuracy",
        "(F.cross_entropy(z, ignored, label_smoothing=0.1), accuracy(z, labels))", ways=("bf16",)),
    Row("rows of losses, and their log",
        "rows = F.cross_entropy(z, ignored, reduction='none'); "
        "(rows.mean(), rows.detach(), z.detach().amax(-1))", ways=("bf16",)),
    Row("losses of two targets",
        "(picked(z, labels) - 2 * picked(z, labels.clamp(min=2))).mean() + "
        "entropy(z).detach().max()", REGION,
        ways=("bf16",)),
    Row("an entropy that is detached later",
        "h = -entropy(z); (-picked(z, labels).mean(), h.detach())", REGION, ways=("bf16",)),
    Row("stacked", "torch.stack([picked(z, labels), entropy(z)]).mean()", REGION, ways=("bf16",)),
    Row("rows and a constant",
        "((entropy(s) - 2.5) * mask).sum() + picked(s + 0.5, tokens).mean()", REGION,
        ways=("bf16",)),
    Row("no row counts", "(F.cross_entropy(z, labels * 0 - 100), accuracy(z, labels))",
        ways=("bf16",)),
    Row("a loss scaled, beside another",
        "(3 * F.cross_entropy(z, labels) + 1, accuracy(z, labels))",
        ways=("bf16",)),
    Row("the square of a total", "(F.cross_entropy(z, ignored) + entropy(z).mean()).square()", BOTH,
        ways=("bf16",)),
    Row("metrics beside a total",
        "(F.cross_entropy(z, labels), accuracy(z, labels), picked(z, labels).detach())"),
    Row("a number of rows that counts",
        "y = F.linear(x.view(*tokens.shape, -1), weight); counted = (tokens != 3).float(); "
        "((picked(y, tokens) * counted).sum(-1) / counted.sum(-1)).mean() + entropy(y).mean()",
        REGION,
        ways=("dynamic",)),
    Row("a temperature without a gradient",
        "y = z / temperature.detach(); picked(y, labels).sum() + entropy(y).sum()", REGION),
)
# the incoming gradients are not known before the outputs, or the total would miss some
UNKNOWN = (
    Row("a square", "picked(z, labels).square().sum() + accuracy(z, labels)"),
    Row("a ratio",
        "(picked(z, labels) - picked(z, labels).detach()).exp().sum() + accuracy(z, labels)"),
    Row("two scalars of which one is squared",
        "picked(z, labels).sum() + entropy(z).sum().square()", BOTH),
    Row("the rows are an output",
        "(picked(z, labels) - entropy(z)).exp() + accuracy(z, labels)", BOTH),
    Row("the largest logit", "z.max(-1).values.mean() + accuracy(z, labels)", REGION),
    Row("a quotient", "(1 / picked(z, labels)).sum() + accuracy(z, labels)"),
    Row("a rounded quotient",
        "picked(z, labels).div(2, rounding_mode='floor').sum() + entropy(z).sum()", BOTH),
    Row("a write to the mask",
        "counted = mask.float(); total = counted.sum(); rows = picked(s, tokens); "
        "(total + rows + counted.mul_(2) + rows.detach()).sum() + accuracy(s, tokens)"),
    Row("a mask that is written after the first reduction",
        # what the coefficients read before the call is not what the sum reads
        "counted = torch.ones_like(values); rows = picked(z, labels); counted.zero_(); "
        "(rows + counted).sum() + entropy(z).detach().sum()", REGION),
    Row("a mask that has a gradient",
        "(picked(z, labels) * temperatures.squeeze(-1)).sum() + accuracy(z, labels)"),
    Row("a temperature that has a gradient",
        "y = z / temperature; picked(y, labels).sum() + entropy(y).sum()", REGION),
    # the gradient reaches the entropy, which nothing that is returned reads
    Row("a gradient that leaves by a write to an input",
        "values.add_(entropy(z).square()); (picked(z, labels), values)", BOTH, ways=("aot_eager",)),
)
ROWS = (*KNOWN, *UNKNOWN)
