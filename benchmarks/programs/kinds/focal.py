"""Losses of the target's probability: poly, focal, robust and importance-weighted ones.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("poly, focal and importance losses")
KINDS = (kind,)


@kind("poly-1 by softmax().gather()", "PolyLoss", "scalar", dtypes=(F32, BF16))
def _(logits, labels):
    pt = logits.softmax(-1).gather(-1, labels[:, None])[:, 0]
    return (F.cross_entropy(logits, labels, reduction="none") + 1 - pt).mean()


@kind("poly-1 by a one_hot sum", "PolyLoss", "scalar")
def _(logits, labels):
    pt = (F.one_hot(labels, logits.shape[-1]) * F.softmax(logits, dim=-1)).sum(-1)
    return (F.cross_entropy(logits, labels, reduction="none") + 2.0 * (1 - pt)).mean()


@kind("focal by exp(-ce)", "RetinaNet ports", "scalar")
def _(logits, labels):
    ce = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


@kind("focal by softmax().gather()", "RetinaNet ports", "scalar", dtypes=(F32, BF16))
def _(logits, labels):
    pt = F.softmax(logits, dim=1).gather(1, labels.view(-1, 1)).view(-1)
    return (-((1 - pt) ** 2) * pt.log()).mean()


@kind("focal by lp.gather().exp()", "RetinaNet ports", "[N]")
def _(logits, labels):
    log_pt = logits.log_softmax(dim=-1).gather(-1, labels[:, None]).squeeze(-1)
    return -torch.pow(1 - log_pt.exp(), 2.0) * log_pt


@kind("focal over all classes, one_hot", "kornia, restated", "scalar")
def _(logits, labels):
    log_probs = logits.log_softmax(1)
    weight = torch.pow(1.0 - log_probs.exp(), 2.0)
    one_hot = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return torch.sum(one_hot * (-0.25 * weight * log_probs), dim=1).mean()


@kind("focal with class weights", "from scratch", "scalar")
def _(logits, labels, class_weight):
    log_pt = logits.log_softmax(-1)[torch.arange(len(labels)), labels]
    return -((1 - log_pt.exp()) ** 2 * log_pt * class_weight[labels]).mean()


@kind("generalised cross-entropy", "Zhang and Sabuncu 2018", "scalar")
def _(logits, labels):
    pt = torch.softmax(logits, dim=-1)[torch.arange(len(labels)), labels]
    return ((1 - pt**0.7) / 0.7).mean()


@kind("mean absolute error", "Ghosh et al. 2017", "[N]")
def _(logits, labels):
    return 2 - 2 * logits.softmax(-1).gather(-1, labels[:, None])[:, 0]


@kind("Taylor cross-entropy", "Feng et al. 2020", "scalar")
def _(logits, labels):
    miss = 1 - logits.softmax(-1).gather(-1, labels[:, None])
    return (miss + miss**2 / 2).mean()


@kind("symmetric cross-entropy", "Wang et al. 2019", "scalar")
def _(logits, labels):
    p = F.softmax(logits, dim=1).clamp(min=1e-7, max=1.0)
    one_hot = F.one_hot(labels, logits.shape[1]).float().clamp(min=1e-4, max=1.0)
    reverse = -(p * one_hot.log()).sum(1)
    return F.cross_entropy(logits, labels) + 0.1 * reverse.mean()


@kind("sum of squared probabilities", "information energy", "[N]")
def _(logits):
    return logits.softmax(-1).square().sum(-1)


@kind("(2 * lp).exp().sum()", "TRL's log_sum_sq_probs", "[N]", dtypes=(F32, BF16))
def _(logits):
    return (2 * logits.log_softmax(-1)).exp().sum(dim=-1)


@kind("logsumexp(2z) - 2 logsumexp(z)", "Rényi entropy", "[N]")
def _(logits):
    return torch.logsumexp(2 * logits, -1) - 2 * torch.logsumexp(logits, -1)


@kind("Brier score", "from scratch", "scalar")
def _(logits, labels):
    p = logits.softmax(-1)
    return ((p - F.one_hot(labels, logits.shape[-1])) ** 2).sum(-1).mean()


@kind("Brier score by Σp² and the target", "from scratch", "[N]")
def _(logits, labels):
    p = logits.softmax(-1)
    return (p**2).sum(-1) - 2 * p.gather(-1, labels[:, None])[:, 0] + 1


@kind("mse_loss of the softmax", "tutorials", "scalar")
def _(logits, labels):
    return F.mse_loss(logits.softmax(-1), F.one_hot(labels, logits.shape[-1]).to(logits.dtype))


@kind("nll_loss of log(softmax + eps)", "tutorials", "scalar")
def _(logits, labels):
    return F.nll_loss((logits.softmax(-1) + 1e-9).log(), labels)


@kind("unlikelihood", "Welleck et al. 2020", "scalar")
def _(logits, candidates):
    p = logits.softmax(-1).gather(-1, candidates)
    return -torch.log((1 - p).clamp(min=1e-5)).sum(-1).mean()


@kind("dynamic fine-tuning", "DFT", "scalar")
def _(logits, ignored):
    log_probs = logits.log_softmax(-1)
    counted = ignored != -100
    picked = log_probs.gather(-1, ignored.clamp(min=0)[:, None])[:, 0]
    return -(picked * picked.exp().detach() * counted).sum() / counted.sum()


@kind("truncated importance ratio", "off-policy RL", "scalar")
def _(logits, labels, old, advantages):
    log_probs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    ratio = (log_probs - old).exp().detach().clamp(max=2.0)
    return -(ratio * advantages * log_probs).mean()
