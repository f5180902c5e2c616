"""Logits that leave: who reads them decides what becomes of them, and the reader sees no difference.

Logits that are returned are computed when they are read, if the graph can compute them again, and
else the head stays as it is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.programs.row import BOTH, NOTHING, REGION, Row

KIND = "logits that leave"
BOTH_INNER = ("aot_eager",)
MADE = ("made",)  # make_fx does not record no_grad
# What leaves a checkpoint is computed in it, and what is written after the loss when it runs again.
LEAVES = ("checkpointed",)
TRAINS = ("no_grad",)  # where no gradient is wanted, logits are not deferred


def loss_of(logits, labels):
    return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), labels)


# what is returned beside the loss, what exists then, and another way
BESIDE = {
    "nothing else": ("loss", "", "no_grad"),
    "a shape": ("(loss, s.shape)", "", "aot_eager"),
    "zeros like them": ("(loss, torch.zeros_like(s))", "full", "aot_eager"),
    "their dtype": ("(loss, torch.ones(2, dtype=torch.int64).to(s))", "", "no_grad"),
    "their largest": ("(loss, s.argmax(-1))", "", "aot_eager"),
    "themselves": ("(loss, s)", "", "aot_eager"),
    "twice": ("(s, loss, s)", "", "aot_eager"),
    "in f32": ("(loss, s.float())", "", "bf16"),
    "scaled": ("(loss, s / 3)", "", "aot_eager"),
    "some of them": ("(loss, s[:, -1:], s.half())", "", "aot_eager"),
    "a z-loss": ("(loss + s.logsumexp(-1).square().mean(), s)", "", "aot_eager"),
}
# Where others have to exist, the loss is computed of them.
KEPT = {
    "two views": ("(loss, s[:, -1:], s.float())", "aot_eager"),
    "running sums": ("(loss, s.cumsum(-1))", "aot_eager"),
    "them and running sums": ("(loss, s, s.cumsum(-1))", "aot_eager"),
    "softmax": ("(loss, s.softmax(-1))", "no_grad"),
}
# Logits are deferred in training alone.
EXIST = {"themselves": "s", "twice": "s, s", "in f32": "s.float()", "scaled": "s / 3"}

# What a graph does to the operands of the logits that it returns, and what it returns.
WRITES = {
    "hidden states": ("h.add_(1)", "z"),
    "augmented": ("h.__iadd__(1).mean()", "z"),
    "weight": ("w.mul_(2)", "z / 3"),
    "bias": ("b.zero_().sum()", "z.float()"),
    "an alias": ("h.view(-1)[3:5].fill_(7).sum()", "z"),
    "data": ("h.data.mul_(3).sum()", "z"),
    "detached": ("w.detach().neg_().sum()", "z[1:]"),
    "out": ("torch.mul(b, 2, out=b).sum()", "z"),
    "a list": ("torch._foreach_mul_([w], 2)", "z"),
}
WRITTEN = (
    "h, w, b = x * factor[0], weight * factor[0], bias * factor[0]\n"
    "z = F.linear(h, w, b)\n"
    "loss = loss_of(z, labels)\n"
    "with torch.no_grad():\n"
    "    made = {}\n"
    "(made, loss, {})"
)
WRITTEN_LOGITS = (
    "z = F.linear(x, weight, bias)\n"
    "loss = loss_of(z, labels)\n"
    "with torch.no_grad():\n"
    "    made = {}\n"
    "(made, loss, z)"
)
GIVEN = (
    "z = F.linear(x, weight, bias)\n"
    "loss = loss_of(z, labels)\n"
    "with torch.no_grad():\n"
    "    {}.mul_(2)\n"
    "(loss, z)"
)
# A cast is not done again from a bias without the mask, or with another one.
CAST = (
    "b = bias.bfloat16(){}; z = F.linear(x.bfloat16(), weight.bfloat16(), b){}; "
    "(loss_of(z, labels), z)"
)

# fmt: off
ROWS = (
    *(Row(name, f"loss = loss_of(s, labels); {text}", left=left, ways=(way,),
          never=tuple({*LEAVES, *TRAINS} - {way}))
      for name, (text, left, way) in BESIDE.items()),
    *(Row(name, f"loss = loss_of(s, labels); {text}", NOTHING, ways=(way,),
          never=tuple({*LEAVES, *TRAINS} - {way}))
      for name, (text, way) in KEPT.items()),
    Row("other classes", "(loss_of(s, labels), s[..., :3])", REGION, ways=("no_grad",)),
    *(Row(f"{name}, evaluation", f"(loss_of(s, labels), {text})", NOTHING, trained=(),
          never=LEAVES)
      for name, text in EXIST.items()),
    Row("two heads",
        "a, b = F.linear(x, weight), F.linear(x * 2, weight); "
        "(loss_of(a, labels) + loss_of(b, labels), a, b)",
        ways=BOTH_INNER, never=TRAINS),
    Row("a read of two heads",
        "a, b = F.linear(x, weight), F.linear(x * 2, weight); "
        "(loss_of(a, labels) + loss_of(b, labels), a, b.cumsum(-1))",
        left="mm, 2 sub, exp, cumsum", ways=BOTH_INNER, never=TRAINS),
    Row("a sum of two heads",
        "a, b = F.linear(x, weight), F.linear(x * 2, weight); "
        "(loss_of(a, labels) + loss_of(b, labels), a + b)",
        ways=BOTH_INNER, never=TRAINS),
    Row("the largest of two heads",
        "a, b = F.linear(x, weight), F.linear(x * 2, weight); "
        "((loss_of(a, labels) + loss_of(b, labels)) * b.amax(), a + b)",
        NOTHING, ways=BOTH_INNER, never=TRAINS),
    Row("out of a checkpoint, read by a z-loss",
        "def head(x, weight, labels):\n"
        "    logits = F.linear(x, weight)\n"
        "    return (loss_of(logits, labels), logits)\n"
        "loss, z = checkpoint(head, x, weight, labels, use_reentrant=False)\n"
        "loss + z.logsumexp(-1).square().mean()",
        ways=BOTH_INNER),
    Row("written",
        "s += weight.mean(-1); s /= 2; "
        "(F.cross_entropy(30 * torch.tanh(s.view(-1, V) / 30), labels), s.argmax(-1), s)",
        REGION, ways=BOTH_INNER, never=TRAINS),
    Row("written and kept",
        "s += weight.mean(-1); s /= 2; "
        "(F.cross_entropy(30 * torch.tanh(s.view(-1, V) / 30), labels), s.cumsum(-1), s)",
        NOTHING, ways=BOTH_INNER),
    Row("written by a function", "y = s.tanh_(); (loss_of(y, labels), y.cumsum(-1))",
        NOTHING, ways=BOTH_INNER),
    # backward does not read them where they have changed
    Row("written after the loss",
        "loss = F.cross_entropy(z, labels, reduction='none'); z /= 2; (loss, z.softmax(-1))",
        NOTHING, ways=BOTH_INNER),
    # eager's gradient of the returned logits is the linear's: the sine is not differentiated
    Row("written without gradients",
        "with torch.no_grad():\n"
        "    s.sin_()\n"
        "(loss_of(F.linear(x, weight), labels), s)",
        left="mm, sin", ways=BOTH_INNER),
    Row("sharing memory", "(loss_of(s, labels), s, s[:, -1])", ways=BOTH_INNER, never=TRAINS),
    # the cast makes what the view is of contiguous; the kept logits are not
    Row("viewed after a copy",
        "shifted = s[..., :-1, :].double().view(size=(-1, V)); "
        "(F.cross_entropy(shifted, tokens[:, 1:].reshape(-1)), s.cumsum(-1))",
        NOTHING, ways=BOTH_INNER),
    # a shape is no result of a graph
    Row("their shape", "y = s.expand(s.shape); (loss_of(y, labels), y)", ways=BOTH_INNER, never=TRAINS),
    Row("without gradients",
        "with torch.no_grad():\n"
        "    logits = F.linear(x, weight)\n"
        "(loss_of(F.linear(x * 2, weight), labels) + loss_of(logits, labels).detach(), logits)",
        left="mm, 2 sub, exp", ways=BOTH_INNER),
    # eager saves neither x nor weight for the gradient of the bias
    *(Row(f"{name}: written after the loss by the graph", WRITTEN.format(write, returned),
          NOTHING, trained=("bias",), ways=BOTH_INNER, never=(*MADE, *LEAVES))
      for name, (write, returned) in WRITES.items()),
    *(Row(f"{name}: written after the loss without gradients", WRITTEN_LOGITS.format(write),
          NOTHING, trained=("bias",), ways=BOTH_INNER, never=(*MADE, *LEAVES))
      for name, write in {"themselves": "z.mul_(2).sum()", "an item": "z[0].fill_(2).sum()"}.items()),
    *(Row(f"{name}: an input written after the loss", GIVEN.format(name), NOTHING,
          trained=() if name == "bias" else ("bias",), ways=BOTH_INNER, never=(*MADE, *LEAVES))
      for name in ("x", "weight", "bias")),
    *(Row(f"a cast bias, {name} written", CAST.format(*writes), trained=("x", "weight"),
          ways=BOTH_INNER, never=TRAINS)
      for name, writes in {"result": ("; b[0] = -1e4", ""), "source": ("", "; bias[0] = -1e4"),
                           "nothing": ("", "")}.items()),
    # a deferred tensor has a shape before its values are known
    Row("a size that depends on data",
        "rows = s[mask]; (F.cross_entropy(rows, tokens[mask]), s[mask])", NOTHING, dynamo={"capture_dynamic_output_shape_ops": True}),
    # the operator reads logits whose classes are last
    Row("classes before rows",
        "y = torch.einsum('nsd,vd->nvs', x.view(B, T, D), weight); (F.cross_entropy(y, tokens), y)",
        NOTHING, trained=()),
    # a concatenation is no head, whose inputs would have to be saved for what is made of it
    Row("what is made of a concatenation",
        "exist = torch.cat([F.linear(x, part) for part in weight.chunk(3)], -1); "
        "rows = exist.square(); "
        "mixed = torch.logaddexp(rows.log_softmax(-1), z.log_softmax(-1)); "
        "(mixed.mean(-1).sum(), loss_of(z, labels), rows)", NOTHING),
)
