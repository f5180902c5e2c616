"""Programs that look like others: what distinguishes them has to be read.

The sizes of rows, classes and hidden states are equal: a wrong dimension has the right shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass import messages
from tests.programs.operands import SQUARE
from tests.programs.row import BF16, BOTH, FORMULA, NOTHING, RAISES, REGION, Row, becoming

KIND = "lookalikes"

# Without gradients, other programs; those that are never run so have a row of their own.
EVALUATED = ("no_grad",)
LOWEST = torch.finfo(torch.float32).min


class Written(torch.autograd.Function):
    """Dynamo traces it into a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.cross_entropy(F.linear(x, weight), labels)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grad_outputs, ctx.saved_tensors
        return grad * x, grad * weight, None


def square(name: str, text: str, *expected: Any, **keywords: Any) -> Row:
    if "no_grad" in text:  # which the graphs of make_fx forget
        keywords["never"] = (*keywords.get("never", ()), "made", "made before autograd")
    return Row(name, text, *expected, sizes=SQUARE, **keywords)


def masked_rows(name: str, mask: str) -> Row:
    loss = f"F.cross_entropy(z + ({mask})[:, None], labels)"
    return square(name, f"{loss} + z.logsumexp(-1).mean()", REGION)


DOUBLED = "with torch.no_grad():\n    y = z.mul_(2)\ny.sum(-1)"
ONE_ROW = "with torch.no_grad():\n    row = z[0]\nz.sum(-1)[0] + row.softmax(-1).square().sum(-1)"
# The linear cannot move down past the change; autograd raises.
OPERANDS_THAT_CHANGE = {"x": "x", "the weight": "weight", "a view of x": "x[0]"}
CHANGED = (
    "x = x * 1; weight = weight * 1; y = F.linear(x, weight); {}.detach().mul_(2); "
    "F.cross_entropy(y, labels)"
)
BIASED = "F.linear(x, weight, {}).logsumexp(-1).sum()"
BIASES = {
    "[1, V]": ("prior[None]", REGION),
    "[N, 1]": ("temperatures", NOTHING),
    "[N, V]": ("teacher", NOTHING),
}
# Bit by bit, however both are computed.
INCREASING = {
    "logits": ("z", FORMULA),
    "a temperature": ("z / 0.7", REGION),
    "a softcap": ("3 * (z / 3).tanh()", REGION),
    "logits and a row": ("z / 2 + z.logsumexp(-1, keepdim=True)", FORMULA),
}
OWN = "y = {}; own = y.gather(-1, labels[:, None]); ({} == own, z.logsumexp(-1))"
ROWWISE_MAX = "y.max(-1, keepdim=True).values"

