"""What must not run as a row region, since another number of rows at a time would change it.

Rows mix, random numbers are drawn for all classes, logits or operands are written, data decides
what runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fxpass import messages
from tests.programs.row import BOTH, FORMULA, NOTHING, OUTSIDE, REGION, Row

KIND = "refused regions"


def spread(z: Tensor) -> Tensor:
    """Rows of logits by no known formula."""
    return z.sort(-1, descending=True).values[..., :40].logsumexp(-1)


class Global(torch.autograd.Function):
    """The identity, whose gradient is divided by the norm of all rows'."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return gradient / gradient.norm()


@torch.library.custom_op("fxpass_tests::ranks_of_rows", mutates_args=())
def ranks_of_rows(z: Tensor) -> Tensor:
    """An opaque operation that mixes rows."""
    return z.argsort(0).float()


@ranks_of_rows.register_fake
def _(z: Tensor) -> Tensor:
    return torch.empty_like(z, dtype=torch.float32)


# Those that need no logits where their loss is in another graph.
ANSWERED = (
    *("over the norm of everything", "less the largest of everything"),
    *("noise of its own", "hidden states written after the head"),
    *("a branch on a logit", "a number of the logits"),
)

# fmt: off
REFUSED = (
    # rows mix
    Row("log_softmax over tokens", "spread(s.log_softmax(1))", NOTHING, messages.SOFTMAX_ALONG_ROWS),
    Row("softmax of everything",
        "spread(z.flatten().softmax(0).view(N, V))", NOTHING, messages.ROWS_AND_CLASSES),
    Row("sorted along rows", "z.sort(0).values.logsumexp(-1)", NOTHING, messages.ALONG_ROWS),
    Row("top rows", "z.topk(3, dim=0).values.logsumexp(-1)", REGION),
    Row("cumulative over tokens", "F.cross_entropy(s.cumsum(1).flatten(0, 1), labels)", NOTHING,
        "cumsum"),
    Row("logcumsumexp over rows", "z.logcumsumexp(0).std(-1)", NOTHING),
    Row("batch_norm", "F.cross_entropy(F.batch_norm(z, None, None, training=True), labels)",
        NOTHING, messages.ALONG_ROWS),
    Row("standardised over rows",
        "spread((z - z.mean(0)) / z.std(0))", NOTHING, messages.ALONG_ROWS),
    Row("normalised over rows", "spread(F.normalize(z, dim=0))", REGION),
    Row("over the norm of everything", "spread(z / z.norm())", REGION),
    Row("less the largest of everything", "(z - z.max()).exp().sort(-1).values.sum(-1)", NOTHING),
    Row("above a quantile of everything",
        "spread(torch.where(z > z.detach().quantile(0.2), z, -30.0))",
        NOTHING, messages.ROWS_AND_CLASSES, never=("bf16",)),  # torch has no such quantile
    Row("top of everything",
        "z.flatten().topk(9).values.logsumexp(0)", NOTHING, messages.ROWS_AND_CLASSES),
    Row("entropy of the mean",
        "torch.special.entr(z.softmax(-1).mean(0)).sum()", FORMULA),
    Row("Dice loss of classes",
        "p, y = (z.softmax(-1), F.one_hot(labels, V).float()); "
        "(1 - (2 * (p * y).sum(0) + 1) / (p.sum(0) + y.sum(0) + 1)).mean()",
        BOTH),
    Row("products of rows", "p = z.softmax(-1); (p @ p.t()).logsumexp(-1)", NOTHING),
    Row("pairs of rows averaged",
        "spread(z.view(N // 2, 2, V).mean(1))", NOTHING, messages.ALONG_ROWS),
    Row("pairs of rows as classes",
        "spread(z.reshape(N // 2, 2 * V))", NOTHING, "aten.view", ways=("dynamic",)),
    Row("pooled over tokens", "F.avg_pool1d(s.transpose(1, 2), 3, 1, 1).std(1)", NOTHING),
    Row("sums of segments",
        "spread(z.new_zeros(3, V).index_add(0, torch.arange(N) % 3, z))",
        REGION),
    Row("ctc_loss",
        "log_probs = z.view(T, B, V).log_softmax(-1); "
        "lengths = (torch.tensor([T, T]), torch.tensor([4, 3])); "
        "F.ctc_loss(log_probs, labels[:8].view(2, 4).clamp_min(1), *lengths)",
        NOTHING),
    Row("a gradient over the norm of everything",
        "spread(Global.apply(z))", REGION),
    # random numbers
    Row("dropout", "F.cross_entropy(F.dropout(z, 0.2), labels)", NOTHING, "dropout", drawn=True),
    Row("noise of its own",
        "spread(z + torch.rand_like(z))", NOTHING, messages.RANDOM, drawn=True),
    Row("gumbel_softmax", "(F.gumbel_softmax(z) * torch.arange(V)).sum(-1)", FORMULA, left="empty, exponential", drawn=True),
    Row("sampled classes",
        "chosen = torch.multinomial(z.detach().softmax(-1), 1); "
        "z.log_softmax(-1).gather(-1, chosen)",
        NOTHING, "multinomial", drawn=True),
    # writes
    Row("written logits that leave", "rows = spread(z); z.mul_(2); (rows, z)", NOTHING, "leave"),
    Row("a slice written after it was read",
        "view = z[:, :5]; rows = spread(z.tanh()); view.zero_(); (rows, z, view)",
        NOTHING, messages.LEAVES_GRAPH),
    Row("hidden states written after the head",
        "hidden = x * 1; z = F.linear(hidden, weight.detach()); hidden.zero_(); "
        "(spread(z), hidden)",
        REGION),
    # data decides; the head stands in the text, where the graph breaks in the middle of a frame
    Row("a branch on a logit",
        "z = F.linear(x, weight)\n"
        "if z.max() > 3:\n"
        "    z = z * 0.5\n"
        "spread(z)", BOTH),
    Row("a number of the logits",
        "z = F.linear(x, weight); spread(z / z.detach().std().item())", NOTHING),
    Row("torch.cond",
        "z = z.detach(); "
        "torch.cond(z.sum() > 0, lambda z: z.sort(0).values, lambda z: z.cumsum(0), (z,))[:, 0]",
        NOTHING),
    Row("an operation that nobody knows",
        "ranks_of_rows(z.detach()).sort(-1).values[:, 0]", NOTHING),
)
# A checkpoint that stays gives no reason.
ROWS = tuple(
    replace(
        row,
        computes=() if row.name in ANSWERED else OUTSIDE,
        never=(*row.never, "checkpointed"),
    )
    for row in REFUSED
)
