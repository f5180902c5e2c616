"""Losses over transformed logits: pointwise functions, factors, masks, selected rows or classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fxpass import messages
from tests.programs.row import BOTH, IN_BF16, NOTHING, REGION, Row

KIND = "transforms, masks and selections"
DYNAMIC = {"capture_dynamic_output_shape_ops": True}

# fmt: off
ROWS = (
    Row("15 tanh(z / 15)", "F.cross_entropy(15 * torch.tanh(z / 15), labels)",
        of="Gemma 2", ways=IN_BF16),
    Row("15 z rsqrt(z² + 225)", "F.cross_entropy(15 * z * torch.rsqrt(z.square() + 225), labels)",
        of="modded-nanogpt", ways=IN_BF16),
    Row("15 z / sqrt(z² + 225)",
        "capped = 15 * z / (z ** 2 + 15 ** 2).sqrt(); F.cross_entropy(capped, labels)",
        of="modded-nanogpt"),
    Row("z sigmoid(z)", "F.cross_entropy(z * z.sigmoid(), labels)", of="swish heads"),
    Row("z + 0.1 z³", "F.cross_entropy(z + 0.1 * z ** 3, labels)", of="from scratch"),
    Row("where(z > 0, z, 0.5 z)", "F.cross_entropy(torch.where(z > 0, z, 0.5 * z), labels)", REGION,
        of="from scratch"),
    Row("30 sigmoid((z + 5) / 7.5)", "F.cross_entropy(30 * torch.sigmoid((z + 5) / 7.5), labels)",
        of="modded-nanogpt"),
    Row("logits minus their mean", "F.cross_entropy(z - z.mean(-1, keepdim=True), labels)", REGION,
        of="centred logits"),
    Row("the largest of every other logit", "z[:, ::2].unsqueeze(1).amax(-1).logsumexp(-1)", REGION,
        ways=("dynamic", *IN_BF16)),
    Row("logits renormalised", "torch.renorm(z, 2, 0, 1.0).logsumexp(-1)", REGION, ways=IN_BF16),
    Row("logits over their norm",
        "F.cross_entropy(z / (0.1 * z.norm(dim=-1, keepdim=True) + 1e-06), labels)", REGION,
        of="logit normalisation"),
    Row("temperature for each row", "F.cross_entropy(z / temperatures, labels)", REGION,
        of="top-k samplers"),
    Row("where(banned, -inf, z)",
        "kept = banned.clone(); kept[0] = False; labels = torch.where(kept[labels], 0, labels); "
        "F.cross_entropy(torch.where(kept, float('-inf'), z), labels)",
        of="constrained decoding"),
    Row("masked_fill(banned, -1e4)", "F.cross_entropy(z.masked_fill(banned, -10000.0), labels)",
        of="padded vocabularies", ways=IN_BF16),
    Row("masked_fill_(banned, -30)",
        "z.masked_fill_(banned[None, :], -30.0); "
        "z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]",
        of="constrained decoding"),
    Row("z[:, banned] = -30", "z[:, banned] = -30.0; F.cross_entropy(z, labels)",
        of="suppressed tokens"),
    Row("z[:, 90:] = -30", "z[:, 90:] = -30.0; F.cross_entropy(z, labels)", REGION,
        of="padded vocabularies"),
    Row("z[..., chosen] = -30", "z[..., chosen] = -30.0; F.cross_entropy(z, labels)", REGION,
        of="Whisper's suppressed tokens"),
    Row("z - 30 * banned", "F.cross_entropy(z - 30.0 * banned, labels)",
        of="attention-style masks"),
    Row("z[:, :90]", "F.cross_entropy(z[:, :90], labels.clamp(max=89))", REGION,
        of="padded vocabularies"),
    Row("z + prior", "F.cross_entropy(z + 1.0 * prior, labels)",
        of="logit adjustment", ways=IN_BF16),
    Row("z * factor", "F.cross_entropy(z * factor, labels)", REGION,
        of="a factor for each class", ways=IN_BF16),
    Row("z / factor[None]",
        "y = z / factor[None, :]; y.logsumexp(-1) - y.gather(-1, labels[:, None])[:, 0]", BOTH,
        of="a temperature for each class"),
    Row("z * factor + bias", "F.cross_entropy(z * factor + bias, labels)", REGION,
        of="vector scaling"),
    Row("z[:, chosen]", "F.cross_entropy(z[:, chosen], torch.arange(len(z)) % len(chosen))", REGION,
        of="sampled softmax"),
    Row("z.index_select(chosen)",
        "picked = torch.index_select(z, 1, chosen); "
        "F.cross_entropy(picked, torch.zeros(len(z), dtype=torch.long))", REGION,
        of="sampled softmax"),
    Row("linear(x, weight[chosen])",
        "logits = F.linear(x, weight[chosen]); "
        "F.cross_entropy(logits, torch.arange(len(x)) % len(chosen))",
        of="sampled softmax"),
    Row("linear(x, embedding(chosen))",
        "logits = x @ F.embedding(chosen, weight).t(); "
        "F.cross_entropy(logits, torch.arange(len(x)) % len(chosen))",
        of="partial FC"),
    Row("yes and no of a reranker",
        "pair = torch.stack([z[:, 11], z[:, 42]], dim=1); F.log_softmax(pair, dim=1)[:, 1].exp()",
        REGION, of="Qwen3 reranker"),
    Row("z[rows], Dynamo's defaults", "F.cross_entropy(z[rows], labels[rows])",
        NOTHING, reason=messages.fixed(messages.ENTERS), of="masked language models"),
    Row("z[rows], captured", "F.cross_entropy(z[rows], labels[rows])",
        of="masked language models", dynamo=DYNAMIC),
    Row("x[rows], captured", "F.cross_entropy(F.linear(x[rows], weight), labels[rows])",
        of="masked language models", dynamo=DYNAMIC),
    Row("sequences[labels != -100], captured",
        "counted = ignored_tokens != -100; log_probs = s[counted].log_softmax(-1); "
        "-log_probs.gather(-1, ignored_tokens[counted][:, None]).mean()",
        of="DFT recipes", dynamo=DYNAMIC),
    Row("index_select of rows",
        "rows = candidates[:, 0] % len(z); F.cross_entropy(z.index_select(0, rows), labels[rows])",
        of="packed sequences"),
    Row("last token of each sequence", "F.cross_entropy(s[:, -1], tokens[:, -1])", REGION,
        of="classification heads"),
    Row("a low-rank update of the logits",
        "logits = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up); "
        "F.cross_entropy(logits, labels)", REGION,
        of="LoRA heads"),
    Row("a low-rank update of the weight",
        "F.cross_entropy(F.linear(x, weight + 2.0 * up @ down), labels)", of="merged LoRA heads"),
)
