"""Margins at the target: expressions that know whether a class is the target."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.row import IN_BF16, REGION, Row

KIND = "margins at the target"


def _cosines(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.normalize(x), F.normalize(weight))


# fmt: off
ROWS = (
    Row("normalised softmax", "F.cross_entropy(16.0 * _cosines(x, weight), labels)", of="NormFace"),
    Row("CosFace by one_hot",
        "cosine = _cosines(x, weight); "
        "one_hot = F.one_hot(labels, weight.shape[0]).to(cosine.dtype); "
        "F.cross_entropy(16.0 * (cosine - 0.35 * one_hot), labels)", REGION,
        of="CosFace", ways=IN_BF16),
    Row("CosFace by where",
        "cosine = _cosines(x, weight); "
        "is_target = torch.arange(weight.shape[0]) == labels[:, None]; "
        "F.cross_entropy(16.0 * torch.where(is_target, cosine - 0.35, cosine), labels)", REGION,
        of="CosFace"),
    Row("CosFace by scatter_ of a margin",
        "cosine = _cosines(x, weight); "
        "margin = torch.zeros_like(cosine).scatter_(1, labels.view(-1, 1), 0.35); "
        "F.cross_entropy(16.0 * (cosine - margin), labels)", REGION,
        of="CosFace"),
    Row("AM-softmax by [arange, labels] -=",
        "logits = _cosines(x, weight); rows = torch.arange(len(labels)); "
        "logits[rows, labels] -= 0.35; F.cross_entropy(logits * 16.0, labels)", REGION,
        of="InsightFace's CosFace, restated"),
    Row("AM-softmax by hand",
        "cosine = _cosines(x, weight); "
        "target = 16.0 * (cosine.gather(1, labels[:, None])[:, 0] - 0.35); "
        "others = (16.0 * cosine).exp().sum(1) - (16.0 * cosine.gather(1, labels[:, None])[:, "
        "0]).exp(); "
        "(torch.log(target.exp() + others) - target).mean()", REGION,
        of="AM-softmax"),
    Row("AM-softmax by scatter of the target",
        "cosine = _cosines(x, weight); target = cosine.gather(1, labels[:, None]) - 0.35; "
        "F.cross_entropy(16.0 * cosine.scatter(1, labels[:, None], target), labels)", REGION,
        of="AM-softmax"),
    Row("ArcFace by one_hot and acos",
        "theta = _cosines(x, weight).clamp(-1 + 1e-06, 1 - 1e-06).acos(); "
        "one_hot = F.one_hot(labels, weight.shape[0]); "
        "F.cross_entropy(16.0 * torch.cos(theta + 0.5 * one_hot), labels)", REGION,
        of="ArcFace"),
    Row("ArcFace by sines",
        "cosine = _cosines(x, weight); "
        "sine = torch.sqrt((1.0 - cosine * cosine).clamp(1e-06, 1)); "
        "phi = cosine * math.cos(0.5) - sine * math.sin(0.5); "
        "phi = torch.where(cosine > math.cos(math.pi - 0.5), phi, cosine - math.sin(0.5) * 0.5); "
        "one_hot = torch.zeros_like(cosine).scatter_(1, labels.view(-1, 1).long(), 1); "
        "F.cross_entropy(16.0 * (one_hot * phi + (1.0 - one_hot) * cosine), labels)", REGION,
        of="ArcFace"),
    Row("ArcFace at the target only",
        "cosine = _cosines(x, weight); rows = torch.arange(len(labels)); "
        "target = cosine[rows, labels]; sine = torch.sqrt(1.0 - target.square() + 1e-06); "
        "logits = cosine.clone(); "
        "logits[rows, labels] = target * math.cos(0.5) - sine * math.sin(0.5); "
        "F.cross_entropy(logits.mul(16.0), labels)", REGION,
        of="InsightFace's ArcFace, restated"),
    Row("margin of each class, one_hot",
        "one_hot = F.one_hot(labels, z.shape[-1]); F.cross_entropy(z - one_hot * margins, labels)",
        REGION, of="LDAM"),
    Row("margin of each class, where",
        "is_target = torch.zeros_like(z, dtype=torch.bool).scatter_(1, labels[:, None], True); "
        "batch_margins = margins[labels][:, None]; "
        "F.cross_entropy(torch.where(is_target, z - batch_margins, z), labels)", REGION,
        of="LDAM"),
    Row("circle-style weights",
        "cosine = _cosines(x, weight); one_hot = F.one_hot(labels, weight.shape[0]).bool(); "
        "positive = (1.25 - cosine).clamp(min=0).detach() * (cosine - 0.75); "
        "negative = (cosine + 0.25).clamp(min=0).detach() * (cosine - 0.25); "
        "F.cross_entropy(16.0 * torch.where(one_hot, positive, negative), labels)", REGION,
        of="Circle loss"),
    Row("loss without the target's logit",
        "others = z.masked_fill(F.one_hot(labels, z.shape[-1]).bool(), -1000000000.0); "
        "others.logsumexp(-1) - z.gather(-1, labels[:, None])[:, 0]", REGION,
        of="unlearning"),
)
