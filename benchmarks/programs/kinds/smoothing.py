"""Label smoothing and soft targets, by hand and by torch's own losses.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("label smoothing and soft targets")
KINDS = (kind,)

# ---------------------------------------------------------------- smoothing


@kind("cross_entropy(label_smoothing=0.1)", "torch", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


@kind("lp.mean() and nll", "timm's LabelSmoothingCrossEntropy, restated", "scalar")
def _(logits, labels):
    log_probs = F.log_softmax(logits, dim=-1)
    nll = -log_probs.gather(dim=-1, index=labels.unsqueeze(1)).squeeze(1)
    return (0.9 * nll - 0.1 * log_probs.mean(dim=-1)).mean()


@kind("lp.sum(keepdim) and nll, ignored", "fairseq's label_smoothed_nll_loss, restated", "scalar")
def _(logits, ignored):
    log_probs = logits.log_softmax(-1)
    target = ignored.unsqueeze(-1)
    pad = target.eq(-100)
    nll = -log_probs.gather(dim=-1, index=target.clamp(min=0))
    smooth = -log_probs.sum(dim=-1, keepdim=True)
    nll, smooth = nll.masked_fill(pad, 0.0), smooth.masked_fill(pad, 0.0)
    share = 0.1 / (log_probs.size(-1) - 1)
    return (1.0 - 0.1 - share) * nll.sum() + share * smooth.sum()


@kind("logits.mean() and lse", "from scratch", "scalar", dtypes=(F32, BF16))
def _(logits, labels):
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, labels[:, None])[:, 0]
    return (lse - 0.9 * picked - 0.1 * logits.mean(-1)).mean()


@kind("masked_fill_ in place", "transformers' LabelSmoother, restated", "scalar")
def _(logits, ignored):
    minus = -F.log_softmax(logits, dim=-1)
    labels = ignored.unsqueeze(-1)
    pad = labels.eq(-100)
    nll = minus.gather(dim=-1, index=labels.clamp(min=0))
    smooth = minus.sum(dim=-1, keepdim=True, dtype=torch.float32)
    nll.masked_fill_(pad, 0.0)
    smooth.masked_fill_(pad, 0.0)
    count = pad.numel() - pad.long().sum()
    return 0.9 * nll.sum() / count + 0.1 * smooth.sum() / (count * minus.shape[-1])


# ---------------------------------------------------------------- distributions made from labels


@kind("one_hot(labels) * lp", "tutorials", "scalar")
def _(logits, labels):
    one_hot = F.one_hot(labels, logits.shape[-1])
    return -(one_hot * logits.log_softmax(-1)).sum(-1).mean()


@kind("one_hot in float, einsum", "JAX ports", "[N]")
def _(logits, labels):
    one_hot = F.one_hot(labels, num_classes=logits.size(1)).to(logits.dtype)
    return torch.einsum("nv,nv->n", one_hot, F.log_softmax(logits, 1)).neg()


@kind("smoothed one_hot", "Inception", "scalar")
def _(logits, labels):
    v = logits.shape[-1]
    target = F.one_hot(labels, v).float() * 0.9 + 0.1 / v
    return torch.mean(torch.sum(-target * F.log_softmax(logits, dim=1), dim=1))


@kind("scatter_ into a filled tensor", "OpenNMT", "scalar")
def _(logits, labels):
    log_probs = logits.log_softmax(dim=-1)
    target = torch.full_like(log_probs, 0.1 / (logits.size(-1) - 1))
    target.scatter_(1, labels.unsqueeze(1), 0.9)
    return F.kl_div(log_probs, target, reduction="sum") / len(labels)


@kind("zeros_like().scatter()", "tutorials", "[N]")
def _(logits, labels):
    with torch.no_grad():
        target = torch.zeros_like(logits).scatter(1, labels[:, None], 1.0)
    return (-target * torch.log_softmax(logits, -1)).sum(-1)


@kind("arange == labels", "JAX ports", "scalar")
def _(logits, labels):
    is_target = torch.arange(logits.shape[-1]) == labels[:, None]
    return -torch.where(is_target, logits.log_softmax(-1), 0.0).sum() / len(labels)


# ---------------------------------------------------------------- given distributions


@kind("-(soft * lp).sum().mean()", "timm's SoftTargetCrossEntropy, restated", "scalar")
def _(logits, soft):
    return torch.sum(-soft * F.log_softmax(logits, dim=-1), dim=-1).mean()


@kind("(soft * lp).sum(keepdim)", "distillation", "[N, 1]", dtypes=(F32, BF16))
def _(logits, soft):
    return torch.log_softmax(logits, 1).mul(soft).sum(1, keepdim=True)


@kind("soft targets without a gradient", "distillation", "scalar", gradients=("x", "weight"))
def _(logits, soft):
    return -(soft * logits.log_softmax(-1)).sum() / len(soft)


@kind("lse - (soft * z).sum()", "from scratch", "[N]")
def _(logits, soft):
    return logits.logsumexp(-1) - (soft * logits).sum(-1)


@kind("cross_entropy of probabilities", "torch", "scalar", gradients=("x", "weight"))
def _(logits, soft):
    return F.cross_entropy(logits, soft)


@kind("kl_div(batchmean)", "distillation", "scalar", gradients=("x", "weight"))
def _(logits, soft):
    return F.kl_div(F.log_softmax(logits, dim=-1), soft, reduction="batchmean")


@kind("kl_div(none).sum(-1)", "distillation", "[N]", gradients=("x", "weight"))
def _(logits, soft):
    return F.kl_div(logits.log_softmax(-1), soft, reduction="none").sum(-1)


@kind("KLDivLoss module", "distillation", "scalar", gradients=("x", "weight"))
def _(logits, soft):
    return torch.nn.KLDivLoss(reduction="batchmean")(torch.nn.LogSoftmax(dim=1)(logits), soft)


@kind("kl_div of a teacher's logits, temperature", "Hinton et al. 2015", "scalar")
def _(logits, teacher):
    target = F.log_softmax(teacher / 2.0, dim=-1)
    kl = F.kl_div(F.log_softmax(logits / 2.0, -1), target, log_target=True, reduction="batchmean")
    return 4.0 * kl


@kind("(q * (log q - lp)).sum()", "distillation", "scalar")
def _(logits, teacher):
    target = teacher.log_softmax(-1)
    return (target.exp() * (target - logits.log_softmax(-1))).sum(-1).mean()


@kind("mixup of two labels", "mixup", "scalar")
def _(logits, labels):
    other = labels.flip(0)
    return 0.3 * F.cross_entropy(logits, labels) + 0.7 * F.cross_entropy(logits, other)


@kind("class weights times one_hot", "from scratch", "scalar")
def _(logits, labels, class_weight):
    target = F.one_hot(labels, logits.shape[-1]) * class_weight
    return -(target * logits.log_softmax(-1)).sum() / target.sum()