# fmt: off
ROWS = becoming((
    # ---- tensors that change between two reads
    square("other rows are ignored",
        "F.cross_entropy(z, labels) + F.cross_entropy(z, labels, ignore_index=4)"),
    square("labels change where rows are easy",
        "labels = labels.clone()\n"
        "with torch.no_grad():\n"
        "    easy = F.cross_entropy(z, labels, reduction='none') < 2\n"
        "    labels.masked_fill_(easy, -100)\n"
        "F.cross_entropy(z, labels)", BOTH, ways=EVALUATED),
    square("labels change",
        "labels = labels.clone(); lse = z[1:].logsumexp(-1); labels.copy_((labels + 1) % V); "
        "picked = (z + prior).log_softmax(-1).gather(-1, labels[:, None]); "
        "lse.square().sum() + picked.square().sum() + (z[1:] + prior).logsumexp(-1).sum()", REGION,
        ways=EVALUATED),
    square("labels change behind a metric",
        "labels = labels.clone(); detached = z.detach(); "
        "picked = detached.gather(1, labels[:, None]); labels.fill_(1); "
        "rank = (detached - picked).gather(1, candidates[:, :1]); "
        "F.cross_entropy(z, labels) + rank.sum()", ways=EVALUATED),
    square("atoms change",
        "p = z.softmax(-1); atoms = atoms.clone()\n"
        "with torch.no_grad():\n"
        "    first = (p * atoms).sum(-1)\n"
        "    atoms.mul_(3)\n"
        "(p * atoms).sum() + first.sum()", FORMULA, ways=EVALUATED),
    square("targets change",
        "target = teacher.softmax(-1)\n"
        "with torch.no_grad():\n"
        "    first = F.cross_entropy(z, target, reduction='none')\n"
        "target.mul_(0.5)\n"
        "first.square().sum() + F.cross_entropy(z, target)",
        REGION, ways=EVALUATED),
    square("an index changes",
        "at = torch.arange(N); at[0] = 1; z.log_softmax(-1)[at, labels].square().sum()"),
    square("a label that is ignored, then counted from the end",
        "labels = labels.where(rows, -3); loss = F.cross_entropy(z, labels, ignore_index=-3); "
        "loss + z.log_softmax(-1)[torch.arange(N), labels].square().sum()"),
    square("a label that is counted from the end, then ignored",
        "labels = labels.where(rows, -3); "
        "own = z.log_softmax(-1)[torch.arange(N), labels].square().sum(); "
        "own + F.cross_entropy(z, labels, ignore_index=-3)"),
    # ---- operands that are computed from the logits
    square("class weights from its losses",
        "with torch.no_grad():\n"
        "    losses = F.cross_entropy(z, labels, reduction='none')\n"
        "F.cross_entropy(z, labels, weight=losses.sigmoid(), label_smoothing=0.1)",
        NOTHING),
    square("a gate from its lse",
        "with torch.no_grad():\n"
        "    gate = (teacher * z.logsumexp(-1, keepdim=True)).sigmoid()\n"
        "(z.softmax(-1) * gate).sum()", REGION),
    square("weights from its loss",
        "loss = F.cross_entropy(z, labels)\n"
        "with torch.no_grad():\n"
        "    weight = (prior * loss).sigmoid()\n"
        "    other = F.cross_entropy(z, labels, weight=weight, label_smoothing=0.1)\n"
        "loss + 0.5 * other"),
    square("the lse of a total",
        "loss = z.logsumexp(-1).mean()\n"
        "with torch.no_grad():\n"
        "    weight = (prior * loss).sigmoid()\n"
        "    other = (z.log_softmax(-1) * weight).sum(-1)\n"
        "loss + other.sum()", FORMULA),
    square("labels that are the largest of a softmax",
        "losses = F.cross_entropy(z, z.softmax(-1).argmax(-1), reduction='none'); "
        "(losses * z.amax(-1).ge(0.3)).sum()", REGION),
    square("a row times itself",
        "one, other = (z.log_softmax(-1).gather(1, labels[:, None])[:, 0] for _ in range(2)); "
        "torch.mul(one, other=other).sum() + torch.dot(one, tensor=other)"),
    square("a factor that the loss depends on twice",
        "first = F.cross_entropy(z * margins.sum().exp(), labels); "
        "first + F.cross_entropy(F.linear(x * first, weight) * first, labels)", REGION),
    # ---- rows and classes
    square("rows that are repeated",
        "f = teacher[:3, :1].exp(); (s * f).logsumexp(-1).sum() + (s[0] * f).logsumexp(-1).sum()", REGION),
    square("rows in another order", "z[[*range(1, N), 0], labels]"),
    square("rows by a rounded index",
        "z.log_softmax(-1)[torch.arange(N).bool().long(), labels]"),
    square("rows in another order, less their lse",
        "(z - z.logsumexp(-1, True)).view(2, 3, V).transpose(0, 1)"
        ".gather(-1, labels.view(3, 2, 1))", NOTHING),
    square("rows in another order, with values",
        "(z * teacher).view(2, 3, V).transpose(0, 1).sum(-1) * labels.view(3, 2)", REGION),
    square("rows as classes", "F.cross_entropy(z.t(), labels)"),
    square("a softmax over rows", "F.nll_loss(z.log_softmax(0), labels)", REGION),
    square("a softmax over rows, and over classes",
        "z.log_softmax(0).diagonal().sum() + F.cross_entropy(z, labels) + F.cross_entropy(z.t(), labels)",
        REGION),
    square("one mask of both dimensions",
        "m = teacher > 0; columns = z.T.masked_fill(m, -9.0).logsumexp(0); "
        "(z.masked_fill(m, -9.0).logsumexp(-1) - columns).square().sum()", NOTHING),
    square("one target of both dimensions",
        "target = teacher.softmax(-1); "
        "F.cross_entropy(z, target) + (z.T.log_softmax(0) * target).sum()", NOTHING),
    square("classes flattened with rows",
        "F.cross_entropy(s.mT.flatten(0, 1), labels[:3].repeat(4) % 3)",
        NOTHING, messages.ROWS_AND_CLASSES),
    square("one class", "F.cross_entropy(s[..., 0], labels[:2] % 3)", REGION),
    square("a new dimension by True", "z[True].logsumexp(1).square().mean()",
        REGION),
    square("an index of another dimension",
        "s[:, :2][torch.arange(2), torch.arange(2)[:, None], labels[:4].view(2, 2)]"),
    square("index tensors that are not adjacent",
        "F.cross_entropy(z[None][torch.zeros(4).long(), :, labels[:1]], labels[:4])",
        NOTHING, "indexes in a way that is not known"),
    square("the largest logits alone",
        "z.masked_fill(z < z.detach().topk(3).values[..., -1:], -9).logsumexp(-1)", REGION),
    masked_rows("masked rows", "(1 - rows.float()) * LOWEST"),
    masked_rows("rows at -inf", "torch.where(rows, 0.0, -torch.inf)"),
    square("no classes", "(z.logsumexp(-1).sum() + z[..., V:].tanh().sum(), z[..., V:].mean(-1))",
        REGION),
    square("a label of no classes",
        "z[..., V:].log_softmax(-1).gather(-1, labels[:, None])", RAISES),
    square("a label below 0", "z.log_softmax(-1).gather(-1, labels[:, None] - 200).sum()", RAISES),
    square("a number of rows that depends on data",
        "n = rows.sum().item(); torch._check(n >= 1); torch._check(n <= N); "
        "F.cross_entropy(z.narrow(0, 0, n), labels[:n], reduction='none').sum()", NOTHING,
        dynamo={"capture_scalar_outputs": True}, never=("made", "made before autograd")),
    square("classes by a mask",
        "some = torch.arange(len(weight)) % 2 == 0; F.cross_entropy(z[..., some], labels // 2)",
        NOTHING, messages.MASK_OF_LOGITS,
        dynamo={"capture_dynamic_output_shape_ops": True}),
    # ---- arithmetic
    square("small integers that are given",
        "(z.relu() + (F.one_hot(labels, V).to(torch.uint8) - 1)).logsumexp(-1).sum()", REGION),
    square("integers that divide",
        "F.cross_entropy(z / (labels + 2)[:, None] / (labels + 2)[:, None], labels)",
        never=("checkpointed",)),  # not fused
    square("booleans of rows",
        "y = -z.log_softmax(-1) + (labels > 2)[:, None] + (labels < 5)[:, None]; "
        "y.gather(1, labels[:, None]).sum()"),
    square("a gate of 0", "F.cross_entropy(z * (prior.sum() * 0) + prior, labels)"),
    square("a softmax behind a gate of 0",
        "((z * (prior.sum() * 0)).softmax(-1) * z).gather(1, labels[:, None]).sum()", REGION),
    square("logits that cancel", "(z - z).softmax(-1).square().sum(-1)", REGION),
    square("a logarithm of two negative factors",
        "f = -margins.exp().sum(); (z.softmax(-1) * f * f).log().gather(1, labels[:, None]).sum()"),
    square("a logarithm that is 0 times infinity",
        "torch.xlogy(z.square(), z.softmax(-1)).sum(-1)", REGION),
    square("a logarithm of logits",
        "torch.special.entr(z.square()).softmax(-1).square().sum(-1)", REGION),
    square("a rounded quotient",
        "z.softmax(-1).div(z.amax(-1, keepdim=True), rounding_mode='floor').sum(-1)", REGION),
    square("a constant that a cast has cut", "(z * torch.full((V,), 2.7).int().float()).logsumexp(-1)"),
    square("constants that a cast has cut",
        "(z * torch.full_like(z, 2.7).int().float()).square().sum(-1)", REGION),
    square("given values that a cast has cut", "(z + teacher.int().float()).logsumexp(-1)", REGION),
    square("their bits", "(z.detach().bfloat16().view(torch.int16) > 16000).sum(-1)", NOTHING),
    square("a cast to 8 bits", "z.to(torch.float8_e5m2).float().mean(-1)", NOTHING),
    square("float64 by promotion", "F.cross_entropy(z + prior.double(), labels)", REGION),
    square("a dot product of 16-bit losses",
        "torch.dot(F.cross_entropy(z, labels, reduction='none'), rows.to(z.dtype))", dtype=BF16),
    # No logit is larger than itself.
    square("the rank of a label",
        "y = F.hardsigmoid(z); "
        "(F.cross_entropy(y, labels), (y > y.gather(1, labels[:, None])).sum(1))", REGION),
    square("a factor that is made after the logits",
        "y = z * torch.tensor(3.0); "
        "losses = F.cross_entropy(1.5 * y, labels), F.nll_loss(y, labels); "
        "torch.stack([*losses, y.sort().values[0, 0]])", BOTH),
    # Their lse is too large for the exponential, and so is the largest of them.
    *(Row(f"logits times {factor}, less the largest",
          f"y = z * {factor}; m = y.max(-1, keepdim=True).values.detach(); "
          "((y - m).exp().sum(-1).log() + m.squeeze(-1)).sum()", ways=("no_grad",))
      for factor in (100, 30000)),
    *(Row(f"a target that is the largest of {name}", OWN.format(text, ROWWISE_MAX), becomes)
      for name, (text, becomes) in INCREASING.items()),
    *(Row(f"a target that is the largest of {name}, evaluation",
          OWN.format(text, "y.amax(-1, keepdim=True)"), becomes, trained=())
      for name, (text, becomes) in INCREASING.items()),
    # ---- writes
    square("an item that is written", "y = z * 1; y[0] = 0; F.cross_entropy(y, labels)",
        NOTHING, messages.NO_ROWS),
    square("written, and read before",
        "y = z * 1; largest = y.detach(); y.mul_(2); F.cross_entropy(y, labels) + largest.amax()",
        ways=EVALUATED),
    square("a write without gradients", DOUBLED, REGION, never=EVALUATED),
    square("a write without gradients, evaluation", DOUBLED, REGION, trained=()),
    square("a view without gradients, and a softmax with", ONE_ROW, REGION, never=EVALUATED),
    square("a view without gradients, and a softmax with, evaluation", ONE_ROW, REGION, trained=()),
    *(square(f"{name} changes", CHANGED.format(what), RAISES, never=EVALUATED)
      for name, what in OPERANDS_THAT_CHANGE.items()),
    *(square(f"{name} changes, evaluation", CHANGED.format(what), REGION, trained=())
      for name, what in OPERANDS_THAT_CHANGE.items()),
    # ---- products
    square("a loss in a branch",
        "def branch(x, weight, labels):\n"
        "    return F.cross_entropy(F.linear(x, weight), labels)\n"
        "torch.cond(x.sum() > 0, branch, branch, (x, weight, labels))",
        NOTHING, "it is inside %cond", ways=("aot_eager", "no_grad")),
    square("a loss in an autograd.Function", "Written.apply(x, weight, labels)",
        FORMULA, ways=("aot_eager",)),
    square("a product of hidden states", "F.cross_entropy(x @ x.t(), labels)"),
    square("logits that are no product",
        "F.cross_entropy(F.embedding(labels, x), labels)", NOTHING, "its logits enter the graph"),
    square("logits from outside", "F.cross_entropy(x, labels) + z.logsumexp(-1).mean()"),
    square("addmm of a matrix", "F.cross_entropy(torch.addmm(teacher, x, weight.t()), labels)",
        NOTHING, messages.SEVERAL_WEIGHTS),
    square("a weight per batch",
        "h = torch.stack([x, second_x]); w = torch.stack([weight, weight * 2]); "
        "F.cross_entropy(torch.matmul(h, w.mT).flatten(0, 1), labels.repeat(2))",
        NOTHING, messages.SEVERAL_WEIGHTS),
    square("an einsum that sums rows",
        "h = torch.stack([x, second_x]); "
        "F.cross_entropy(torch.einsum('bnd,vd->bv', h, weight), labels[:2])", REGION, left="cat"),
    square("a contracted ellipsis",
        "h = torch.stack([x, second_x]); torch.einsum('n...,v...->nv', h, weight).logsumexp(-1)", BOTH,
        left="cat"),
    square("a bias [1] that is broadcast", BIASED.format("prior[:1]"), REGION),
    *(square(f"a bias {shape} that is broadcast", BIASED.format(bias), becomes)
      for shape, (bias, becomes) in BIASES.items()),
), {
    FORMULA: ("x changes, evaluation", "the weight changes, evaluation", "a view of x changes, evaluation",),
    REGION: ("logits times 100, less the largest", "logits times 30000, less the largest",),
    BOTH: ("a target that is the largest of a softcap", "a target that is the largest of a temperature",),
})
