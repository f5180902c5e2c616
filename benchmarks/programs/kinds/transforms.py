"""Losses over transformed logits: pointwise functions, factors, masks, selected rows or classes.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("transforms, masks and selections")
KINDS = (kind,)

# ---------------------------------------------------------------- pointwise


@kind("15 tanh(z / 15)", "Gemma 2", "scalar", dtypes=(F32, BF16))
def _(logits, labels):
    return F.cross_entropy(15 * torch.tanh(logits / 15), labels)


@kind("15 z rsqrt(z² + 225)", "modded-nanogpt", "scalar", dtypes=(F32, BF16))
def _(logits, labels):
    return F.cross_entropy(15 * logits * torch.rsqrt(logits.square() + 225), labels)


@kind("15 z / sqrt(z² + 225)", "modded-nanogpt", "scalar")
def _(logits, labels):
    capped = 15 * logits / (logits**2 + 15**2).sqrt()
    return F.cross_entropy(capped, labels)


@kind("z sigmoid(z)", "swish heads", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits * logits.sigmoid(), labels)


@kind("z + 0.1 z³", "from scratch", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits + 0.1 * logits**3, labels)


@kind("where(z > 0, z, 0.5 z)", "from scratch", "scalar")
def _(logits, labels):
    return F.cross_entropy(torch.where(logits > 0, logits, 0.5 * logits), labels)


@kind("30 sigmoid((z + 5) / 7.5)", "modded-nanogpt", "scalar")
def _(logits, labels):
    return F.cross_entropy(30 * torch.sigmoid((logits + 5) / 7.5), labels)


@kind("logits minus their mean", "centred logits", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits - logits.mean(-1, keepdim=True), labels)


@kind("logits over their norm", "logit normalisation", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits / (0.1 * logits.norm(dim=-1, keepdim=True) + 1e-6), labels)


@kind("temperature for each row", "top-k samplers", "scalar")
def _(logits, labels, temperatures):
    return F.cross_entropy(logits / temperatures, labels)


# ---------------------------------------------------------------- classes


@kind("where(banned, -inf, z)", "constrained decoding", "scalar")
def _(logits, labels, banned):
    kept = banned.clone()
    kept[0] = False
    labels = torch.where(kept[labels], 0, labels)
    return F.cross_entropy(torch.where(kept, float("-inf"), logits), labels)


@kind("masked_fill(banned, -1e4)", "padded vocabularies", "scalar", dtypes=(F32, BF16))
def _(logits, labels, banned):
    return F.cross_entropy(logits.masked_fill(banned, -1e4), labels)


@kind("masked_fill_(banned, -30)", "constrained decoding", "[N]")
def _(logits, labels, banned):
    logits.masked_fill_(banned[None, :], -30.0)
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("z[:, banned] = -30", "suppressed tokens", "scalar")
def _(logits, labels, banned):
    logits[:, banned] = -30.0
    return F.cross_entropy(logits, labels)


@kind("z[:, 90:] = -30", "padded vocabularies", "scalar")
def _(logits, labels):
    logits[:, 90:] = -30.0
    return F.cross_entropy(logits, labels)


@kind("z[..., chosen] = -30", "Whisper's suppressed tokens", "scalar")
def _(logits, labels, chosen):
    logits[..., chosen] = -30.0
    return F.cross_entropy(logits, labels)


@kind("z - 30 * banned", "attention-style masks", "scalar")
def _(logits, labels, banned):
    return F.cross_entropy(logits - 30.0 * banned, labels)


@kind("z[:, :90]", "padded vocabularies", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits[:, :90], labels.clamp(max=89))


@kind("z + prior", "logit adjustment", "scalar", dtypes=(F32, BF16))
def _(logits, labels, prior):
    return F.cross_entropy(logits + 1.0 * prior, labels)


@kind("z * factor", "a factor for each class", "scalar", dtypes=(F32, BF16))
def _(logits, labels, factor):
    return F.cross_entropy(logits * factor, labels)


@kind("z / factor[None]", "a temperature for each class", "[N]")
def _(logits, labels, factor):
    z = logits / factor[None, :]
    return z.logsumexp(-1) - z.gather(-1, labels[:, None])[:, 0]


@kind("z * factor + bias", "vector scaling", "scalar")
def _(logits, labels, factor, bias):
    return F.cross_entropy(logits * factor + bias, labels)


@kind("z[:, chosen]", "sampled softmax", "scalar")
def _(logits, chosen):
    return F.cross_entropy(logits[:, chosen], torch.arange(len(logits)) % len(chosen))


@kind("z.index_select(chosen)", "sampled softmax", "scalar")
def _(logits, chosen):
    picked = torch.index_select(logits, 1, chosen)
    return F.cross_entropy(picked, torch.zeros(len(logits), dtype=torch.long))


@kind("linear(x, weight[chosen])", "sampled softmax", "scalar")
def _(x, weight, chosen):
    logits = F.linear(x, weight[chosen])
    return F.cross_entropy(logits, torch.arange(len(x)) % len(chosen))


@kind("linear(x, embedding(chosen))", "partial FC", "scalar")
def _(x, weight, chosen):
    logits = x @ F.embedding(chosen, weight).t()
    return F.cross_entropy(logits, torch.arange(len(x)) % len(chosen))


@kind("yes and no of a reranker", "Qwen3 reranker", "[N]")
def _(logits):
    pair = torch.stack([logits[:, 11], logits[:, 42]], dim=1)
    return F.log_softmax(pair, dim=1)[:, 1].exp()


# ---------------------------------------------------------------- rows

DYNAMIC = {"capture_dynamic_output_shape_ops": True}


@kind("z[rows], Dynamo's defaults", "masked language models", "scalar")
def _(logits, labels, rows):
    return F.cross_entropy(logits[rows], labels[rows])


@kind("z[rows], captured", "masked language models", "scalar", dynamo=DYNAMIC)
def _(logits, labels, rows):
    return F.cross_entropy(logits[rows], labels[rows])


@kind("x[rows], captured", "masked language models", "scalar", dynamo=DYNAMIC)
def _(x, weight, labels, rows):
    return F.cross_entropy(F.linear(x[rows], weight), labels[rows])


@kind("sequences[labels != -100], captured", "DFT recipes", "scalar", dynamo=DYNAMIC)
def _(sequences, ignored_tokens):
    counted = ignored_tokens != -100
    log_probs = sequences[counted].log_softmax(-1)
    return -log_probs.gather(-1, ignored_tokens[counted][:, None]).mean()


@kind("index_select of rows", "packed sequences", "scalar")
def _(logits, labels, candidates):
    rows = candidates[:, 0] % len(logits)
    return F.cross_entropy(logits.index_select(0, rows), labels[rows])


@kind("last token of each sequence", "classification heads", "scalar")
def _(sequences, tokens):
    return F.cross_entropy(sequences[:, -1], tokens[:, -1])


@kind("a low-rank update of the logits", "LoRA heads", "scalar")
def _(x, weight, down, up, labels):
    logits = F.linear(x, weight) + 2.0 * F.linear(F.linear(x, down), up)
    return F.cross_entropy(logits, labels)


@kind("a low-rank update of the weight", "merged LoRA heads", "scalar")
def _(x, weight, down, up, labels):
    return F.cross_entropy(F.linear(x, weight + 2.0 * up @ down), labels)
