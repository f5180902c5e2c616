"""Binary cross-entropies over classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.programs.row import IN_BF16, REGION, Row

KIND = "binary cross-entropy over classes"

# fmt: off
ROWS = (
    Row("bce_with_logits()", "F.binary_cross_entropy_with_logits(z, binary)", REGION,
        of="torch", ways=IN_BF16),
    Row("bce_with_logits(sum), keywords",
        "F.binary_cross_entropy_with_logits(target=binary, input=z, reduction='sum')",
        REGION, of="torch"),
    Row("bce_with_logits(none).sum(-1)",
        "F.binary_cross_entropy_with_logits(z, binary, reduction='none').sum(-1)", REGION,
        of="timm's BinaryCrossEntropy, restated"),
    Row("bce_with_logits(pos_weight)",
        "F.binary_cross_entropy_with_logits(z, binary, pos_weight=class_weight)",
        REGION, of="torch"),
    Row("bce_with_logits(weight)",
        "F.binary_cross_entropy_with_logits(z, binary, weight=class_weight)", REGION, of="torch"),
    Row("BCEWithLogitsLoss module", "torch.nn.BCEWithLogitsLoss()(z, binary)", REGION,
        of="transformers' multi-label heads"),
    Row("bce_with_logits of one_hot",
        "target = F.one_hot(labels, z.shape[-1]).to(z.dtype); "
        "F.binary_cross_entropy_with_logits(z, target)", REGION,
        of="DeiT III"),
    Row("bce_with_logits of smoothed one_hot",
        "off, v = (0.1 / z.shape[-1], z.shape[-1]); "
        "target = torch.full((len(labels), v), off).scatter_(1, labels.view(-1, 1), 0.9 + off); "
        "F.binary_cross_entropy_with_logits(z, target, reduction='none').sum(-1).mean()", REGION,
        of="timm's BinaryCrossEntropy, restated"),
    Row("softplus(z) - y z", "(F.softplus(z) - binary * z).sum(-1).mean()",
        REGION, of="from scratch"),
    Row("softplus(z).sum() - z[target]",
        "F.softplus(z).sum(-1) - z.gather(-1, labels[:, None])[:, 0]", REGION, of="from scratch"),
    Row("logsigmoid of both signs",
        "loss = binary * F.logsigmoid(z) + (1 - binary) * F.logsigmoid(-z); "
        "-loss.sum(dim=1).mean()", REGION,
        of="from scratch"),
    Row("max(z, 0) - z y + log1p(exp(-|z|))",
        "(z.clamp(min=0) - z * binary + torch.log1p(torch.exp(-z.abs()))).mean()", REGION,
        of="TensorFlow's formula"),
    Row("sigmoid, then binary_cross_entropy", "F.binary_cross_entropy(z.sigmoid(), binary)", REGION,
        of="tutorials"),
    Row("sigmoid focal",
        "p = torch.sigmoid(z); "
        "ce = F.binary_cross_entropy_with_logits(z, binary, reduction='none'); "
        "pt = p * binary + (1 - p) * (1 - binary); "
        "((0.25 * binary + 0.75 * (1 - binary)) * ce * (1 - pt) ** 2).mean(1).sum() / len(binary)",
        REGION, of="RetinaNet, restated"),
    Row("asymmetric",
        "p = torch.sigmoid(z); other = (1 - p + 0.05).clamp(max=1); "
        "loss = binary * p.clamp(min=1e-08).log() + (1 - binary) * other.clamp(min=1e-08).log(); "
        "pt = p * binary + other * (1 - binary); "
        "-(loss * (1 - pt) ** (binary + 4 * (1 - binary))).sum() / len(binary)", REGION,
        of="timm's AsymmetricLossMultiLabel, restated"),
    Row("multilabel_soft_margin_loss()", "F.multilabel_soft_margin_loss(z, binary)",
        REGION, of="torch"),
    Row("multi_margin_loss()", "F.multi_margin_loss(z, labels)", REGION, of="torch", never=("bf16",)),
)
