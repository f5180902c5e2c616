"""Margins at the target: expressions that know whether a class is the target.

Out: ``KINDS``, the programs. Their heads are cosines of normalised hidden states and weights.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("margins at the target")
KINDS = (kind,)


def _cosines(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.normalize(x), F.normalize(weight))


@kind("normalised softmax", "NormFace", "scalar")
def _(x, weight, labels):
    return F.cross_entropy(16.0 * _cosines(x, weight), labels)


@kind("CosFace by one_hot", "CosFace", "scalar", dtypes=(F32, BF16))
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    one_hot = F.one_hot(labels, weight.shape[0]).to(cosine.dtype)
    return F.cross_entropy(16.0 * (cosine - 0.35 * one_hot), labels)


@kind("CosFace by where", "CosFace", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    is_target = torch.arange(weight.shape[0]) == labels[:, None]
    return F.cross_entropy(16.0 * torch.where(is_target, cosine - 0.35, cosine), labels)


@kind("CosFace by scatter_ of a margin", "CosFace", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    margin = torch.zeros_like(cosine).scatter_(1, labels.view(-1, 1), 0.35)
    return F.cross_entropy(16.0 * (cosine - margin), labels)


@kind("AM-softmax by [arange, labels] -=", "InsightFace's CosFace, restated", "scalar")
def _(x, weight, labels):
    logits = _cosines(x, weight)
    rows = torch.arange(len(labels))
    logits[rows, labels] -= 0.35
    return F.cross_entropy(logits * 16.0, labels)


@kind("AM-softmax by hand", "AM-softmax", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    target = 16.0 * (cosine.gather(1, labels[:, None])[:, 0] - 0.35)
    others = (16.0 * cosine).exp().sum(1) - (16.0 * cosine.gather(1, labels[:, None])[:, 0]).exp()
    return (torch.log(target.exp() + others) - target).mean()


@kind("AM-softmax by scatter of the target", "AM-softmax", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    target = cosine.gather(1, labels[:, None]) - 0.35
    return F.cross_entropy(16.0 * cosine.scatter(1, labels[:, None], target), labels)


@kind("ArcFace by one_hot and acos", "ArcFace", "scalar")
def _(x, weight, labels):
    theta = _cosines(x, weight).clamp(-1 + 1e-6, 1 - 1e-6).acos()
    one_hot = F.one_hot(labels, weight.shape[0])
    return F.cross_entropy(16.0 * torch.cos(theta + 0.5 * one_hot), labels)


@kind("ArcFace by sines", "ArcFace", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    sine = torch.sqrt((1.0 - cosine * cosine).clamp(1e-6, 1))
    phi = cosine * math.cos(0.5) - sine * math.sin(0.5)
    phi = torch.where(cosine > math.cos(math.pi - 0.5), phi, cosine - math.sin(0.5) * 0.5)
    one_hot = torch.zeros_like(cosine).scatter_(1, labels.view(-1, 1).long(), 1)
    return F.cross_entropy(16.0 * (one_hot * phi + (1.0 - one_hot) * cosine), labels)


@kind("ArcFace at the target only", "InsightFace's ArcFace, restated", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    rows = torch.arange(len(labels))
    target = cosine[rows, labels]
    sine = torch.sqrt(1.0 - target.square() + 1e-6)
    logits = cosine.clone()
    logits[rows, labels] = target * math.cos(0.5) - sine * math.sin(0.5)
    return F.cross_entropy(logits.mul(16.0), labels)


@kind("margin of each class, one_hot", "LDAM", "scalar")
def _(logits, labels, margins):
    one_hot = F.one_hot(labels, logits.shape[-1])
    return F.cross_entropy(logits - one_hot * margins, labels)


@kind("margin of each class, where", "LDAM", "scalar")
def _(logits, labels, margins):
    is_target = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, labels[:, None], True)
    batch_margins = margins[labels][:, None]
    return F.cross_entropy(torch.where(is_target, logits - batch_margins, logits), labels)


@kind("circle-style weights", "Circle loss", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    one_hot = F.one_hot(labels, weight.shape[0]).bool()
    positive = (1.25 - cosine).clamp(min=0).detach() * (cosine - 0.75)
    negative = (cosine + 0.25).clamp(min=0).detach() * (cosine - 0.25)
    return F.cross_entropy(16.0 * torch.where(one_hot, positive, negative), labels)


@kind("loss without the target's logit", "unlearning", "[N]")
def _(logits, labels):
    others = logits.masked_fill(F.one_hot(labels, logits.shape[-1]).bool(), -1e9)
    return others.logsumexp(-1) - logits.gather(-1, labels[:, None])[:, 0]
