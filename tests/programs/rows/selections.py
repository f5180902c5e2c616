"""Logits that are sorted, added up, cut off, normalised or perturbed, row by row."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.programs.row import BOTH, FORMULA, IN_BF16, REGION, Row

KIND = "sorted, cumulative and perturbed logits"

# fmt: off
ROWS = (
    Row("nan_to_num before the loss",
        "F.cross_entropy(z.nan_to_num(0.0, 10000.0, -10000.0), labels)", REGION,
        of="trainers", ways=IN_BF16),
    Row("nan_to_num before an entropy",
        "z = torch.nan_to_num(s / 0.7); z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)", REGION,
        of="trainers"),
    Row("logaddexp with a prior",
        "mixed = torch.logaddexp(z.log_softmax(-1) + math.log(0.9), prior + math.log(0.1)); "
        "F.nll_loss(mixed, labels)", REGION,
        of="smoothed language models", ways=IN_BF16),
    Row("logaddexp with other rows' noise", "torch.logaddexp(z, teacher).logsumexp(-1)", REGION,
        of="smoothed language models"),
    Row("clamped and exponentiated in steps",
        "q = (1 + 0.2 * (z - z.amax(-1, keepdim=True))).clamp_min(0.001).pow(-5.0).reciprocal(); "
        "p = q / q.sum(-1, keepdim=True); -(p.gather(-1, labels[:, None]) + 1e-06).log().mean()",
        REGION, of="bi-tempered loss"),
    Row("sorted logits, weighted by rank",
        "ordered = z.sort(-1, descending=True).values; "
        "(ordered * torch.arange(V).add(1).to(z.dtype).reciprocal()).sum(-1)", REGION,
        of="listwise ranking", ways=IN_BF16),
    Row("log-probability of the top classes together",
        "(z.topk(5, -1).values.logsumexp(-1) - z.logsumexp(-1)).mean()", REGION,
        of="top-k losses", ways=IN_BF16),
    Row("log-probability among the top classes",
        "top = z.topk(20, -1).values; kept = z.gather(-1, labels[:, None]); "
        "(torch.cat([top, kept], -1).logsumexp(-1) - kept[:, 0]).mean()", REGION,
        of="top-k losses"),
    Row("hinge to the k-th largest logit",
        "threshold = z.kthvalue(V - 5, dim=-1).values; "
        "F.relu(1 + threshold - z.gather(-1, labels[:, None])[:, 0]).mean()", REGION,
        of="top-k losses"),
    Row("entropy under a top-k mask",
        "y = z.masked_fill(z < z.topk(20, -1).values[:, -1:], -10000.0); "
        "log_probs = y.log_softmax(-1); -(log_probs.exp() * log_probs).sum(-1)", REGION,
        of="sampling"),
    Row("log-probability under a top-k mask",
        "threshold = s.detach().topk(30, -1).values[..., -1:]; "
        "z = torch.where(s >= threshold, s, -30.0); "
        "z.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)", REGION,
        of="RL with top-k sampling"),
    Row("entropy of the top-p classes",
        "ordered = z.float().sort(-1, descending=True).values; p = ordered.softmax(-1); "
        "kept = p.cumsum(-1) - p < 0.9; "
        "log_probs = ordered.masked_fill(~kept, -10000.0).log_softmax(-1); "
        "-(log_probs.exp() * log_probs).sum(-1)", REGION,
        of="RL with top-p sampling", ways=IN_BF16),
    Row("log-probability under a top-p mask",
        "ordered, order = z.sort(-1, descending=True); p = ordered.softmax(-1); "
        "gone = p.cumsum(-1) - p >= 0.95; "
        "gone = torch.zeros_like(gone).scatter(-1, order, gone); y = z.masked_fill(gone, -30.0); "
        "y.log_softmax(-1).gather(-1, labels[:, None])[:, 0]", REGION,
        of="RL with top-p sampling"),
    Row("log-probability under min-p, temperatures",
        "p = (z / temperatures).softmax(-1); kept = p >= 0.02 * p.amax(-1, keepdim=True); "
        "kept = kept | F.one_hot(labels, V).bool(); p = torch.where(kept, p, 0.0); "
        "(p / p.sum(-1, keepdim=True)).gather(-1, labels[:, None]).log()[:, 0]", REGION,
        of="sampling"),
    Row("typical classes",
        "log_probs = z.log_softmax(-1); "
        "entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True); "
        "order = (-log_probs - entropy).abs().argsort(-1); "
        "mass = log_probs.exp().gather(-1, order).cumsum(-1); (mass < 0.9).sum(-1)", REGION,
        of="typical sampling", trained=()),
    Row("log-likelihood of a ranking",
        "y = z.gather(-1, candidates); (y - y.flip(-1).logcumsumexp(-1).flip(-1)).sum(-1)",
        of="Plackett-Luce"),
    Row("ListMLE of all classes",
        "y = z[:, prior.argsort(descending=True)]; "
        "(y.flip(-1).logcumsumexp(-1).flip(-1) - y).mean()", REGION,
        of="listwise ranking"),
    Row("sparsemax",
        "ordered = z.sort(-1, descending=True).values; sums = ordered.cumsum(-1); "
        "rank = torch.arange(1, V + 1).to(z.dtype); "
        "size = (1 + rank * ordered > sums).sum(-1, keepdim=True); "
        "tau = (sums.gather(-1, size - 1) - 1) / size; p = (z - tau).clamp_min(0); "
        "p.square().sum(-1)", REGION,
        of="Martins and Astudillo 2016"),
    Row("squared earth mover's distance",
        "below = (torch.arange(V) >= labels[:, None]).to(z.dtype); "
        "(z.softmax(-1).cumsum(-1) - below).square().sum(-1).mean()", REGION,
        of="ordinal regression", ways=IN_BF16),
    Row("ranked probability score, sequences",
        "target = F.one_hot(tokens, V).to(s.dtype); "
        "(s.softmax(-1) - target).cumsum(-1).abs().sum(-1)", REGION,
        of="forecasts"),
    Row("cumulative logits, evaluation",
        "mass = z.softmax(-1).cumsum(-1); ((mass < 0.5).sum(-1), z.cumsum(-1).amax(-1))", REGION,
        of="ordinal regression", trained=()),
    Row("median logit", "z.quantile(0.5, dim=-1)", REGION, of="trainers' logs"),
    Row("loss of logits above a quantile",
        "low = z.quantile(0.25, dim=-1, keepdim=True); "
        "F.cross_entropy(torch.maximum(z, low), labels)", REGION,
        of="trimmed losses"),
    Row("logits over their standard deviation",
        "y = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True); "
        "F.cross_entropy(3 * y, labels)", REGION,
        of="standardised distillation", ways=IN_BF16),
    Row("variance of a row's logits", "s.var(-1, unbiased=False)", REGION, of="trainers' logs"),
    Row("mean and standard deviation at once, evaluation",
        "spread, mean = torch.std_mean(z, dim=-1); (spread, mean)", REGION,
        of="trainers' logs", trained=()),
    Row("logits over their norm and a temperature",
        "y = z / (z.norm(p=2, dim=-1, keepdim=True) + 1e-07) / 0.1; F.cross_entropy(y, labels)",
        REGION, of="LogitNorm", ways=IN_BF16),
    Row("1-norm and largest magnitude",
        "(z.norm(p=1, dim=-1), torch.linalg.vector_norm(z, math.inf, dim=-1))",
        REGION, of="penalties"),
    Row("layer norm over the classes",
        "F.cross_entropy(F.layer_norm(z, (V,), weight=factor), labels)",
        REGION, of="normalised heads"),
    Row("softmin and largest",
        "low, high = torch.aminmax(z, dim=-1); (high - low) * F.softmin(z, -1).amax(-1)", REGION,
        of="penalties"),
    Row("Gumbel noise, greedy answer",
        "chosen = (z + noise).argmax(-1); "
        "(chosen, z.log_softmax(-1).gather(-1, chosen[:, None])[:, 0])", REGION,
        of="sampling", trained=()),
    Row("Gumbel softmax, expected value", "(((z + noise) / 0.5).softmax(-1) * atoms).sum(-1)",
        of="Gumbel softmax", ways=IN_BF16),
    Row("straight-through Gumbel softmax",
        "soft = ((z + noise) / 0.5).softmax(-1); "
        "hard = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0); "
        "((hard - soft.detach() + soft) * factor).sum(-1).mean()", REGION,
        of="Gumbel softmax"),
    Row("top classes under Gumbel noise",
        "chosen = (z.detach() + noise).topk(4, -1).indices; z.log_softmax(-1).gather(-1, chosen)",
        BOTH, of="sampling without replacement"),
    Row("Gaussian noise on the logits, shifted",
        "noisy = s + 0.3 * teacher.view(s.shape); "
        "F.cross_entropy(noisy[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())",
        FORMULA, of="heteroscedastic losses"),
    Row("dropped classes, by a given mask",
        "kept = 1 - binary * (1 - F.one_hot(labels, V)); "
        "weighed = kept * (z - z.amax(-1, keepdim=True).detach()).exp(); "
        "-(weighed.gather(-1, labels[:, None]) / weighed.sum(-1, keepdim=True)).log().mean()",
        REGION, of="DropMax"),
    Row("repetition penalty by gather and scatter",
        "seen = z.gather(-1, candidates); seen = torch.where(seen < 0, seen * 1.2, seen / 1.2); "
        "y = z.scatter(-1, candidates, seen); y.log_softmax(-1).gather(-1, labels[:, None])[:, 0]",
        REGION, of="sampling"),
    Row("scores added to candidates",
        "y = z.scatter_add(-1, candidates, 0.5 * torch.ones_like(candidates).to(z.dtype)); "
        "F.cross_entropy(y, labels)", REGION,
        of="biased decoding"),
    Row("probabilities of groups, index_add",
        "p = z.new_zeros(len(z), 8).index_add(1, groups, z.softmax(-1)); "
        "F.nll_loss(p.log(), groups[labels])", REGION,
        of="hierarchical labels"),
    Row("probabilities of groups, a product",
        "member = F.one_hot(groups, 8).to(z.dtype); "
        "F.nll_loss((z.softmax(-1) @ member).clamp_min(1e-06).log(), groups[labels])", REGION, of="hierarchical labels", ways=IN_BF16),
)
