"""What writes between a head and its loss, and afterwards: the rewritten program is eager's."""

from __future__ import annotations

import torch

from tests.programs.row import BOTH, FORMULA, NOTHING, REGION, Row

KIND = "writes"


@torch.library.custom_op("fxpass_tests::double_", mutates_args=("h",))
def double_(h: torch.Tensor) -> None:
    h.mul_(2)


@double_.register_fake
def _(h):
    return None


# Eager saves the weight alone where x is trained alone, and refuses what writes to it.
X, EVALUATED = ("x",), ()
# a checkpoint runs what writes to its arguments a second time
AGAIN = ("checkpointed",)
BETWEEN = {
    "an operator's packet": (EVALUATED, "torch.ops.fxpass_tests.double_(h)"),
    "an operator's overload": (EVALUATED, "torch.ops.fxpass_tests.double_.default(h)"),
    "relu by position": (X, "F.relu(h, True)"),
    "dropout by position": (X, "F.dropout(h, 1.0, True, True)"),
    "an embedding that is renormalised": (
        EVALUATED,
        "found = F.embedding(labels, weight, None, 0.1)",
    ),
    "an out argument": (EVALUATED, "torch.add(h, 1, out=h)"),
    "data": (X, "h.data.mul_(2)"),
    "an alias": (X, "h.view(-1)[:3].zero_()"),
}
IN_PLACE = {
    "relu": "",
    "hardtanh": "-1.0, 1.0, ",
    "elu": "1.0, ",
    "celu": "1.0, ",
    "selu": "",
    "silu": "",
    "mish": "",
}
# a checkpoint between head and loss, which writes to what it makes itself, or also to its argument
CHECKPOINT = (
    "def body(h, w):\n"
    "    y = h * 2\n"
    "    y.add_(1)\n"
    "    {}\n"
    "    return (y @ w.T).sum()\n"
    "h = x * 1\n"
    "z = F.linear(h, weight)\n"
    "extra = checkpoint(body, h, weight, use_reentrant=False)\n"
    "F.cross_entropy(z, labels) + extra"
)
# after the loss, of which reduction: backward must not read it
AFTER = {
    "logits": "z = F.linear(x, weight, bias); loss = {}; z /= 2; (loss.square().mean(), z.softmax(-1))",
    "bias": "z = F.linear(x, weight) + bias; loss = {}; "
    "bias.mul_(0.5).add_(F.one_hot(labels, V).sum(0)); loss.square().mean()",
    "bias, by data": "z = F.linear(x, weight) + bias; loss = {}; bias.data.mul_(0.5); "
    "loss.square().mean()",
}
LOSSES = {
    "rows": "F.cross_entropy(z, labels, reduction='none')",
    "a mean": "F.cross_entropy(z, labels)",
}

# fmt: off
ROWS = (
    *(Row(name, f"h = x * 1; z = F.linear(h, weight); {write}; F.cross_entropy(z, labels)",
          trained=trained)
      for name, (trained, write) in BETWEEN.items()),
    Row("hardtanh of the logits",
        "F.hardtanh(z, -1.0, 1.0, True); (F.cross_entropy(z, labels), z)",
        NOTHING, trained=X),
    Row("an embedding that is renormalised afterwards",
        "F.cross_entropy(z, labels) + F.embedding(labels, weight, max_norm=0.1).sum()",
        trained=()),
    Row("running statistics",
        "normed = F.batch_norm(x.new_ones(3, V), bias, x.new_ones(V), training=True); "
        "F.cross_entropy(z + bias, labels) + normed.sum()",
        trained=X),
    Row("statistics on the way",
        "y = z + bias; F.batch_norm(x.new_ones(3, V), bias, x.new_ones(V), None, None, True); "
        "F.cross_entropy(y, labels)",
        trained=X),
    Row("labels after they are read",
        "picked = z.gather(-1, labels[:, None]).squeeze(-1); labels.zero_(); "
        "(z.logsumexp(-1) - picked).mean()",
        trained=()),
    Row("lse after it is computed",
        "lse = z.logsumexp(-1); lse.mul_(2); "
        "(lse - z.gather(-1, labels[:, None]).squeeze(-1)).mean()",
        trained=()),
    Row("logits between lse and gather",
        "lse = z.logsumexp(-1); z.mul_(2); "
        "(lse - z.gather(-1, labels[:, None]).squeeze(-1)).mean()",
        trained=()),
    Row("row numbers that were written",
        "rows = torch.arange(N); rows[0] = 3; -z.log_softmax(-1)[rows, labels].mean()"),
    Row("rows in another order",
        "order = torch.arange(N).flip(0); "
        "(z.logsumexp(-1) - z.gather(-1, labels[:, None])[order, 0]).square().mean()"),
    Row("bias after it is added",
        "y = z + bias; bias.mul_(3); F.cross_entropy(y, labels)",
        trained=("x", "weight")),
    # as a part of the way from the head to the loss, both are the function
    *(Row(f"{name} in place by {how}",
          f"y = F.{name}(z, {before}{flag}); F.cross_entropy(y, labels)",
          REGION, never=AGAIN)
      for name, positions in IN_PLACE.items()
      for how, before, flag in (("position", positions, "True"), ("name", "", "inplace=True"))),
    Row("a checkpoint between that writes to its own", CHECKPOINT.format("pass"), BOTH),
    Row("a checkpoint between that writes to its argument", CHECKPOINT.format("h.add_(1)"),
        BOTH, trained=()),
    *(Row(f"{name} after the loss of {of}", text.format(loss),
          NOTHING if name == "logits" else FORMULA, left="eq, convert_element_type" if name == "bias" else "",
          trained=("x", "weight"),
          ways=("aot_eager", "inductor") if "data" in name else ("aot_eager",), never=AGAIN)
      for name, text in AFTER.items() for of, loss in LOSSES.items()),
    Row("a trained bias, by data after the loss of a mean",
        AFTER["bias, by data"].format(LOSSES["a mean"]),
        ways=("aot_eager", "inductor"), never=AGAIN),
)
