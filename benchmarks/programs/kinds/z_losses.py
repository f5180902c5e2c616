"""Cross-entropies with a penalty on the log-sum-exp.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("z-losses")
KINDS = (kind,)


@kind("cross_entropy + logsumexp**2", "OLMo", "scalar", dtypes=(F32, BF16))
def _(logits, labels):
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


@kind("logsumexp first", "PaLM ports", "scalar")
def _(logits, labels):
    lse = torch.logsumexp(logits, dim=-1)
    loss = F.cross_entropy(logits, labels, reduction="none")
    return (loss + 1e-2 * lse * lse).mean()


@kind("one lse for both", "T5X ports", "scalar, scalar")
def _(logits, labels):
    lse = logits.logsumexp(-1, keepdim=True)
    log_probs = logits - lse
    loss = -log_probs.gather(-1, labels[:, None])[:, 0]
    z_loss = 1e-2 * lse.squeeze(-1) ** 2
    return (loss + z_loss).mean(), z_loss.detach().mean()


@kind("one lse, one_hot", "T5X ports", "scalar")
def _(logits, labels):
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    one_hot = F.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    loss = -torch.sum(one_hot * (logits - lse), dim=-1)
    return (loss + 1e-2 * torch.square(lse[:, 0])).sum() / len(labels)


@kind("log(sum(exp(z)))**2", "Mesh TensorFlow ports", "scalar")
def _(logits, labels):
    lse = torch.log(torch.sum(torch.exp(logits), dim=-1))
    return F.cross_entropy(logits, labels) + 1e-2 * (lse**2).mean()


@kind("ignored tokens masked in both", "OLMo", "scalar")
def _(logits, ignored):
    counted = ignored != -100
    z = (logits.logsumexp(-1).square() * counted).sum() / counted.sum()
    return F.cross_entropy(logits, ignored, ignore_index=-100) + 1e-2 * z


@kind("shifted loss, unshifted z-loss", "language-model recipes", "scalar")
def _(sequences, tokens):
    logits = sequences[:, :-1].reshape(-1, sequences.shape[-1])
    loss = F.cross_entropy(logits, tokens[:, 1:].reshape(-1))
    return loss + 1e-2 * sequences.logsumexp(-1).square().mean()


@kind("soft-capped logits", "Gemma recipes", "scalar")
def _(logits, labels):
    capped = 30 * torch.tanh(logits / 30)
    return F.cross_entropy(capped, labels) + 1e-2 * capped.logsumexp(-1).square().mean()


@kind("z-loss alone", "router regularisers", "scalar")
def _(logits):
    return torch.logsumexp(logits, dim=-1).square().mean()


@kind("logsumexp(dim=(-1,), keepdim=True)", "PaLM ports", "scalar")
def _(logits, labels):
    lse = torch.logsumexp(input=logits, dim=(-1,), keepdim=True)
    return F.cross_entropy(input=logits, target=labels) + 1e-2 * torch.mean(lse * lse)


@kind("z-loss in f32", "OLMo", "scalar", dtypes=(BF16,))
def _(logits, labels):
    z = logits.float().logsumexp(-1).square().mean()
    return F.cross_entropy(logits.float(), labels) + 1e-2 * z
