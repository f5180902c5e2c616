"""Whole heads: nodes between logits and what reads them, several losses of one head, two heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.programs.operands import Sizes
from tests.programs.row import BOTH, FORMULA, NOTHING, REGION, Row, becoming
from tests.support.pairs import pairs

KIND = "whole heads"


def entropy(z: Tensor) -> Tensor:
    return -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)


def under_no_grad(z: Tensor) -> Tensor:
    with torch.no_grad():
        return entropy(z)


def copied(row: Tensor) -> Tensor:
    made = torch.zeros(row.shape, dtype=row.dtype)
    made.copy_(row)
    return made


def filled(made: Tensor, at: int, z: Tensor) -> Tensor:
    """After a node that reads the logits."""
    made[at] = 3
    made.add_(z.shape[-1] / 20)
    return made


FILLED = "(filled(torch.zeros(B, T, V), 1, s) * s.log_softmax(-1)).sum(-1)"
PACKED = (
    "bits = (tokens[..., None] >> (torch.arange(V) % 3)) & 1; "
    "s.masked_fill(bits > 0, -9.0).logsumexp(-1)"
)
SEVERAL_PICKS = {
    "two targets": "s.log_softmax(-1).gather(-1, torch.stack([tokens, tokens // 2], -1))",
    "log-probabilities of some rows":
        "s.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None].repeat(1, 1, 2))",
    "several picks of shifted logits":
        "shifted = s - s.detach().amax(-1, keepdim=True); "
        "some = shifted.gather(-1, torch.stack([tokens, tokens // 2], -1)); "
        "some.square().sum() + s.logsumexp(-1).sum()",
    "several picks beside a total":
        "own = s.log_softmax(-1).gather(-1, tokens[..., None]); "
        "some = s.detach().gather(-1, torch.stack([tokens, tokens // 2], -1)); "
        "own.mean() + (some > 0).sum()",
}  # fmt: skip
# what is given for each row is the row function's own from 32 classes on
FEW = Sizes(b=2, t=4, d=6, v=10)

# There the logits have a number of rows, and labels [B, T] have symbols.
DYNAMIC = ("dynamic",)

STUDENT = "z = F.linear(x, weight)\n"
TEACHERS = {
    "student": "q = F.linear(x.detach(), second_weight)\n",
    "both": "q = F.linear(x, second_weight)\n",
    "neither": "q = F.linear(x.detach(), second_weight)\n",
}
TRAINED = {"student": ("x", "weight"), "both": None, "neither": ()}
SOFT_TARGETS = "soft_loss = -((q / 2).softmax(-1) * (z / 2).log_softmax(-1)).sum(-1).mean()\n"
TWO_HEADS = {
    "soft targets": f"{SOFT_TARGETS}soft_loss",
    "a loss and soft targets": f"{SOFT_TARGETS}F.cross_entropy(z, labels) + soft_loss",
    "soft targets and the teacher's accuracy":
        f"{SOFT_TARGETS}soft_loss + (q.argmax(-1) == labels).sum()",
    "a sum of logits": "F.cross_entropy(z + q, labels)",
    "the teacher's share":
        "p = (q - q.logsumexp(-1, keepdim=True)).exp(); (p * z.sigmoid()).sum(-1).square().sum()",
}  # fmt: skip


def two_heads(name: str, trained: str, first: str) -> Row:
    made = [STUDENT, TEACHERS[trained]]
    text = "".join(made if first == "student" else reversed(made)) + TWO_HEADS[name]
    called = f"{name}, {first} first, {trained} trained"
    return Row(called, text, REGION, trained=TRAINED[trained])


# of ``s``, ``t`` [B, T] and a mask ``m`` of rows
BY_A_MASK = {
    "rows": "F.cross_entropy(s[m], t[m])",
    "of a sum": "F.cross_entropy(s[m], t[m], reduction='sum') / m.sum().clamp(min=1)",
    "rows and classes": "F.cross_entropy(s[m, 2:], t[m].clamp(min=2) - 2)",
    "log-probabilities": "-s[m].log_softmax(-1).gather(1, t[m][:, None]).mean()",
    "flat": "F.cross_entropy(s.view(-1, V)[m.flatten()], t.flatten()[m.flatten()])",
    "positions": "F.cross_entropy(s[:, m[0]].flatten(0, 1), t[:, m[0]].flatten())",
}
MASKS = {"some": "tokens > 2", "no": "tokens < 0"}


def by_a_mask(name: str, rows: str) -> Row:
    text = f"t = tokens; m = {MASKS[rows]}; {BY_A_MASK[name]}"
    dynamo = {"capture_dynamic_output_shape_ops": True}
    computes = ("outside",) if rows == "no" else ()
    return Row(f"{name} by a mask of {rows} rows", text, dynamo=dynamo, computes=computes)


def total(name: str, text: str, becomes: str = FORMULA, **keywords: Any) -> Row:
    """The sum of the squares of what the last statement makes."""
    *before, last = text.split("; ")
    return Row(name, "; ".join([*before, f"({last}).square().sum()"]), becomes, **keywords)


# fmt: off
ROWS = becoming((
    total("a class that is computed later",
        "s.logsumexp(-1) * s.gather(-1, (tokens % 7)[..., None])[..., 0]"),
    total("labels that are changed in place",
        "t = tokens; s.softmax(-1).gather(-1, t.clone().sub_(t // 2)[..., None])",
        never=DYNAMIC),
    *(total(name, text, never=DYNAMIC) for name, text in SEVERAL_PICKS.items()),
    *(total(f"{name}, few classes", text, REGION, sizes=FEW,
            never=DYNAMIC)
      for name, text in SEVERAL_PICKS.items()),
    total("a sequence's last token", "s[torch.arange(B), tokens[:, 0] % T].logsumexp(-1)"),
    total("rows that are copied into a tensor", "copied(s.logsumexp(-1)) * entropy(s.detach())"),
    total("a metric beside a log-probability",
        "metric = under_no_grad(s.view(N, V)); "
        "metric * s.log_softmax(-1).gather(-1, tokens[..., None]).view(-1)"),
    total("a class vector that is filled in place",
        "(filled(torch.zeros(V), 2, s) * s.softmax(-1)).sum(-1)", REGION),
    total("values that are filled in place", FILLED, REGION),
    total("values that are filled in place, few classes", FILLED, REGION, sizes=FEW),
    total("a temperature that is filled in place",
        "(s * filled(torch.ones(1), 0, s)).softmax(-1).square().sum(-1)", REGION),
    total("a view whose index comes first",
        "entropy(torch.index_select(index=tokens[0] * 0 + 1, input=s, dim=1))", REGION),
    total("a z-loss that the labels depend on",
        "lse = z.logsumexp(-1).square(); "
        "F.cross_entropy(z, (labels + lse.detach().long()) % V) + lse.mean()", BOTH),
    total("two losses of one head",
        "shifted = F.cross_entropy(s[:, :-1].reshape(-1, V), tokens[:, 1:].reshape(-1)); "
        "shifted + 0.3 * F.cross_entropy(s.float().view(-1, V), labels // 2)"),
    total("a classification without logits",
        "log = s.log_softmax(-1); "
        "target = torch.zeros_like(log).scatter(-1, tokens[..., None], 1); "
        "-(target * log).sum(-1) / log.shape[0]", REGION),
    total("a router's z-loss",
        "s.logsumexp(-1).square().mean() + s.topk(2, -1).values.softmax(-1).square().sum()",
        REGION),
    total("z.data", "s.data.max(-1)[1] + s.logsumexp(-1)",
        computes=("outside",), never=("exported", "decomposed")),
    total("padded classes",
        "F.cross_entropy(F.pad(s, (0, 5), value=-9.0).flatten(0, 1), labels)", REGION),
    total("a lerp with a tensor",
        "torch.lerp(s, s.detach().flip(-1), s.new_tensor(0.3)).logsumexp(-1)", REGION,
        never=("dynamic",)),  # not fused
    total("packed bits of classes", PACKED, REGION),
    total("packed bits of classes, few classes", PACKED, REGION, sizes=FEW),
    Row("rows that are counted by views",
        "h = x.view(-1, T, D); y = F.linear(h, weight); "
        "y = y.view(y.size(0) * y.size(1), y.size(-1)); F.cross_entropy(y, labels) * h.size(0)",
        ways=("dynamic",)),
    # its gradient is a sum over rows, which the other head's rows read
    Row("the mean of one loss in other logits",
        "c = z.logsumexp(-1).mean(); (F.linear(x, weight) * 2 + c).tanh().logsumexp(-1).sum()",
        BOTH, ways=("bf16", "f16")),
    *(two_heads(*case) for case in pairs(
        name=TWO_HEADS, trained=TRAINED, first=("student", "teacher"))),
    *(by_a_mask(name, rows) for name in BY_A_MASK for rows in MASKS),
), {
    REGION: ("rows and classes by a mask of some rows", "rows and classes by a mask of no rows",),
    NOTHING: ("positions by a mask of some rows", "positions by a mask of no rows",),
    BOTH: ("several picks of shifted logits, few classes", "several picks beside a total, few classes",),
})
