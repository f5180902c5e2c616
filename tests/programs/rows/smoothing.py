"""Label smoothing and soft targets, by hand and by torch's own losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.programs.row import BOTH, FORMULA, IN_BF16, REGION, Row

KIND = "label smoothing and soft targets"

# fmt: off
ROWS = (
    Row("cross_entropy(label_smoothing=0.1)", "F.cross_entropy(z, labels, label_smoothing=0.1)",
        of="torch"),
    Row("lp.mean() and nll",
        "log_probs = F.log_softmax(z, dim=-1); "
        "nll = -log_probs.gather(dim=-1, index=labels.unsqueeze(1)).squeeze(1); "
        "(0.9 * nll - 0.1 * log_probs.mean(dim=-1)).mean()",
        of="timm's LabelSmoothingCrossEntropy, restated"),
    Row("lp.sum(keepdim) and nll, ignored",
        "log_probs = z.log_softmax(-1); target = ignored.unsqueeze(-1); pad = target.eq(-100); "
        "nll = -log_probs.gather(dim=-1, index=target.clamp(min=0)); "
        "smooth = -log_probs.sum(dim=-1, keepdim=True); "
        "nll, smooth = (nll.masked_fill(pad, 0.0), smooth.masked_fill(pad, 0.0)); "
        "share = 0.1 / (log_probs.size(-1) - 1); "
        "(1.0 - 0.1 - share) * nll.sum() + share * smooth.sum()",
        of="fairseq's label_smoothed_nll_loss, restated"),
    Row("logits.mean() and lse",
        "lse = z.logsumexp(-1); picked = z.gather(-1, labels[:, None])[:, 0]; "
        "(lse - 0.9 * picked - 0.1 * z.mean(-1)).mean()", REGION,
        of="from scratch", ways=IN_BF16),
    Row("masked_fill_ in place",
        "minus = -F.log_softmax(z, dim=-1); labels = ignored.unsqueeze(-1); "
        "pad = labels.eq(-100); nll = minus.gather(dim=-1, index=labels.clamp(min=0)); "
        "smooth = minus.sum(dim=-1, keepdim=True, dtype=torch.float32); "
        "nll.masked_fill_(pad, 0.0); smooth.masked_fill_(pad, 0.0); "
        "count = pad.numel() - pad.long().sum(); "
        "0.9 * nll.sum() / count + 0.1 * smooth.sum() / (count * minus.shape[-1])",
        of="transformers' LabelSmoother, restated"),
    Row("one_hot(labels) * lp",
        "one_hot = F.one_hot(labels, z.shape[-1]); -(one_hot * z.log_softmax(-1)).sum(-1).mean()",
        FORMULA, of="tutorials"),
    Row("one_hot in float, einsum",
        "one_hot = F.one_hot(labels, num_classes=z.size(1)).to(z.dtype); "
        "torch.einsum('nv,nv->n', one_hot, F.log_softmax(z, 1)).neg()", FORMULA,
        of="JAX ports"),
    Row("smoothed one_hot",
        "v = z.shape[-1]; target = F.one_hot(labels, v).float() * 0.9 + 0.1 / v; "
        "torch.mean(torch.sum(-target * F.log_softmax(z, dim=1), dim=1))", FORMULA,
        of="Inception"),
    Row("scatter_ into a filled tensor",
        "log_probs = z.log_softmax(dim=-1); "
        "target = torch.full_like(log_probs, 0.1 / (z.size(-1) - 1)); "
        "target.scatter_(1, labels.unsqueeze(1), 0.9); "
        "F.kl_div(log_probs, target, reduction='sum') / len(labels)", REGION,
        of="OpenNMT"),
    Row("zeros_like().scatter()",
        "with torch.no_grad():\n"
        "    target = torch.zeros_like(z).scatter(1, labels[:, None], 1.0)\n"
        "(-target * torch.log_softmax(z, -1)).sum(-1)", FORMULA,
        of="tutorials"),
    Row("arange == labels",
        "is_target = torch.arange(z.shape[-1]) == labels[:, None]; "
        "-torch.where(is_target, z.log_softmax(-1), 0.0).sum() / len(labels)", FORMULA,
        of="JAX ports"),
    Row("-(soft * lp).sum().mean()", "torch.sum(-soft * F.log_softmax(z, dim=-1), dim=-1).mean()", REGION,
        of="timm's SoftTargetCrossEntropy, restated"),
    Row("(soft * lp).sum(keepdim)", "torch.log_softmax(z, 1).mul(soft).sum(1, keepdim=True)", BOTH,
        of="distillation", ways=IN_BF16),
    Row("soft targets without a gradient", "-(soft * z.log_softmax(-1)).sum() / len(soft)",
        of="distillation", trained=("x", "weight")),
    Row("lse - (soft * z).sum()", "z.logsumexp(-1) - (soft * z).sum(-1)",
        REGION, of="from scratch"),
    Row("cross_entropy of probabilities", "F.cross_entropy(z, soft)",
        of="torch", trained=("x", "weight")),
    Row("kl_div(batchmean)", "F.kl_div(F.log_softmax(z, dim=-1), soft, reduction='batchmean')",
        REGION, of="distillation", trained=("x", "weight")),
    Row("kl_div(none).sum(-1)", "F.kl_div(z.log_softmax(-1), soft, reduction='none').sum(-1)",
        BOTH, of="distillation", trained=("x", "weight")),
    Row("KLDivLoss module",
        "torch.nn.KLDivLoss(reduction='batchmean')(torch.nn.LogSoftmax(dim=1)(z), soft)", REGION,
        of="distillation", trained=("x", "weight")),
    Row("kl_div of a teacher's logits, temperature",
        "target = F.log_softmax(teacher / 2.0, dim=-1); "
        "kl = F.kl_div(F.log_softmax(z / 2.0, -1), target, log_target=True, "
        "reduction='batchmean'); "
        "4.0 * kl", REGION,
        of="Hinton et al. 2015"),
    Row("(q * (log q - lp)).sum()",
        "target = teacher.log_softmax(-1); "
        "(target.exp() * (target - z.log_softmax(-1))).sum(-1).mean()", REGION,
        of="distillation"),
    Row("mixup of two labels",
        "other = labels.flip(0); "
        "0.3 * F.cross_entropy(z, labels) + 0.7 * F.cross_entropy(z, other)",
        of="mixup"),
    Row("class weights times one_hot",
        "target = F.one_hot(labels, z.shape[-1]) * class_weight; "
        "-(target * z.log_softmax(-1)).sum() / target.sum()", FORMULA,
        of="from scratch"),
)
