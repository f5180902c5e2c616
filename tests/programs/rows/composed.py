"""Logits that are made by several products, of a quantised weight, or inside a nested region."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fxpass import messages
from tests.programs.row import IN_BF16, NOTHING, REGION, Row

KIND = "heads of several products"


ADAPTER = ("x", "down", "up")


def _unpacked(packed: Tensor, scales: Tensor) -> Tensor:
    """A weight of two 4-bit integers a byte, with a scale for each group of a row."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    grouped = (codes.to(scales.dtype) - 8).view(len(packed), scales.shape[1], -1)
    return (grouped * scales[..., None]).flatten(1)


def _negative_log_probability(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), labels, reduction="none")


NESTED: Any = torch.compiler.nested_compile_region(_negative_log_probability)

# fmt: off
ROWS = (
    Row("low-rank adapter on the head",
        "z = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up); "
        "F.cross_entropy(z, labels)", REGION,
        of="LoRA", ways=IN_BF16),
    Row("low-rank adapter on a frozen head",
        "z = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up); "
        "F.cross_entropy(z, labels)", REGION,
        of="LoRA", trained=ADAPTER, ways=IN_BF16),
    Row("low-rank adapter, dropout before it",
        "z = F.linear(x, weight); z = z + F.linear(F.linear(x * kept, down), up) * 2.0; "
        "F.cross_entropy(z, labels)", REGION,
        of="LoRA", trained=ADAPTER),
    Row("low-rank adapter, log-probabilities and entropy",
        "hidden = x.view(B, T, D); "
        "z = F.linear(hidden, weight) + 2.0 * (hidden @ down.t() @ up.t()); "
        "log_probs = z.log_softmax(-1); entropy = -(log_probs.exp() * log_probs).sum(-1); "
        "(log_probs.gather(-1, tokens[..., None])[..., 0], entropy)", REGION,
        of="LoRA in RL"),
    Row("low-rank adapter, bias, soft-cap",
        "z = F.linear(x, weight, bias) + 0.5 * F.linear(F.linear(x, down), up); "
        "F.cross_entropy(15 * torch.tanh(z / 15), labels)", REGION,
        of="LoRA", trained=ADAPTER),
    Row("low-rank adapter, evaluation",
        "z = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up); "
        "(F.cross_entropy(z, labels), (z.argmax(-1) == labels).float().mean())", REGION,
        of="LoRA", trained=()),
    Row("low-rank adapter with magnitudes",
        "norm = (weight + 2.0 * up @ down).norm(dim=1).detach(); "
        "base, update = (F.linear(x, weight), F.linear(F.linear(x, down), up)); "
        "scale = (factor / norm)[None]; "
        "F.cross_entropy(base + (scale - 1) * base + scale * update * 2.0, labels)", REGION,
        of="DoRA", trained=(*ADAPTER, "factor")),
    Row("KL to the head without its adapter",
        "base = F.linear(x, weight); "
        "adapted = (base + 2.0 * F.linear(F.linear(x, down), up)).log_softmax(-1); "
        "F.kl_div(base.detach().log_softmax(-1), adapted, log_target=True, reduction='batchmean')",
        REGION, of="LoRA in RL", trained=ADAPTER),
    Row("cat of four tiles",
        "z = torch.cat([F.linear(x, part) for part in weight.chunk(4)], -1); "
        "F.cross_entropy(z, labels)", REGION,
        of="chunked heads", ways=IN_BF16),
    Row("cat of unequal tiles, entropy",
        "hidden = x.view(B, T, D); "
        "z = torch.cat([F.linear(hidden, part) for part in weight.split([60, 30, 7])], dim=-1); "
        "torch.special.entr(z.softmax(-1)).sum(-1)", REGION,
        of="chunked heads"),
    Row("tiles into an empty tensor",
        "z = x.new_empty(len(x), len(weight))\n"
        "for first in range(0, len(weight), 25):\n"
        "    z[:, first:first + 25] = F.linear(x, weight[first:first + 25])\n"
        "F.cross_entropy(z, labels)", REGION,
        of="chunked heads"),
    Row("logsumexp of the tiles' logsumexp",
        "tiles = [F.linear(x, part) for part in weight.chunk(2)]; "
        "lse = torch.stack([tile.logsumexp(-1) for tile in tiles]).logsumexp(0); "
        "(lse - torch.cat(tiles, -1).gather(-1, labels[:, None])[:, 0]).mean()", REGION,
        of="chunked heads"),
    Row("old and added vocabulary",
        "F.cross_entropy(torch.cat([F.linear(x, weight), F.linear(x, added_weight)], -1), labels)",
        REGION, of="added tokens", trained=("x", "added_weight")),
    Row("copy distribution beside the vocabulary's",
        "z = torch.cat([F.linear(x, weight), F.linear(x, added_weight).tanh() * 3], -1); "
        "-z.log_softmax(-1)[:, :len(weight)].gather(-1, labels[:, None]).mean()", REGION,
        of="pointer networks", ways=IN_BF16),
    Row("int8 head, scales of classes",
        "F.cross_entropy(F.linear(x, quantised.to(x.dtype) * scales), labels)",
        of="torchao, restated", ways=IN_BF16),
    Row("int8 head, scaled after the product",
        "z = F.linear(x, quantised.to(x.dtype)) * scales.t(); "
        "-z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]",
        of="torchao, restated"),
    Row("int8 head in tiles",
        "parts = zip(quantised.chunk(4), scales.chunk(4), strict=True); "
        "z = torch.cat([F.linear(x, q.to(x.dtype) * s) for q, s in parts], -1); "
        "F.cross_entropy(z, labels)", REGION,
        of="torchao, restated"),
    Row("4-bit head, unpacked whole",
        "F.cross_entropy(F.linear(x, _unpacked(packed, group_scales)), labels)",
        of="torchao, restated", ways=IN_BF16),
    Row("4-bit head, unpacked a tile at a time",
        "parts = zip(packed.chunk(4), group_scales.chunk(4), strict=True); "
        "z = torch.cat([F.linear(x, _unpacked(*part)) for part in parts], -1); "
        "F.cross_entropy(z, labels)", REGION,
        of="torchao, restated"),
    Row("4-bit head by a table of levels",
        "weight = (levels[codes.int()].view(V, 2, -1) * group_scales[..., None]).flatten(1); "
        "z = F.linear(x, weight); "
        "(F.cross_entropy(z, labels), (z.detach().argmax(-1) == labels).float().mean())",
        of="bitsandbytes, restated"),
    Row("4-bit head with a low-rank adapter",
        "z = F.linear(x, _unpacked(packed, group_scales)) + 2.0 * F.linear(F.linear(x, down), "
        "up); "
        "F.cross_entropy(z, labels)", REGION,
        of="QLoRA"),
    Row("checkpoint(F.linear)",
        "z = checkpoint(F.linear, x, weight, use_reentrant=False); F.cross_entropy(z, labels)",
        of="activation checkpointing", ways=IN_BF16),
    Row("checkpointed head, sorted after it",
        "def head(hidden: Tensor) -> Tensor:\n"
        "    return 30 * torch.tanh(F.linear(hidden, weight, bias) / 30)\n"
        "z = checkpoint(head, x, use_reentrant=False)\n"
        "z.sort(-1, descending=True).values[:, :5].logsumexp(-1)", REGION,
        of="activation checkpointing"),
    Row("one checkpointed region, called twice",
        "def part(hidden: Tensor, labels: Tensor) -> Tensor:\n"
        "    z = F.linear(hidden, weight).nan_to_num()\n"
        "    return F.cross_entropy(z, labels, reduction='sum')\n"
        "half = len(x) // 2\n"
        "first = checkpoint(part, x[:half], labels[:half], use_reentrant=False)\n"
        "second = checkpoint(part, x[half:], labels[half:], use_reentrant=False)\n"
        "(first, second)", REGION,
        of="activation checkpointing"),
    Row("one nested region, called twice",
        "first = NESTED(x, weight, labels); (first + NESTED(second_x, weight, labels)).mean()",
        of="torch.compiler"),
    Row("einsum with a weight for each position",
        "z = torch.einsum('btd,tdv->btv', x.view(B, T, D), position_weight); "
        "F.cross_entropy(z.flatten(0, 1), tokens.flatten())",
        NOTHING, reason=messages.SEVERAL_WEIGHTS,
        of="position heads", ways=IN_BF16),
    Row("einsum with a weight for each position, entropy",
        "z = torch.einsum('btd,tdv->btv', x.view(B, T, D), position_weight); "
        "z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)",
        NOTHING, reason=messages.SEVERAL_WEIGHTS, of="position heads"),
    Row("bmm with a weight for each position",
        "z = torch.bmm(x.view(B, T, D).transpose(0, 1), position_weight); "
        "F.cross_entropy(z.flatten(0, 1), tokens.t().flatten())",
        NOTHING, reason=messages.SEVERAL_WEIGHTS, of="position heads"),
    Row("one linear for each codebook, stacked",
        "z = torch.stack([F.linear(x, weight) for weight in codebooks.unbind()], 1); "
        "F.cross_entropy(z.flatten(0, 1), candidates[:, :4].flatten())",
        NOTHING, reason=messages.ROWS_AND_CLASSES, of="MusicGen"),
    Row("one linear of all codebooks, viewed",
        "z = F.linear(x, codebooks.flatten(0, 1)).view(len(x), 4, -1); "
        "z.log_softmax(-1).gather(-1, candidates[:, :4, None])[..., 0]", REGION,
        of="MusicGen"),
)
