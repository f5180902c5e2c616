"""Losses of papers that are row-wise, and mostly no formula of moments and picks.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.operands import SIZES
from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("row-wise losses of papers")
KINDS = (kind,)
BOTH = (F32, BF16)


def _cosines(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.normalize(x), F.normalize(weight))


# ---------------------------------------------------------------- margins


@kind("CosFace with a margin for hard classes", "CurricularFace", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    target = cosine.gather(-1, labels[:, None])
    hard = cosine > target - 0.2
    cosine = torch.where(hard, cosine * (0.3 + cosine), cosine)
    return F.cross_entropy(16 * cosine.scatter(-1, labels[:, None], target - 0.2), labels)


@kind("CosFace, sorted negatives", "CosFace", "scalar", dtypes=BOTH)
def _(x, weight, labels):
    cosine = _cosines(x, weight) - 0.35 * F.one_hot(labels, SIZES.v).to(x.dtype)
    negatives = cosine.scatter(-1, labels[:, None], -2.0).topk(30, -1).values
    target = cosine.gather(-1, labels[:, None])
    return F.cross_entropy(16 * torch.cat([target, negatives], -1), torch.zeros_like(labels))


@kind("ArcFace of all classes, easy margin", "ArcFace", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight).clamp(-0.999, 0.999)
    moved = torch.where(cosine > 0, (cosine.acos() + 0.3).cos(), cosine)
    target = F.one_hot(labels, SIZES.v).bool()
    return F.cross_entropy(torch.where(target, moved, cosine) * 16, labels)


@kind("ArcFace with two centres a class", "sub-centre ArcFace", "scalar")
def _(x, centres, labels):
    cosine = _cosines(x, centres).view(len(x), SIZES.v, 2).amax(-1).clamp(-0.999, 0.999)
    angle = cosine.acos() + 0.3 * F.one_hot(labels, SIZES.v).to(x.dtype)
    return F.cross_entropy(16 * angle.cos(), labels)


@kind("margin by the norm of the hidden state", "AdaFace", "scalar")
def _(x, weight, labels):
    norm = x.norm(dim=-1, keepdim=True).detach()
    margin = 0.3 * ((norm - norm.mean()) / norm.std()).clamp(-1, 1)
    target = F.one_hot(labels, SIZES.v).to(x.dtype)
    cosine = _cosines(x, weight).clamp(-0.999, 0.999)
    angle = (cosine.acos() - target * margin).clamp(1e-3, math.pi - 1e-3)
    return F.cross_entropy(16 * (angle.cos() - target * (margin + 0.3)), labels)


@kind("margins of classes, weighted, deferred weights", "LDAM", "scalar", dtypes=BOTH)
def _(logits, margins, class_weight, labels):
    target = F.one_hot(labels, SIZES.v).to(logits.dtype)
    z = logits - target * margins[None]
    return F.cross_entropy(2 * z.nan_to_num(), labels, weight=class_weight)


@kind("circle loss of classes", "circle loss", "scalar")
def _(x, weight, labels):
    cosine = _cosines(x, weight)
    target = F.one_hot(labels, SIZES.v).bool()
    positive = F.relu(1.25 - cosine.detach()) * (cosine - 0.75) * -8
    negative = F.relu(cosine.detach() + 0.25) * (cosine - 0.25) * 8
    near = positive.masked_fill(~target, -math.inf).logsumexp(-1)
    return F.softplus(near + negative.masked_fill(target, -math.inf).logsumexp(-1)).mean()


@kind("multi_margin_loss(p=2, margin)", "torch", "scalar")
def _(logits, labels):
    return F.multi_margin_loss(logits, labels, p=2, margin=0.5)


@kind("multi_margin_loss(weight, none)", "torch", "[N]")
def _(logits, class_weight, labels):
    return F.multi_margin_loss(logits, labels, weight=class_weight, reduction="none")


@kind("hinge to all other classes, by hand", "Weston and Watkins 1999", "scalar", dtypes=BOTH)
def _(logits, labels):
    target = logits.gather(-1, labels[:, None])
    hinge = (1 + logits - target).clamp_min(0)
    return hinge.scatter(-1, labels[:, None], 0.0).sum(-1).mean()


@kind("softplus of all differences to the target", "pairwise ranking", "[N]")
def _(logits, labels):
    difference = logits - logits.gather(-1, labels[:, None])
    return F.softplus(difference).mean(-1)


@kind("factors of frequent classes", "seesaw loss", "scalar")
def _(logits, class_weight, labels):
    ratio = class_weight[None, :] / class_weight[labels][:, None]
    p = logits.softmax(-1).detach()
    compensation = (p / p.gather(-1, labels[:, None]).clamp_min(1e-3)).clamp_min(1).pow(0.5)
    factor = ratio.clamp_max(1).pow(0.8) * compensation
    target = F.one_hot(labels, SIZES.v).bool()
    return F.cross_entropy(logits + factor.log().masked_fill(target, 0.0), labels)


# ---------------------------------------------------------------- sums over all classes


@kind("Brier score, sums of classes weighted", "Brier score", "[N]", dtypes=BOTH)
def _(logits, class_weight, labels):
    error = logits.softmax(-1) - F.one_hot(labels, SIZES.v).to(logits.dtype)
    return (class_weight * error.square()).sum(-1)


@kind("Brier score of the sorted probabilities", "calibration", "scalar")
def _(logits, labels):
    p, order = logits.softmax(-1).sort(-1, descending=True)
    hit = (order == labels[:, None]).to(logits.dtype)
    return (p - hit).square().sum(-1).mean()


@kind("histogram of a Gaussian, erf", "HL-Gauss", "scalar", dtypes=BOTH)
def _(logits, returns):
    edges = torch.linspace(-5, 5, SIZES.v + 1).to(logits.dtype)
    below = torch.erf((edges - returns[:, None]) / (0.75 * math.sqrt(2)))
    target = (below[:, 1:] - below[:, :-1]) / (below[:, -1:] - below[:, :1])
    return F.cross_entropy(logits, target)


@kind("histogram of a Gaussian, and the value's error", "HL-Gauss", "scalar, [N]")
def _(logits, returns, atoms):
    edges = torch.linspace(-5, 5, SIZES.v + 1).to(logits.dtype)
    target = torch.special.ndtr((edges - returns[:, None]) / 0.75).diff(dim=-1)
    value = (logits.softmax(-1) * atoms).sum(-1)
    return -(target * logits.log_softmax(-1)).sum(-1).mean(), (value - returns).detach().abs()


@kind("asymmetric focal of binary labels", "ASL", "scalar", dtypes=BOTH)
def _(logits, binary):
    p = logits.sigmoid()
    other = (1 - p + 0.05).clamp_max(1)
    pt = p * binary + other * (1 - binary)
    gamma = 1.0 * binary + 4.0 * (1 - binary)
    log_likelihood = binary * p.clamp_min(1e-6).log() + (1 - binary) * other.clamp_min(1e-6).log()
    return -(log_likelihood * (1 - pt).pow(gamma)).sum()


@kind("asymmetric focal of one label", "ASL", "scalar")
def _(logits, labels):
    log_probs = logits.log_softmax(-1)
    p, target = log_probs.exp(), F.one_hot(labels, SIZES.v).to(logits.dtype)
    weight = (1 - p * target - (1 - p) * (1 - target)).pow(1.0 * target + 4.0 * (1 - target))
    smooth = target * 0.9 + 0.1 / SIZES.v
    return -(smooth * log_probs * weight).sum(-1).mean()


@kind("soft labels by a matrix of classes", "label graphs", "scalar", dtypes=BOTH)
def _(logits, class_matrix, labels):
    return -(class_matrix[labels] * logits.log_softmax(-1)).sum(-1).mean()


@kind("soft labels by an embedding of classes, KL", "label graphs", "[N]")
def _(logits, class_matrix, labels):
    target = F.embedding(labels, class_matrix)
    return F.kl_div(logits.log_softmax(-1), target, reduction="none").sum(-1)


@kind("noisy labels, forward correction", "Patrini et al. 2017", "scalar", dtypes=BOTH)
def _(logits, class_matrix, labels):
    return F.nll_loss((logits.softmax(-1) @ class_matrix).log(), labels)


@kind("focal over the runner-up", "dual focal loss", "scalar")
def _(logits, labels):
    log_probs = logits.log_softmax(-1)
    target = log_probs.gather(-1, labels[:, None])
    p, pt = log_probs.exp(), target.exp()
    second = torch.where(p < pt, p, 0.0).amax(-1, keepdim=True)
    return -((1 - pt + second).pow(2) * target).mean()


@kind("Tsallis divergence to given probabilities", "Tsallis", "[N]", gradients=("x", "weight"))
def _(logits, soft):
    return (1 - (soft.pow(1.5) * logits.softmax(-1).pow(-0.5)).sum(-1)) / -0.5


@kind("Rényi entropy of order 3, evaluation", "entropies", "[N]", gradients=())
def _(logits):
    return logits.softmax(-1).pow(3).sum(-1).log() / -2


# ---------------------------------------------------------------- an autograd.Function


class _LogSumExp(torch.autograd.Function):
    """lse with a gradient that is smoothed: row-wise, and not what autograd would give."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        p = z.softmax(-1)
        ctx.save_for_backward(p)
        return z.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (p,) = ctx.saved_tensors
        return gradient[..., None] * (0.9 * p + 0.1 / p.shape[-1])


class _Clipped(torch.autograd.Function):
    """The identity, whose gradient is clipped row by row."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        norm = gradient.norm(dim=-1, keepdim=True)
        return gradient * (0.005 / norm.clamp_min(1e-6)).clamp_max(1.0)


@kind("custom logsumexp with a smoothed gradient", "autograd.Function", "scalar", dtypes=BOTH)
def _(logits, labels):
    lse = _LogSumExp.apply(logits)
    return (lse - logits.gather(-1, labels[:, None])[:, 0]).mean()


@kind("identity that clips a row's gradient", "autograd.Function", "scalar")
def _(logits, labels):
    return F.cross_entropy(_Clipped.apply(logits), labels)


@kind("custom logsumexp of two heads", "autograd.Function", "[N]")
def _(x, weight, second_x):
    both = F.linear(x, weight) + F.linear(second_x, weight).tanh()
    return _LogSumExp.apply(both)
