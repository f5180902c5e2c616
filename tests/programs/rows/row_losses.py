"""Losses of papers that are row-wise, and mostly no formula of moments and picks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.row import FORMULA, IN_BF16, REGION, Row

KIND = "row-wise losses of papers"


def _cosines(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(F.normalize(x), F.normalize(weight))


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


# fmt: off
ROWS = (
    Row("CosFace with a margin for hard classes",
        "cosine = _cosines(x, weight); target = cosine.gather(-1, labels[:, None]); "
        "hard = cosine > target - 0.2; "
        "cosine = torch.where(hard, cosine * (0.3 + cosine), cosine); "
        "F.cross_entropy(16 * cosine.scatter(-1, labels[:, None], target - 0.2), labels)", REGION,
        of="CurricularFace"),
    Row("CosFace, sorted negatives",
        "cosine = _cosines(x, weight) - 0.35 * F.one_hot(labels, V).to(x.dtype); "
        "negatives = cosine.scatter(-1, labels[:, None], -2.0).topk(30, -1).values; "
        "target = cosine.gather(-1, labels[:, None]); "
        "F.cross_entropy(16 * torch.cat([target, negatives], -1), torch.zeros_like(labels))",
        REGION, of="CosFace", ways=IN_BF16),
    Row("ArcFace of all classes, easy margin",
        "cosine = _cosines(x, weight).clamp(-0.999, 0.999); "
        "moved = torch.where(cosine > 0, (cosine.acos() + 0.3).cos(), cosine); "
        "target = F.one_hot(labels, V).bool(); "
        "F.cross_entropy(torch.where(target, moved, cosine) * 16, labels)", REGION,
        of="ArcFace"),
    Row("ArcFace with two centres a class",
        "cosine = _cosines(x, centres).view(len(x), V, 2).amax(-1).clamp(-0.999, 0.999); "
        "angle = cosine.acos() + 0.3 * F.one_hot(labels, V).to(x.dtype); "
        "F.cross_entropy(16 * angle.cos(), labels)", REGION, left="pow, div",
        of="sub-centre ArcFace"),
    Row("margin by the norm of the hidden state",
        "norm = x.norm(dim=-1, keepdim=True).detach(); "
        "margin = 0.3 * ((norm - norm.mean()) / norm.std()).clamp(-1, 1); "
        "target = F.one_hot(labels, V).to(x.dtype); "
        "cosine = _cosines(x, weight).clamp(-0.999, 0.999); "
        "angle = (cosine.acos() - target * margin).clamp(0.001, math.pi - 0.001); "
        "F.cross_entropy(16 * (angle.cos() - target * (margin + 0.3)), labels)", REGION,
        of="AdaFace"),
    Row("margins of classes, weighted, deferred weights",
        "target = F.one_hot(labels, V).to(z.dtype); y = z - target * margins[None]; "
        "F.cross_entropy(2 * y.nan_to_num(), labels, weight=class_weight)", REGION,
        of="LDAM", ways=IN_BF16),
    Row("circle loss of classes",
        "cosine = _cosines(x, weight); target = F.one_hot(labels, V).bool(); "
        "positive = F.relu(1.25 - cosine.detach()) * (cosine - 0.75) * -8; "
        "negative = F.relu(cosine.detach() + 0.25) * (cosine - 0.25) * 8; "
        "near = positive.masked_fill(~target, -math.inf).logsumexp(-1); "
        "F.softplus(near + negative.masked_fill(target, -math.inf).logsumexp(-1)).mean()", REGION,
        of="circle loss"),
    Row("multi_margin_loss(p=2, margin)", "F.multi_margin_loss(z, labels, p=2, margin=0.5)", REGION,
        of="torch"),
    Row("multi_margin_loss(weight, none)",
        "F.multi_margin_loss(z, labels, weight=class_weight, reduction='none')",
        REGION, of="torch"),
    Row("hinge to all other classes, by hand",
        "target = z.gather(-1, labels[:, None]); hinge = (1 + z - target).clamp_min(0); "
        "hinge.scatter(-1, labels[:, None], 0.0).sum(-1).mean()", REGION,
        of="Weston and Watkins 1999", ways=IN_BF16),
    Row("softplus of all differences to the target",
        "difference = z - z.gather(-1, labels[:, None]); F.softplus(difference).mean(-1)", REGION,
        of="pairwise ranking"),
    Row("factors of frequent classes",
        "ratio = class_weight[None, :] / class_weight[labels][:, None]; "
        "p = z.softmax(-1).detach(); "
        "compensation = (p / p.gather(-1, labels[:, "
        "None]).clamp_min(0.001)).clamp_min(1).pow(0.5); "
        "factor = ratio.clamp_max(1).pow(0.8) * compensation; "
        "target = F.one_hot(labels, V).bool(); "
        "F.cross_entropy(z + factor.log().masked_fill(target, 0.0), labels)", REGION,
        of="seesaw loss"),
    Row("Brier score, sums of classes weighted",
        "error = z.softmax(-1) - F.one_hot(labels, V).to(z.dtype); "
        "(class_weight * error.square()).sum(-1)", FORMULA,
        of="Brier score", ways=IN_BF16),
    Row("Brier score of the sorted probabilities",
        "p, order = z.softmax(-1).sort(-1, descending=True); "
        "hit = (order == labels[:, None]).to(z.dtype); (p - hit).square().sum(-1).mean()", REGION,
        of="calibration"),
    Row("histogram of a Gaussian, erf",
        "edges = torch.linspace(-5, 5, V + 1).to(z.dtype); "
        "below = torch.erf((edges - returns[:, None]) / (0.75 * math.sqrt(2))); "
        "target = (below[:, 1:] - below[:, :-1]) / (below[:, -1:] - below[:, :1]); "
        "F.cross_entropy(z, target)", REGION,
        of="HL-Gauss", ways=IN_BF16),
    Row("histogram of a Gaussian, and the value's error",
        "edges = torch.linspace(-5, 5, V + 1).to(z.dtype); "
        "target = torch.special.ndtr((edges - returns[:, None]) / 0.75).diff(dim=-1); "
        "value = (z.softmax(-1) * atoms).sum(-1); "
        "(-(target * z.log_softmax(-1)).sum(-1).mean(), (value - returns).detach().abs())",
        REGION, of="HL-Gauss"),
    Row("asymmetric focal of binary labels",
        "p = z.sigmoid(); other = (1 - p + 0.05).clamp_max(1); "
        "pt = p * binary + other * (1 - binary); gamma = 1.0 * binary + 4.0 * (1 - binary); "
        "log_likelihood = binary * p.clamp_min(1e-06).log() + (1 - binary) * "
        "other.clamp_min(1e-06).log(); "
        "-(log_likelihood * (1 - pt).pow(gamma)).sum()", REGION,
        of="ASL", ways=IN_BF16),
    Row("asymmetric focal of one label",
        "log_probs = z.log_softmax(-1); "
        "p, target = (log_probs.exp(), F.one_hot(labels, V).to(z.dtype)); "
        "weight = (1 - p * target - (1 - p) * (1 - target)).pow(1.0 * target + 4.0 * (1 - "
        "target)); "
        "smooth = target * 0.9 + 0.1 / V; -(smooth * log_probs * weight).sum(-1).mean()", REGION,
        of="ASL"),
    Row("soft labels by a matrix of classes",
        "-(class_matrix[labels] * z.log_softmax(-1)).sum(-1).mean()", REGION,
        of="label graphs", ways=IN_BF16),
    Row("soft labels by an embedding of classes, KL",
        "target = F.embedding(labels, class_matrix); "
        "F.kl_div(z.log_softmax(-1), target, reduction='none').sum(-1)", REGION,
        of="label graphs"),
    Row("noisy labels, forward correction",
        "F.nll_loss((z.softmax(-1) @ class_matrix).log(), labels)", REGION,
        of="Patrini et al. 2017", ways=IN_BF16),
    Row("focal over the runner-up",
        "log_probs = z.log_softmax(-1); target = log_probs.gather(-1, labels[:, None]); "
        "p, pt = (log_probs.exp(), target.exp()); "
        "second = torch.where(p < pt, p, 0.0).amax(-1, keepdim=True); "
        "-((1 - pt + second).pow(2) * target).mean()", REGION,
        of="dual focal loss"),
    Row("Tsallis divergence to given probabilities",
        "(1 - (soft.pow(1.5) * z.softmax(-1).pow(-0.5)).sum(-1)) / -0.5", REGION,
        of="Tsallis", trained=("x", "weight")),
    Row("Rényi entropy of order 3, evaluation", "z.softmax(-1).pow(3).sum(-1).log() / -2", REGION,
        of="entropies", trained=()),
    # a graph of torch.export has no backward of its own
    Row("custom logsumexp with a smoothed gradient",
        "lse = _LogSumExp.apply(z); (lse - z.gather(-1, labels[:, None])[:, 0]).mean()", FORMULA,
        of="autograd.Function", ways=IN_BF16,
        never=("exported", "decomposed", "made")),
    Row("identity that clips a row's gradient", "F.cross_entropy(_Clipped.apply(z), labels)",
        FORMULA,
        of="autograd.Function"),
    Row("custom logsumexp of two heads",
        "both = F.linear(x, weight) + F.linear(second_x, weight).tanh(); _LogSumExp.apply(both)",
        REGION, of="autograd.Function"),
)
