"""Losses of the target's probability: poly, focal, robust and importance-weighted ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.programs.row import BOTH, FORMULA, IN_BF16, REGION, Row

KIND = "poly, focal and importance losses"

# fmt: off
ROWS = (
    Row("poly-1 by softmax().gather()",
        "pt = z.softmax(-1).gather(-1, labels[:, None])[:, 0]; "
        "(F.cross_entropy(z, labels, reduction='none') + 1 - pt).mean()",
        of="PolyLoss", ways=IN_BF16),
    Row("poly-1 by a one_hot sum",
        "pt = (F.one_hot(labels, z.shape[-1]) * F.softmax(z, dim=-1)).sum(-1); "
        "(F.cross_entropy(z, labels, reduction='none') + 2.0 * (1 - pt)).mean()", FORMULA,
        of="PolyLoss"),
    Row("focal by exp(-ce)",
        "ce = F.cross_entropy(z, labels, reduction='none'); "
        "((1 - torch.exp(-ce)) ** 2 * ce).mean()",
        of="RetinaNet ports"),
    Row("focal by softmax().gather()",
        "pt = F.softmax(z, dim=1).gather(1, labels.view(-1, 1)).view(-1); "
        "(-(1 - pt) ** 2 * pt.log()).mean()",
        of="RetinaNet ports", ways=IN_BF16),
    Row("focal by lp.gather().exp()",
        "log_pt = z.log_softmax(dim=-1).gather(-1, labels[:, None]).squeeze(-1); "
        "-torch.pow(1 - log_pt.exp(), 2.0) * log_pt",
        of="RetinaNet ports"),
    Row("focal over all classes, one_hot",
        "log_probs = z.log_softmax(1); weight = torch.pow(1.0 - log_probs.exp(), 2.0); "
        "one_hot = F.one_hot(labels, z.shape[1]).to(z.dtype); "
        "torch.sum(one_hot * (-0.25 * weight * log_probs), dim=1).mean()", FORMULA,
        of="kornia, restated"),
    Row("focal with class weights",
        "log_pt = z.log_softmax(-1)[torch.arange(len(labels)), labels]; "
        "-((1 - log_pt.exp()) ** 2 * log_pt * class_weight[labels]).mean()",
        of="from scratch"),
    Row("generalised cross-entropy",
        "pt = torch.softmax(z, dim=-1)[torch.arange(len(labels)), labels]; "
        "((1 - pt ** 0.7) / 0.7).mean()",
        of="Zhang and Sabuncu 2018"),
    Row("mean absolute error", "2 - 2 * z.softmax(-1).gather(-1, labels[:, None])[:, 0]",
        of="Ghosh et al. 2017"),
    Row("Taylor cross-entropy",
        "miss = 1 - z.softmax(-1).gather(-1, labels[:, None]); (miss + miss ** 2 / 2).mean()",
        of="Feng et al. 2020"),
    Row("symmetric cross-entropy",
        "p = F.softmax(z, dim=1).clamp(min=1e-07, max=1.0); "
        "one_hot = F.one_hot(labels, z.shape[1]).float().clamp(min=0.0001, max=1.0); "
        "reverse = -(p * one_hot.log()).sum(1); F.cross_entropy(z, labels) + 0.1 * reverse.mean()",
        REGION, of="Wang et al. 2019"),
    Row("sum of squared probabilities", "z.softmax(-1).square().sum(-1)", of="information energy"),
    Row("(2 * lp).exp().sum()", "(2 * z.log_softmax(-1)).exp().sum(dim=-1)",
        of="TRL's log_sum_sq_probs", ways=IN_BF16),
    Row("logsumexp(2z) - 2 logsumexp(z)", "torch.logsumexp(2 * z, -1) - 2 * torch.logsumexp(z, -1)",
        BOTH, of="Rényi entropy"),
    Row("Brier score",
        "p = z.softmax(-1); ((p - F.one_hot(labels, z.shape[-1])) ** 2).sum(-1).mean()", FORMULA,
        of="from scratch"),
    Row("Brier score by Σp² and the target",
        "p = z.softmax(-1); (p ** 2).sum(-1) - 2 * p.gather(-1, labels[:, None])[:, 0] + 1",
        of="from scratch"),
    Row("mse_loss of the softmax",
        "F.mse_loss(z.softmax(-1), F.one_hot(labels, z.shape[-1]).to(z.dtype))",
        FORMULA, of="tutorials"),
    Row("nll_loss of log(softmax + eps)", "F.nll_loss((z.softmax(-1) + 1e-09).log(), labels)",
        of="tutorials"),
    Row("unlikelihood",
        "p = z.softmax(-1).gather(-1, candidates); "
        "-torch.log((1 - p).clamp(min=1e-05)).sum(-1).mean()", REGION,
        of="Welleck et al. 2020"),
    Row("dynamic fine-tuning",
        "log_probs = z.log_softmax(-1); counted = ignored != -100; "
        "picked = log_probs.gather(-1, ignored.clamp(min=0)[:, None])[:, 0]; "
        "-(picked * picked.exp().detach() * counted).sum() / counted.sum()",
        of="DFT"),
    Row("truncated importance ratio",
        "log_probs = z.log_softmax(-1).gather(-1, labels[:, None])[:, 0]; "
        "ratio = (log_probs - old).exp().detach().clamp(max=2.0); "
        "-(ratio * advantages * log_probs).mean()",
        of="off-policy RL"),
)
