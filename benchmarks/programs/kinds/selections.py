"""Logits that are sorted, added up, cut off, normalised or perturbed, row by row.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from benchmarks.programs.operands import SIZES
from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("sorted, cumulative and perturbed logits")
KINDS = (kind,)
BOTH = (F32, BF16)

# ---------------------------------------------------------------- pointwise


@kind("nan_to_num before the loss", "trainers", "scalar", dtypes=BOTH)
def _(logits, labels):
    return F.cross_entropy(logits.nan_to_num(0.0, 1e4, -1e4), labels)


@kind("nan_to_num before an entropy", "trainers", "[B, T]")
def _(sequences):
    z = torch.nan_to_num(sequences / 0.7)
    return z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


@kind("logaddexp with a prior", "smoothed language models", "scalar", dtypes=BOTH)
def _(logits, prior, labels):
    mixed = torch.logaddexp(logits.log_softmax(-1) + math.log(0.9), prior + math.log(0.1))
    return F.nll_loss(mixed, labels)


@kind("logaddexp with other rows' noise", "smoothed language models", "[N]")
def _(logits, teacher):
    return torch.logaddexp(logits, teacher).logsumexp(-1)


@kind("clamped and exponentiated in steps", "bi-tempered loss", "scalar")
def _(logits, labels):
    q = (1 + 0.2 * (logits - logits.amax(-1, keepdim=True))).clamp_min(1e-3).pow(-5.0).reciprocal()
    p = q / q.sum(-1, keepdim=True)
    return -(p.gather(-1, labels[:, None]) + 1e-6).log().mean()


# ---------------------------------------------------------------- sort and topk


@kind("sorted logits, weighted by rank", "listwise ranking", "[N]", dtypes=BOTH)
def _(logits):
    ordered = logits.sort(-1, descending=True).values
    return (ordered * torch.arange(SIZES.v).add(1).to(logits.dtype).reciprocal()).sum(-1)


@kind("log-probability of the top classes together", "top-k losses", "scalar", dtypes=BOTH)
def _(logits):
    return (logits.topk(5, -1).values.logsumexp(-1) - logits.logsumexp(-1)).mean()


@kind("log-probability among the top classes", "top-k losses", "scalar")
def _(logits, labels):
    top = logits.topk(20, -1).values
    kept = logits.gather(-1, labels[:, None])
    return (torch.cat([top, kept], -1).logsumexp(-1) - kept[:, 0]).mean()


@kind("hinge to the k-th largest logit", "top-k losses", "scalar")
def _(logits, labels):
    threshold = logits.kthvalue(SIZES.v - 5, dim=-1).values
    return F.relu(1 + threshold - logits.gather(-1, labels[:, None])[:, 0]).mean()


@kind("entropy under a top-k mask", "sampling", "[N]")
def _(logits):
    z = logits.masked_fill(logits < logits.topk(20, -1).values[:, -1:], -1e4)
    log_probs = z.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@kind("log-probability under a top-k mask", "RL with top-k sampling", "[B, T]")
def _(sequences, tokens):
    threshold = sequences.detach().topk(30, -1).values[..., -1:]
    z = torch.where(sequences >= threshold, sequences, -30.0)
    return z.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


@kind("entropy of the top-p classes", "RL with top-p sampling", "[N]", dtypes=BOTH)
def _(logits):
    ordered = logits.float().sort(-1, descending=True).values
    p = ordered.softmax(-1)
    kept = p.cumsum(-1) - p < 0.9
    log_probs = ordered.masked_fill(~kept, -1e4).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


@kind("log-probability under a top-p mask", "RL with top-p sampling", "[N]")
def _(logits, labels):
    ordered, order = logits.sort(-1, descending=True)
    p = ordered.softmax(-1)
    gone = (p.cumsum(-1) - p) >= 0.95
    gone = torch.zeros_like(gone).scatter(-1, order, gone)
    z = logits.masked_fill(gone, -30.0)
    return z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("log-probability under min-p, temperatures", "sampling", "[N]")
def _(logits, temperatures, labels):
    p = (logits / temperatures).softmax(-1)
    kept = p >= 0.02 * p.amax(-1, keepdim=True)
    kept = kept | F.one_hot(labels, SIZES.v).bool()
    p = torch.where(kept, p, 0.0)
    return (p / p.sum(-1, keepdim=True)).gather(-1, labels[:, None]).log()[:, 0]


@kind("typical classes", "typical sampling", "[N]", gradients=())
def _(logits):
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
    order = (-log_probs - entropy).abs().argsort(-1)
    mass = log_probs.exp().gather(-1, order).cumsum(-1)
    return (mass < 0.9).sum(-1)


@kind("log-likelihood of a ranking", "Plackett-Luce", "[N]")
def _(logits, candidates):
    z = logits.gather(-1, candidates)
    return (z - z.flip(-1).logcumsumexp(-1).flip(-1)).sum(-1)


@kind("ListMLE of all classes", "listwise ranking", "scalar")
def _(logits, prior):
    z = logits[:, prior.argsort(descending=True)]
    return (z.flip(-1).logcumsumexp(-1).flip(-1) - z).mean()


@kind("sparsemax", "Martins and Astudillo 2016", "[N]")
def _(logits):
    ordered = logits.sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    rank = torch.arange(1, SIZES.v + 1).to(logits.dtype)
    size = (1 + rank * ordered > sums).sum(-1, keepdim=True)
    tau = (sums.gather(-1, size - 1) - 1) / size
    p = (logits - tau).clamp_min(0)
    return p.square().sum(-1)


# ---------------------------------------------------------------- cumulative sums


@kind("squared earth mover's distance", "ordinal regression", "scalar", dtypes=BOTH)
def _(logits, labels):
    below = (torch.arange(SIZES.v) >= labels[:, None]).to(logits.dtype)
    return (logits.softmax(-1).cumsum(-1) - below).square().sum(-1).mean()


@kind("ranked probability score, sequences", "forecasts", "[B, T]")
def _(sequences, tokens):
    target = F.one_hot(tokens, SIZES.v).to(sequences.dtype)
    return (sequences.softmax(-1) - target).cumsum(-1).abs().sum(-1)


@kind("cumulative logits, evaluation", "ordinal regression", "[N], [N]", gradients=())
def _(logits):
    mass = logits.softmax(-1).cumsum(-1)
    return (mass < 0.5).sum(-1), logits.cumsum(-1).amax(-1)


# ---------------------------------------------------------------- statistics of a row


@kind("median logit", "trainers' logs", "[N]")
def _(logits):
    return logits.quantile(0.5, dim=-1)


@kind("loss of logits above a quantile", "trimmed losses", "scalar")
def _(logits, labels):
    low = logits.quantile(0.25, dim=-1, keepdim=True)
    return F.cross_entropy(torch.maximum(logits, low), labels)


@kind("logits over their standard deviation", "standardised distillation", "scalar", dtypes=BOTH)
def _(logits, labels):
    z = (logits - logits.mean(-1, keepdim=True)) / logits.std(-1, keepdim=True)
    return F.cross_entropy(3 * z, labels)


@kind("variance of a row's logits", "trainers' logs", "[B, T]")
def _(sequences):
    return sequences.var(-1, unbiased=False)


@kind("mean and standard deviation at once, evaluation", "trainers' logs", "2 x [N]", gradients=())
def _(logits):
    spread, mean = torch.std_mean(logits, dim=-1)
    return spread, mean


@kind("logits over their norm and a temperature", "LogitNorm", "scalar", dtypes=BOTH)
def _(logits, labels):
    z = logits / (logits.norm(p=2, dim=-1, keepdim=True) + 1e-7) / 0.1
    return F.cross_entropy(z, labels)


@kind("1-norm and largest magnitude", "penalties", "[N], [N]")
def _(logits):
    return logits.norm(p=1, dim=-1), torch.linalg.vector_norm(logits, math.inf, dim=-1)


@kind("layer norm over the classes", "normalised heads", "scalar")
def _(logits, factor, labels):
    return F.cross_entropy(F.layer_norm(logits, (SIZES.v,), weight=factor), labels)


@kind("softmin and largest", "penalties", "[N]")
def _(logits):
    low, high = torch.aminmax(logits, dim=-1)
    return (high - low) * F.softmin(logits, -1).amax(-1)


# ---------------------------------------------------------------- noise that is given


@kind("Gumbel noise, greedy answer", "sampling", "[N], [N]", gradients=())
def _(logits, noise):
    chosen = (logits + noise).argmax(-1)
    return chosen, logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]


@kind("Gumbel softmax, expected value", "Gumbel softmax", "[N]", dtypes=BOTH)
def _(logits, noise, atoms):
    return (((logits + noise) / 0.5).softmax(-1) * atoms).sum(-1)


@kind("straight-through Gumbel softmax", "Gumbel softmax", "scalar")
def _(logits, noise, factor):
    soft = ((logits + noise) / 0.5).softmax(-1)
    hard = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
    return ((hard - soft.detach() + soft) * factor).sum(-1).mean()


@kind("top classes under Gumbel noise", "sampling without replacement", "[N, 4]")
def _(logits, noise):
    chosen = (logits.detach() + noise).topk(4, -1).indices
    return logits.log_softmax(-1).gather(-1, chosen)


@kind("Gaussian noise on the logits, shifted", "heteroscedastic losses", "scalar")
def _(sequences, teacher, tokens):
    noisy = sequences + 0.3 * teacher.view(sequences.shape)
    return F.cross_entropy(noisy[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@kind("dropped classes, by a given mask", "DropMax", "scalar")
def _(logits, binary, labels):
    kept = 1 - binary * (1 - F.one_hot(labels, SIZES.v))
    weighed = kept * (logits - logits.amax(-1, keepdim=True).detach()).exp()
    return -(weighed.gather(-1, labels[:, None]) / weighed.sum(-1, keepdim=True)).log().mean()


# ---------------------------------------------------------------- writes along the classes


@kind("repetition penalty by gather and scatter", "sampling", "[N]")
def _(logits, candidates, labels):
    seen = logits.gather(-1, candidates)
    seen = torch.where(seen < 0, seen * 1.2, seen / 1.2)
    z = logits.scatter(-1, candidates, seen)
    return z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("scores added to candidates", "biased decoding", "scalar")
def _(logits, candidates, labels):
    z = logits.scatter_add(-1, candidates, 0.5 * torch.ones_like(candidates).to(logits.dtype))
    return F.cross_entropy(z, labels)


@kind("probabilities of groups, index_add", "hierarchical labels", "scalar")
def _(logits, groups, labels):
    p = logits.new_zeros(len(logits), 8).index_add(1, groups, logits.softmax(-1))
    return F.nll_loss(p.log(), groups[labels])


@kind("probabilities of groups, a product", "hierarchical labels", "scalar", dtypes=BOTH)
def _(logits, groups, labels):
    member = F.one_hot(groups, 8).to(logits.dtype)  # [V, 8]
    return F.nll_loss((logits.softmax(-1) @ member).clamp_min(1e-6).log(), groups[labels])
