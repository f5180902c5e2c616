"""f32 weights and hidden states under autocast: their gradients bypass the cast to 16 bits."""

from __future__ import annotations

import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.programs.row import Row

KIND = "f32 under autocast"

AUTOCAST = (
    "with torch.autocast('cpu', torch.bfloat16):\n"
    "    hidden = {}\n"
    "    h = F.layer_norm(hidden, (D,)).float() * 1.5\n"
    "    loss = {}\n"
    "loss"
)
BODY = "F.linear(x, weight[:D])"  # a weight that another linear has, too
CHECKPOINTED = "checkpoint(F.linear, x, weight[:D], use_reentrant=False)"
# hidden states, loss of h, another way
PROGRAMS = {
    "no bias": ("x * 2", "F.cross_entropy(F.linear(h, weight), ignored)", "aot_eager"),
    "a bias": ("x * 2", "F.cross_entropy(F.linear(h, weight, bias), ignored)", "aot_eager"),
    "tied": (
        "F.embedding(labels, weight)",
        "F.cross_entropy(F.linear(h, weight, bias), ignored)",
        "inductor",
    ),
    "frozen": (
        "x * 2",
        "F.cross_entropy(F.linear(h, weight.detach(), bias), ignored)",
        "aot_eager",
    ),
    "shifted": (
        "x * 2",
        "F.cross_entropy(F.linear(h.view(B, T, D)[:, :-1], weight, bias).flatten(0, -2), "
        "ignored_tokens[:, 1:].flatten())",
        "inductor",
    ),
    "two losses": (
        "x * 2",
        "F.cross_entropy(F.linear(h, weight, bias), ignored) + F.cross_entropy("
        "F.linear(h * 2, weight, bias), ignored, reduction='sum') / 100",
        "aot_eager",
    ),
    "another user": (
        "x * 2",
        "F.cross_entropy(F.linear(h, weight, bias), ignored) + weight.square().mean()",
        "aot_eager",
    ),
    "rows": (
        "x * 2",
        "(F.cross_entropy(F.linear(h, weight, bias), ignored, reduction='none') * values).sum()",
        "inductor",
    ),
    "checkpoint": (
        CHECKPOINTED,
        "F.cross_entropy(F.linear(h, weight, bias), ignored)",
        "aot_eager",
    ),
    "another linear": (BODY, "F.cross_entropy(F.linear(h, weight, bias), ignored)", "aot_eager"),
}

ROWS = tuple(
    Row(name, AUTOCAST.format(hidden, loss), ways=(way,))
    for name, (hidden, loss, way) in PROGRAMS.items()
)
