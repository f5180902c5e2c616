"""Logits that are made by several products, of a quantised weight, or inside a nested region.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.operands import SIZES
from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("heads of several products")
KINDS = (kind,)
BOTH = (F32, BF16)
ADAPTER = ("x", "down", "up")  # what a low-rank adapter trains

# ---------------------------------------------------------------- low-rank adapters


@kind("low-rank adapter on the head", "LoRA", "scalar", dtypes=BOTH)
def _(x, weight, down, up, labels):
    z = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up)
    return F.cross_entropy(z, labels)


@kind("low-rank adapter on a frozen head", "LoRA", "scalar", gradients=ADAPTER, dtypes=BOTH)
def _(x, weight, down, up, labels):
    z = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up)
    return F.cross_entropy(z, labels)


@kind("low-rank adapter, dropout before it", "LoRA", "scalar", gradients=ADAPTER)
def _(x, weight, down, up, kept, labels):
    z = F.linear(x, weight)
    z = z + F.linear(F.linear(x * kept, down), up) * 2.0
    return F.cross_entropy(z, labels)


@kind("low-rank adapter, log-probabilities and entropy", "LoRA in RL", "[B, T], [B, T]")
def _(x, weight, down, up, tokens):
    hidden = x.view(SIZES.b, SIZES.t, SIZES.d)
    z = F.linear(hidden, weight) + 2.0 * (hidden @ down.t() @ up.t())
    log_probs = z.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, tokens[..., None])[..., 0], entropy


@kind("low-rank adapter, bias, soft-cap", "LoRA", "scalar", gradients=ADAPTER)
def _(x, weight, bias, down, up, labels):
    z = F.linear(x, weight, bias) + 0.5 * F.linear(F.linear(x, down), up)
    return F.cross_entropy(15 * torch.tanh(z / 15), labels)


@kind("low-rank adapter, evaluation", "LoRA", "scalar, scalar", gradients=())
def _(x, weight, down, up, labels):
    z = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up)
    return F.cross_entropy(z, labels), (z.argmax(-1) == labels).float().mean()


@kind("low-rank adapter with magnitudes", "DoRA", "scalar", gradients=(*ADAPTER, "factor"))
def _(x, weight, down, up, factor, labels):
    norm = (weight + 2.0 * up @ down).norm(dim=1).detach()
    base, update = F.linear(x, weight), F.linear(F.linear(x, down), up)
    scale = (factor / norm)[None]
    return F.cross_entropy(base + (scale - 1) * base + scale * update * 2.0, labels)


@kind("KL to the head without its adapter", "LoRA in RL", "scalar", gradients=ADAPTER)
def _(x, weight, down, up):
    base = F.linear(x, weight)
    adapted = (base + 2.0 * F.linear(F.linear(x, down), up)).log_softmax(-1)
    return F.kl_div(base.detach().log_softmax(-1), adapted, log_target=True, reduction="batchmean")


# ---------------------------------------------------------------- tiles of the vocabulary


@kind("cat of four tiles", "chunked heads", "scalar", dtypes=BOTH)
def _(x, weight, labels):
    z = torch.cat([F.linear(x, part) for part in weight.chunk(4)], -1)
    return F.cross_entropy(z, labels)


@kind("cat of unequal tiles, entropy", "chunked heads", "[B, T]")
def _(x, weight):
    hidden = x.view(SIZES.b, SIZES.t, SIZES.d)
    z = torch.cat([F.linear(hidden, part) for part in weight.split([60, 30, 7])], dim=-1)
    return torch.special.entr(z.softmax(-1)).sum(-1)


@kind("tiles into an empty tensor", "chunked heads", "scalar")
def _(x, weight, labels):
    z = x.new_empty(len(x), len(weight))
    for first in range(0, len(weight), 25):
        z[:, first : first + 25] = F.linear(x, weight[first : first + 25])
    return F.cross_entropy(z, labels)


@kind("logsumexp of the tiles' logsumexp", "chunked heads", "scalar")
def _(x, weight, labels):
    tiles = [F.linear(x, part) for part in weight.chunk(2)]
    lse = torch.stack([tile.logsumexp(-1) for tile in tiles]).logsumexp(0)
    return (lse - torch.cat(tiles, -1).gather(-1, labels[:, None])[:, 0]).mean()


@kind("old and added vocabulary", "added tokens", "scalar", gradients=("x", "added_weight"))
def _(x, weight, added_weight, labels):
    return F.cross_entropy(torch.cat([F.linear(x, weight), F.linear(x, added_weight)], -1), labels)


@kind("copy distribution beside the vocabulary's", "pointer networks", "scalar", dtypes=BOTH)
def _(x, weight, added_weight, labels):
    z = torch.cat([F.linear(x, weight), F.linear(x, added_weight).tanh() * 3], -1)
    return -z.log_softmax(-1)[:, : len(weight)].gather(-1, labels[:, None]).mean()


# ---------------------------------------------------------------- quantised heads


@kind("int8 head, scales of classes", "torchao, restated", "scalar", dtypes=BOTH)
def _(x, quantised, scales, labels):
    return F.cross_entropy(F.linear(x, quantised.to(x.dtype) * scales), labels)


@kind("int8 head, scaled after the product", "torchao, restated", "[N]")
def _(x, quantised, scales, labels):
    z = F.linear(x, quantised.to(x.dtype)) * scales.t()
    return -z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("int8 head in tiles", "torchao, restated", "scalar")
def _(x, quantised, scales, labels):
    parts = zip(quantised.chunk(4), scales.chunk(4), strict=True)
    z = torch.cat([F.linear(x, q.to(x.dtype) * s) for q, s in parts], -1)
    return F.cross_entropy(z, labels)


def _unpacked(packed: Tensor, scales: Tensor) -> Tensor:
    """A weight of two 4-bit integers a byte, with a scale for each group of a row."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    grouped = (codes.to(scales.dtype) - 8).view(len(packed), scales.shape[1], -1)
    return (grouped * scales[..., None]).flatten(1)


