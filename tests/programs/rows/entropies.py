"""Entropies of the softmax, with gradients or as a metric."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch.distributions import Categorical
from torch.utils.checkpoint import checkpoint

from tests.programs.row import BOTH, FORMULA, IN_BF16, OUTSIDE, REGION, Row

KIND = "entropies"

# fmt: off
ROWS = (
    Row("-(softmax * log_softmax).sum()",
        "-(F.softmax(z, dim=-1) * F.log_softmax(z, dim=-1)).sum(dim=-1)",
        of="RL scripts", ways=IN_BF16),
    Row("-(p * p.log()).sum()", "p = z.softmax(-1); torch.neg(torch.sum(p * p.log(), -1))",
        of="tutorials"),
    Row("-(p * log(p + 1e-9)).sum()",
        "p = torch.softmax(z, 1); -(p * torch.log(p + 1e-09)).sum(1).mean()",
        REGION, of="tutorials"),
    Row("-(exp(lp) * lp).sum()",
        "log_probs = F.log_softmax(z, dim=-1); -(torch.exp(log_probs) * log_probs).sum(-1)",
        of="TRL", ways=IN_BF16),
    Row("(lp.exp() * lp).sum(keepdim).neg()",
        "log_probs = z.log_softmax(dim=1); "
        "log_probs.exp().mul(log_probs).sum(dim=1, keepdim=True).neg()",
        of="A2C"),
    Row("lse - (p * z).sum()",
        "p = torch.nn.functional.softmax(z, dim=-1); "
        "torch.logsumexp(z, dim=-1) - torch.sum(p * z, dim=-1)", BOTH,
        of="verl", ways=IN_BF16),
    Row("(p * (lse - z)).sum()",
        "lse = z.logsumexp(-1, keepdim=True); ((z - lse).exp() * (lse - z)).sum(-1)", BOTH,
        of="from scratch"),
    Row("special.entr(p).sum()", "torch.special.entr(z.softmax(-1)).sum(-1)", BOTH, of="torch.special"),
    Row("-xlogy(p, p).sum()", "p = z.softmax(-1); -torch.xlogy(p, p).sum(-1)", REGION, of="torch.special"),
    Row("einsum of p and lp",
        "log_probs = z.log_softmax(-1); -torch.einsum('nv,nv->n', log_probs.exp(), log_probs)",
        of="JAX ports"),
    Row("Categorical(logits).entropy()", "Categorical(logits=z, validate_args=False).entropy()", BOTH,
        of="torch.distributions", ways=IN_BF16),
    Row("Categorical(probs).entropy()",
        "Categorical(probs=z.softmax(-1), validate_args=False).entropy()", REGION,
        of="torch.distributions"),
    Row("Categorical(logits).entropy(), validated", "Categorical(logits=z).entropy()", BOTH,
        of="torch.distributions", ways=OUTSIDE),
    Row("KL to the uniform distribution",
        "uniform = torch.full_like(z, 1 / z.shape[-1]); "
        "F.kl_div(z.log_softmax(-1), uniform, reduction='batchmean')", REGION,
        of="F.kl_div"),
    Row("in pieces of rows, cat",
        "pieces = []\n"
        "for start in range(0, z.shape[0], 20):\n"
        "    piece = z[start:start + 20].float()\n"
        "    p = piece.softmax(-1)\n"
        "    pieces.append(torch.logsumexp(piece, dim=-1) - (p * piece).sum(-1))\n"
        "torch.cat(pieces)", REGION,
        of="verl's entropy with chunking", ways=IN_BF16),
    Row("in pieces into an empty tensor",
        "entropy = torch.zeros(z.shape[0], device=z.device)\n"
        "for start in range(0, z.shape[0], 24):\n"
        "    piece = z[start:start + 24]\n"
        "    p = piece.softmax(-1)\n"
        "    entropy[start:start + 24] = piece.logsumexp(-1) - (p * piece).sum(-1)\n"
        "entropy", REGION,
        of="verl's entropy with chunking", trained=()),
    Row("sequence by sequence, stack",
        "rows = [row.log_softmax(-1) for row in s]; "
        "torch.stack([-(row.exp() * row).sum(-1) for row in rows])",
        of="RL scripts"),
    Row("checkpointed",
        "def entropy(z):\n"
        "    p = z.softmax(-1)\n"
        "    return z.logsumexp(-1) - (p * z).sum(-1)\n"
        "checkpoint(entropy, z, use_reentrant=False)", BOTH,
        of="verl's entropy_checkpointing, restated"),
    Row("of masked tokens, over log V",
        "log_probs = s.log_softmax(-1); "
        "entropy = -(log_probs.exp() * log_probs).sum(-1) / math.log(s.shape[-1]); "
        "(entropy * mask).sum() / mask.sum()",
        of="RL scripts"),
    Row("confidence penalty",
        "log_probs = z.log_softmax(-1); entropy = -(log_probs.exp() * log_probs).sum(-1).mean(); "
        "F.nll_loss(log_probs, labels) - 0.1 * entropy",
        of="Pereyra et al. 2017"),
    Row("entropy minimisation at a temperature",
        "y = z / temperature; -(y.softmax(1) * y.log_softmax(1)).sum(1).mean(0)", REGION, of="TENT"),
    Row("entropy under no_grad beside a loss",
        "loss = F.cross_entropy(z, labels)\n"
        "with torch.no_grad():\n"
        "    log_probs = z.log_softmax(-1)\n"
        "    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()\n"
        "(loss, entropy)",
        of="RL trainers"),
    Row("detached entropy beside a loss",
        "log_probs = z.log_softmax(-1); entropy = -(log_probs.exp() * log_probs).sum(-1); "
        "(-log_probs.gather(-1, labels[:, None]).mean(), entropy.detach())",
        of="RL trainers"),
    Row("entropy of detached logits beside a loss",
        "entropy = Categorical(logits=z.detach(), validate_args=False).entropy(); "
        "(F.cross_entropy(z, labels), entropy)", FORMULA,
        of="RL trainers"),
    Row("entropy alone, evaluation",
        "log_probs = z.log_softmax(-1); -(log_probs.exp() * log_probs).sum(-1).mean()",
        of="logging", trained=()),
)
