"""Parts of a program under ``no_grad``: no gradient flows through a view that is made there.

Such a view needs a gradient, as a leaf does, and the gradient goes no further. A tensor that is
computed there needs none, and must not be computed anew where gradients are on.
"""

from __future__ import annotations

import torch

from tests.programs.row import FORMULA, NOTHING, REGION, Row

KIND = "islands without gradients"
INNER = ("aot_eager",)
MADE = ("made",)  # make_fx does not record no_grad

# fmt: off
ROWS = (
    Row("a temperature",
        "with torch.no_grad():\n"
        "    logits = x @ weight.t()\n"
        "F.cross_entropy(logits * temperatures.sum(), labels)", REGION,
        ways=INNER, never=MADE),
    Row("a vector",
        "with torch.no_grad():\n"
        "    logits = x @ weight.t()\n"
        "F.cross_entropy(logits + soft[0], labels)",
        ways=INNER, never=MADE),
    Row("a turned weight",
        "with torch.no_grad():\n"
        "    turned = weight.t()\n"
        "F.cross_entropy(x @ turned, labels)",
        ways=INNER, never=MADE),
    Row("some rows",
        "losses = F.cross_entropy(z, labels, reduction='none')\n"
        "with torch.no_grad():\n"
        "    part = losses[:3]\n"
        "(losses * values).sum() + (part * values[:3]).sum()",
        ways=INNER, never=MADE),
    Row("a view of the largest",
        "largest = z.max(-1, keepdim=True).values\n"
        "with torch.no_grad():\n"
        "    largest = largest.view(N, 1)\n"
        "(z - largest).exp().sum(-1)",
        ways=INNER, never=MADE),
    Row("weights that are moved",
        "losses = F.cross_entropy(z, labels, reduction='none')\n"
        "with torch.no_grad():\n"
        "    weights = temperatures.flatten() * 2\n"
        "(losses * weights).sum() + (weights * values).sum()",
        ways=INNER, never=MADE),
    Row("targets that are moved",
        "log = z.log_softmax(-1)\n"
        "with torch.no_grad():\n"
        "    target = soft * 2\n"
        "-(target * log).sum()",
        FORMULA, ways=INNER, never=MADE),
    Row("a cast, logits returned",
        "with torch.no_grad():\n"
        "    narrow = weight.bfloat16()\n"
        "z = F.linear(x.bfloat16(), narrow)\n"
        "(F.cross_entropy(z.float(), labels), z)",
        ways=INNER, never=MADE),
    Row("a view, logits returned",
        "with torch.no_grad():\n"
        "    h = x.view(B, T, D)\n"
        "s = F.linear(h, weight)\n"
        "(F.cross_entropy(s.view(-1, V), labels), s)", NOTHING, ways=INNER, never=MADE),
    # one of two reductions reads a target without gradients
    Row("a target of two reductions",
        "targets = soft.softmax(-1)\n"
        "log = z.log_softmax(-1)\n"
        "with torch.no_grad():\n"
        "    metric = F.kl_div(log, targets, reduction='none').sum(-1)\n"
        "(metric + F.kl_div(log, targets, reduction='none').sum(-1)).sin().sum()",
        REGION, ways=INNER, never=MADE),
    # PyTorch does not say what made such a view
    Row("a turned weight that is written to",
        "z = x.mm(weight.T); F.hardtanh(weight, -1.0, 1.0, True); z.logsumexp(-1)",
        FORMULA, trained=(), ways=INNER),
)