@kind("4-bit head, unpacked whole", "torchao, restated", "scalar", dtypes=BOTH)
def _(x, packed, group_scales, labels):
    return F.cross_entropy(F.linear(x, _unpacked(packed, group_scales)), labels)


@kind("4-bit head, unpacked a tile at a time", "torchao, restated", "scalar")
def _(x, packed, group_scales, labels):
    parts = zip(packed.chunk(4), group_scales.chunk(4), strict=True)
    z = torch.cat([F.linear(x, _unpacked(*part)) for part in parts], -1)
    return F.cross_entropy(z, labels)


@kind("4-bit head by a table of levels", "bitsandbytes, restated", "scalar, scalar")
def _(x, codes, levels, group_scales, labels):
    weight = (levels[codes.int()].view(SIZES.v, 2, -1) * group_scales[..., None]).flatten(1)
    z = F.linear(x, weight)
    return F.cross_entropy(z, labels), (z.detach().argmax(-1) == labels).float().mean()


@kind("4-bit head with a low-rank adapter", "QLoRA", "scalar")
def _(x, packed, group_scales, down, up, labels):
    z = F.linear(x, _unpacked(packed, group_scales)) + 2.0 * F.linear(F.linear(x, down), up)
    return F.cross_entropy(z, labels)


# ---------------------------------------------------------------- checkpoints and nested regions


@kind("checkpoint(F.linear)", "activation checkpointing", "scalar", dtypes=BOTH)
def _(x, weight, labels):
    z = checkpoint(F.linear, x, weight, use_reentrant=False)
    return F.cross_entropy(z, labels)


@kind("checkpointed head, sorted after it", "activation checkpointing", "[N]")
def _(x, weight, bias):
    def head(hidden: Tensor) -> Tensor:
        return 30 * torch.tanh(F.linear(hidden, weight, bias) / 30)

    z = checkpoint(head, x, use_reentrant=False)
    return z.sort(-1, descending=True).values[:, :5].logsumexp(-1)


@kind("one checkpointed region, called twice", "activation checkpointing", "scalar, scalar")
def _(x, weight, labels):
    def part(hidden: Tensor, labels: Tensor) -> Tensor:
        z = F.linear(hidden, weight).nan_to_num()
        return F.cross_entropy(z, labels, reduction="sum")

    half = len(x) // 2
    first = checkpoint(part, x[:half], labels[:half], use_reentrant=False)
    second = checkpoint(part, x[half:], labels[half:], use_reentrant=False)
    return first, second


def _negative_log_probability(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), labels, reduction="none")


NESTED: Any = torch.compiler.nested_compile_region(_negative_log_probability)


@kind("one nested region, called twice", "torch.compiler", "scalar")
def _(x, weight, second_x, labels):
    first = NESTED(x, weight, labels)
    return (first + NESTED(second_x, weight, labels)).mean()


# ---------------------------------------------------------------- a weight for each position


@kind("einsum with a weight for each position", "position heads", "scalar", dtypes=BOTH)
def _(x, position_weight, tokens):
    z = torch.einsum("btd,tdv->btv", x.view(SIZES.b, SIZES.t, SIZES.d), position_weight)
    return F.cross_entropy(z.flatten(0, 1), tokens.flatten())


@kind("einsum with a weight for each position, entropy", "position heads", "[B, T]")
def _(x, position_weight):
    z = torch.einsum("btd,tdv->btv", x.view(SIZES.b, SIZES.t, SIZES.d), position_weight)
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


@kind("bmm with a weight for each position", "position heads", "scalar")
def _(x, position_weight, tokens):
    z = torch.bmm(x.view(SIZES.b, SIZES.t, SIZES.d).transpose(0, 1), position_weight)
    return F.cross_entropy(z.flatten(0, 1), tokens.t().flatten())


@kind("one linear for each codebook, stacked", "MusicGen", "scalar")
def _(x, codebooks, candidates):
    z = torch.stack([F.linear(x, weight) for weight in codebooks.unbind()], 1)  # [N, 4, V]
    return F.cross_entropy(z.flatten(0, 1), candidates[:, :4].flatten())


@kind("one linear of all codebooks, viewed", "MusicGen", "[N, 4]")
def _(x, codebooks, candidates):
    z = F.linear(x, codebooks.flatten(0, 1)).view(len(x), 4, -1)
    return z.log_softmax(-1).gather(-1, candidates[:, :4, None])[..., 0]
