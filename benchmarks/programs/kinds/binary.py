"""Binary cross-entropies over classes.

Out: ``KINDS``, the programs. Most targets are given values ``[N, V]``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("binary cross-entropy over classes")
KINDS = (kind,)


@kind("bce_with_logits()", "torch", "scalar", dtypes=(F32, BF16))
def _(logits, binary):
    return F.binary_cross_entropy_with_logits(logits, binary)


@kind("bce_with_logits(sum), keywords", "torch", "scalar")
def _(logits, binary):
    return F.binary_cross_entropy_with_logits(target=binary, input=logits, reduction="sum")


@kind("bce_with_logits(none).sum(-1)", "timm's BinaryCrossEntropy, restated", "[N]")
def _(logits, binary):
    return F.binary_cross_entropy_with_logits(logits, binary, reduction="none").sum(-1)


@kind("bce_with_logits(pos_weight)", "torch", "scalar")
def _(logits, binary, class_weight):
    return F.binary_cross_entropy_with_logits(logits, binary, pos_weight=class_weight)


@kind("bce_with_logits(weight)", "torch", "scalar")
def _(logits, binary, class_weight):
    return F.binary_cross_entropy_with_logits(logits, binary, weight=class_weight)


@kind("BCEWithLogitsLoss module", "transformers' multi-label heads", "scalar")
def _(logits, binary):
    return torch.nn.BCEWithLogitsLoss()(logits, binary)


@kind("bce_with_logits of one_hot", "DeiT III", "scalar")
def _(logits, labels):
    target = F.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, target)


@kind("bce_with_logits of smoothed one_hot", "timm's BinaryCrossEntropy, restated", "scalar")
def _(logits, labels):
    off, v = 0.1 / logits.shape[-1], logits.shape[-1]
    target = torch.full((len(labels), v), off).scatter_(1, labels.view(-1, 1), 0.9 + off)
    return F.binary_cross_entropy_with_logits(logits, target, reduction="none").sum(-1).mean()


@kind("softplus(z) - y z", "from scratch", "scalar")
def _(logits, binary):
    return (F.softplus(logits) - binary * logits).sum(-1).mean()


@kind("softplus(z).sum() - z[target]", "from scratch", "[N]")
def _(logits, labels):
    return F.softplus(logits).sum(-1) - logits.gather(-1, labels[:, None])[:, 0]


@kind("logsigmoid of both signs", "from scratch", "scalar")
def _(logits, binary):
    loss = binary * F.logsigmoid(logits) + (1 - binary) * F.logsigmoid(-logits)
    return -loss.sum(dim=1).mean()


@kind("max(z, 0) - z y + log1p(exp(-|z|))", "TensorFlow's formula", "scalar")
def _(logits, binary):
    return (logits.clamp(min=0) - logits * binary + torch.log1p(torch.exp(-logits.abs()))).mean()


@kind("sigmoid, then binary_cross_entropy", "tutorials", "scalar")
def _(logits, binary):
    return F.binary_cross_entropy(logits.sigmoid(), binary)


@kind("sigmoid focal", "RetinaNet, restated", "scalar")
def _(logits, binary):
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, binary, reduction="none")
    pt = p * binary + (1 - p) * (1 - binary)
    return ((0.25 * binary + 0.75 * (1 - binary)) * ce * (1 - pt) ** 2).mean(1).sum() / len(binary)


@kind("asymmetric", "timm's AsymmetricLossMultiLabel, restated", "scalar")
def _(logits, binary):
    p = torch.sigmoid(logits)
    other = (1 - p + 0.05).clamp(max=1)
    loss = binary * p.clamp(min=1e-8).log() + (1 - binary) * other.clamp(min=1e-8).log()
    pt = p * binary + other * (1 - binary)
    return -(loss * (1 - pt) ** (binary + 4 * (1 - binary))).sum() / len(binary)


@kind("multilabel_soft_margin_loss()", "torch", "scalar")
def _(logits, binary):
    return F.multilabel_soft_margin_loss(logits, binary)


@kind("multi_margin_loss()", "torch", "scalar")
def _(logits, labels):
    return F.multi_margin_loss(logits, labels)
