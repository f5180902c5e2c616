"""Modes between linear and loss: gradients on and off, inference mode, autocast, torch.func, dtypes.

What counts is whether anything on the way loses its gradient, not who switches between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.programs.row import (
    BF16,
    BOTH,
    F16,
    F32,
    F64,
    FORMULA,
    NOTHING,
    RAISES,
    REGION,
    Row,
    becoming,
)

KIND = "modes"
SWITCHED = ("aot_eager", "no_grad")
INFERRED = ("aot_eager", "inference")
OFF = ("no_grad", "inference")  # in which no gradient is lost, and a program is fused
MADE = ("made",)  # make_fx does not record no_grad
TRACED = ("exported", "made")  # in which an error is raised while a program is traced


def loss_of(logits, labels):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels)


# the text of a head under autocast
HEADS = {
    "F.linear": "F.linear(x, weight)",
    "@": "x @ weight.T",
    "addmm": "torch.addmm(x.new_ones(V), x, weight.t())",
    "einsum": "torch.einsum('nd,vd->nv', x, weight)",
}
AUTOCAST = (
    "with torch.autocast('cpu', torch.bfloat16, enabled={}):\n"
    "    z = {}\n"
    "    loss = F.cross_entropy(z, labels, class_weight)\n"
    "loss"
)

# of a class weight, and of the other operands: PyTorch raises, or computes in another dtype
WEIGHTS = {
    F32: ("float64", "bfloat16", "int64", "bool"),
    BF16: ("float64", "float32", "float16"),
    F64: ("float32", "int64"),
}
WEIGHTED = (
    "F.cross_entropy(z, labels, class_weight.to(torch.{}))",
    "F.nll_loss(z.log_softmax(-1), labels, class_weight.to(torch.{}))",
)
WEIGHTED_BY = [
    (dtype, other, WEIGHTED[i % 2])
    for i, (dtype, other) in enumerate((d, other) for d, some in WEIGHTS.items() for other in some)
]

# an operand of a dtype that has no gradient
WITHOUT = {
    "the target": "F.cross_entropy(z, soft.to(torch.{0}))",
    "class weights": "F.cross_entropy(z, soft, class_weight.to(torch.{0}))",
    "the weight": "F.cross_entropy(F.linear(x.to(torch.float8_e4m3fn), weight.to(torch.{0})), soft)",
    "x": "F.cross_entropy(F.linear(x.to(torch.{0}), weight), soft)",
    "integers": "F.cross_entropy(F.linear(x.long(), weight.long()).float(), soft.to(torch.{0}))",
}
NO_GRADIENT = ("float8_e4m3fn", "float8_e5m2", "complex64")

# Hidden states of a few hundred: times 200, f16 cannot hold the logits.
LARGE = "z = F.linear(x * 300, weight / 300); y = {}; F.cross_entropy(y, labels)"
NARROW = {
    "a constant": "z.float() * 200",
    "a constant before a function": "torch.tanh(z.float() / 3) * 3",
    "a constant after a bias": "(z.float() + bias.float()) * 200",
    "a bias taken away": "bias.float() - z.float()",
    "a small constant before a bias": "z.float() * 1e-6 + bias.float()",
    "a constant before a bias, both in 16 bits": "z * 0.7 + bias",
    "a shift before a bias": "(z.float() + 3) + bias.float()",
    "a factor in f32": "z.float() * temperature.float().exp()",
    "a factor per row in f32": "z.float() * temperatures.float()",
    "a factor in 16 bits": "z * temperature",
    "a factor per row in 16 bits": "z * temperatures",
    "a temperature after a bias": "(z.float() + bias.float()) / temperature.float()",
}

# fmt: off
ROWS = becoming((
    Row("linear under no_grad",
        "with torch.no_grad():\n"
        "    logits = F.linear(x.view(B, T, D), weight)\n"
        "loss_of(logits, labels) + x.sum() + weight.sum()",
        ways=SWITCHED, never=MADE),
    Row("loss under no_grad",
        "with torch.no_grad():\n"
        "    loss = loss_of(s, labels)\n"
        "loss + x.sum() + weight.sum()",
        ways=SWITCHED, never=MADE),
    Row("a teacher in between",
        "with torch.no_grad():\n"
        "    teacher = F.linear(x.detach().flip(0), weight).cumsum(-1).mean()\n"
        "loss_of(s, labels) * teacher",
        BOTH, ways=INFERRED, never=MADE),
    Row("both under no_grad",
        "with torch.no_grad():\n"
        "    loss = loss_of(s, labels)\n"
        "loss * x.sum() * weight.sum()",
        ways=INFERRED, never=MADE),
    Row("off on the way",
        "with torch.no_grad():\n"
        "    logits = F.linear(x.view(B, T, D), weight)\n"
        "loss_of(logits + weight.mean(-1), labels)",
        ways=SWITCHED, never=MADE),
    # it says that it needs a gradient, and passes none on
    Row("a view under no_grad",
        "with torch.no_grad():\n"
        "    logits = s.flatten(0, -2)\n"
        "F.cross_entropy(logits, labels)",
        FORMULA, ways=("aot_eager",), never=(*OFF, *MADE)),
    Row("a view under no_grad, evaluation",
        "with torch.no_grad():\n"
        "    logits = s.flatten(0, -2)\n"
        "F.cross_entropy(logits, labels)",
        trained=(), ways=INFERRED),
    Row("a metric under no_grad",
        "with torch.no_grad():\n"
        "    log = s.view(-1, V).log_softmax(-1)\n"
        "    entropy = -(log.exp() * log).sum(-1)\n"
        "(entropy * s.view(-1, V).log_softmax(-1).gather(1, labels.view(-1, 1)).squeeze(1)).sum()",
        ways=SWITCHED, never=MADE),
    Row("a reference in inference mode",
        "with torch.inference_mode():\n"
        "    logits = F.linear(x.view(B, T, D), weight).view(-1, V)\n"
        "    picked = logits.log_softmax(-1).gather(-1, labels[:, None]).squeeze(-1)\n"
        "(loss_of(F.linear(x.view(B, T, D), weight), labels), picked)",
        ways=INFERRED, never=MADE),
    Row("frozen logits",
        "with torch.inference_mode():\n"
        "    logits = F.linear(x, weight)\n"
        "loss_of(logits, labels)",
        ways=INFERRED, never=("exported", *MADE)),
    Row("a metric in inference mode",
        "with torch.inference_mode():\n"
        "    return s.view(-1, V).logsumexp(-1) + x[:, 0]",
        ways=INFERRED, never=MADE),
    Row("gradients in inference mode",
        "with torch.inference_mode():\n"
        "    logits = F.linear(x, weight)\n"
        "    with torch.enable_grad():\n"
        "        logits = logits + weight.sum()\n"
        "    at = labels.view(-1)\n"
        "with torch.no_grad(), torch.inference_mode():\n"
        "    logits = logits.view(-1, V)\n"
        "F.cross_entropy(logits, at)",
        FORMULA, ways=("aot_eager",), never=(*OFF, *MADE)),
    # which switches gradients on, whatever they were
    Row("inference mode off",
        "with torch.inference_mode(False):\n"
        "    return loss_of(s, labels)",
        ways=INFERRED),
    Row("a head where inference mode is off",
        "with torch.inference_mode(False):\n"
        "    logits = F.linear(x.view(B, T, D), weight)\n"
        "    return (loss_of(logits, labels), logits)",
        ways=SWITCHED),
    Row("constants",
        "loss = F.nll_loss(3 - z, labels, ignore_index=3); "
        "loss + F.nll_loss(z.sigmoid() - 2, labels)",
        REGION, ways=SWITCHED),
    # its factor has no gradient in eager, which is not one of zeros
    Row("a row that is written and not read",
        "row = (z.softmax(-1) * factor).sum(-1); row[0] = 0; F.cross_entropy(z, labels)",
        ways=("aot_eager",)),
    # logits cast to 16 bits lose digits in eager; the fused loss is nearer to the exact one
    Row("a narrowing cast", "F.cross_entropy(z.to(torch.bfloat16).float(), labels)"),
    # the casts are those that autocast would have made inside of the call
    *(Row(f"autocast, {head}", AUTOCAST.format(True, text), ways=("autocast",))
      for head, text in HEADS.items()),
    *(Row(f"autocast that is off, {head}", AUTOCAST.format(False, text), ways=("autocast",))
      for head, text in HEADS.items()),
    *(Row(f"class weights in {other} for {str(dtype)[6:]}", text.format(other), RAISES,
          dtype=dtype, ways=("autocast",), never=TRACED)
      for dtype, other, text in WEIGHTED_BY),
    *(Row(f"{operand} in {other}", text.format(other), trained=(), never=TRACED,
          becomes=NOTHING if (operand, other) == ("class weights", "complex64") else RAISES)
      for operand, text in WITHOUT.items() for other in NO_GRADIENT),
    *(Row(f"in 16 bits, {name}", LARGE.format(text), dtype=F16, ways=("bf16",))
      for name, text in NARROW.items()),
), {
    REGION: ("autocast, einsum", "in 16 bits, a bias taken away", "in 16 bits, a small constant before a bias", "in 16 bits, a constant before a bias, both in 16 bits", "in 16 bits, a factor in f32", "in 16 bits, a factor per row in f32", "in 16 bits, a factor in 16 bits", "in 16 bits, a factor per row in 16 bits", "in 16 bits, a temperature after a bias",),
})
