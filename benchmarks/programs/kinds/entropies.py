"""Entropies of the softmax, with gradients or as a metric.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("entropies")
KINDS = (kind,)


@kind("-(softmax * log_softmax).sum()", "RL scripts", "[N]", dtypes=(F32, BF16))
def _(logits):
    return -(F.softmax(logits, dim=-1) * F.log_softmax(logits, dim=-1)).sum(dim=-1)


@kind("-(p * p.log()).sum()", "tutorials", "[N]")
def _(logits):
    p = logits.softmax(-1)
    return torch.neg(torch.sum(p * p.log(), -1))


@kind("-(p * log(p + 1e-9)).sum()", "tutorials", "scalar")
def _(logits):
    p = torch.softmax(logits, 1)
    return -(p * torch.log(p + 1e-9)).sum(1).mean()


@kind("-(exp(lp) * lp).sum()", "TRL", "[N]", dtypes=(F32, BF16))
def _(logits):
    log_probs = F.log_softmax(logits, dim=-1)
    return -(torch.exp(log_probs) * log_probs).sum(-1)


@kind("(lp.exp() * lp).sum(keepdim).neg()", "A2C", "[N, 1]")
def _(logits):
    log_probs = logits.log_softmax(dim=1)
    return log_probs.exp().mul(log_probs).sum(dim=1, keepdim=True).neg()


@kind("lse - (p * z).sum()", "verl", "[N]", dtypes=(F32, BF16))
def _(logits):
    p = torch.nn.functional.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(p * logits, dim=-1)


@kind("(p * (lse - z)).sum()", "from scratch", "[N]")
def _(logits):
    lse = logits.logsumexp(-1, keepdim=True)
    return ((logits - lse).exp() * (lse - logits)).sum(-1)


@kind("special.entr(p).sum()", "torch.special", "[N]")
def _(logits):
    return torch.special.entr(logits.softmax(-1)).sum(-1)


@kind("-xlogy(p, p).sum()", "torch.special", "[N]")
def _(logits):
    p = logits.softmax(-1)
    return -torch.xlogy(p, p).sum(-1)


@kind("einsum of p and lp", "JAX ports", "[N]")
def _(logits):
    log_probs = logits.log_softmax(-1)
    return -torch.einsum("nv,nv->n", log_probs.exp(), log_probs)


@kind("Categorical(logits).entropy()", "torch.distributions", "[N]", dtypes=(F32, BF16))
def _(logits):
    return Categorical(logits=logits, validate_args=False).entropy()


@kind("Categorical(probs).entropy()", "torch.distributions", "[N]")
def _(logits):
    return Categorical(probs=logits.softmax(-1), validate_args=False).entropy()


@kind("Categorical(logits).entropy(), validated", "torch.distributions", "[N]")
def _(logits):
    return Categorical(logits=logits).entropy()


@kind("KL to the uniform distribution", "F.kl_div", "scalar")
def _(logits):
    uniform = torch.full_like(logits, 1 / logits.shape[-1])
    return F.kl_div(logits.log_softmax(-1), uniform, reduction="batchmean")


@kind("in pieces of rows, cat", "verl's entropy with chunking", "[N]", dtypes=(F32, BF16))
def _(logits):
    pieces = []
    for start in range(0, logits.shape[0], 20):
        piece = logits[start : start + 20].float()
        p = piece.softmax(-1)
        pieces.append(torch.logsumexp(piece, dim=-1) - (p * piece).sum(-1))
    return torch.cat(pieces)


@kind("in pieces into an empty tensor", "verl's entropy with chunking", "[N]", gradients=())
def _(logits):
    entropy = torch.zeros(logits.shape[0], device=logits.device)
    for start in range(0, logits.shape[0], 24):
        piece = logits[start : start + 24]
        p = piece.softmax(-1)
        entropy[start : start + 24] = piece.logsumexp(-1) - (p * piece).sum(-1)
    return entropy


@kind("sequence by sequence, stack", "RL scripts", "[B, T]")
def _(sequences):
    rows = [row.log_softmax(-1) for row in sequences]
    return torch.stack([-(row.exp() * row).sum(-1) for row in rows])


@kind("checkpointed", "verl's entropy_checkpointing, restated", "[N]")
def _(logits):
    def entropy(logits):
        p = logits.softmax(-1)
        return logits.logsumexp(-1) - (p * logits).sum(-1)

    return checkpoint(entropy, logits, use_reentrant=False)


@kind("of masked tokens, over log V", "RL scripts", "scalar")
def _(sequences, mask):
    log_probs = sequences.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1) / math.log(sequences.shape[-1])
    return (entropy * mask).sum() / mask.sum()


@kind("confidence penalty", "Pereyra et al. 2017", "scalar")
def _(logits, labels):
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return F.nll_loss(log_probs, labels) - 0.1 * entropy


@kind("entropy minimisation at a temperature", "TENT", "scalar")
def _(logits, temperature):
    z = logits / temperature
    return -(z.softmax(1) * z.log_softmax(1)).sum(1).mean(0)


@kind("entropy under no_grad beside a loss", "RL trainers", "scalar, scalar")
def _(logits, labels):
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return loss, entropy


@kind("detached entropy beside a loss", "RL trainers", "scalar, [N]")
def _(logits, labels):
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return -log_probs.gather(-1, labels[:, None]).mean(), entropy.detach()


@kind("entropy of detached logits beside a loss", "RL trainers", "scalar, [N]")
def _(logits, labels):
    entropy = Categorical(logits=logits.detach(), validate_args=False).entropy()
    return F.cross_entropy(logits, labels), entropy


@kind("entropy alone, evaluation", "logging", "scalar", gradients=())
def _(logits):
    log_probs = logits.log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1).mean()
