"""Losses over per-token log-probabilities: policies and preferences.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("losses of log-probabilities")
KINDS = (kind,)


def _picked(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@kind("REINFORCE", "Williams 1992", "scalar", dtypes=(F32, BF16))
def _(logits, labels, advantages):
    return -(_picked(logits, labels) * advantages).mean()


@kind("PPO, clipped", "verl", "scalar")
def _(logits, labels, old, advantages):
    ratio = torch.exp(_picked(logits, labels) - old)
    clipped = ratio.clamp(0.8, 1.2)
    return torch.max(-advantages * ratio, -advantages * clipped).mean()


@kind("GRPO, with a k3 estimate", "TRL", "scalar", dtypes=(F32, BF16))
def _(sequences, tokens, old_tokens, mask):
    log_probs = _picked(sequences, tokens)
    k3 = (old_tokens - log_probs).exp() - (old_tokens - log_probs) - 1
    loss = -(log_probs - log_probs.detach()).exp() + 0.04 * k3
    return ((loss * mask).sum(-1) / mask.sum(-1)).mean()


@kind("log-probabilities used twice", "GRPO recipes", "scalar, [N]")
def _(logits, labels, old):
    log_probs = _picked(logits, labels)
    ratio = (log_probs - old).exp()
    return -ratio.mean(), log_probs


@kind("log_softmax used twice", "RL scripts", "[N], [N, K]")
def _(logits, labels, candidates):
    log_probs = F.log_softmax(logits, dim=-1)
    return log_probs.gather(-1, labels[:, None])[:, 0], log_probs.gather(-1, candidates)


@kind("GSPO, a ratio for each sequence", "Qwen's GSPO", "scalar")
def _(sequences, tokens, old_tokens, mask):
    log_ratio = (_picked(sequences, tokens) - old_tokens) * mask
    ratio = (log_ratio.sum(-1) / mask.sum(-1).clamp(min=1)).exp()
    return -torch.min(ratio, ratio.clamp(0.9, 1.1)).mean()


@kind("DPO, chosen and rejected in one batch", "TRL", "scalar, [B]")
def _(sequences, tokens, old_tokens, mask):
    margin = ((_picked(sequences, tokens) - old_tokens) * mask).sum(-1)
    chosen, rejected = margin.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean(), margin.detach()


@kind("SimPO, averages and a margin", "SimPO", "scalar")
def _(sequences, tokens, mask):
    average = (_picked(sequences, tokens) * mask).sum(-1) / mask.sum(-1)
    return -F.logsigmoid(2.0 * (average[:1] - average[1:]) - 0.5).mean()


@kind("odds ratio", "ORPO", "scalar")
def _(sequences, tokens, mask):
    average = (_picked(sequences, tokens) * mask).sum(-1) / mask.sum(-1)
    odds = average - torch.log1p(-average.exp())
    return -F.logsigmoid(odds[:1] - odds[1:]).mean() - average[:1].mean()


@kind("two losses on chosen rows", "DPO with a supervised loss", "scalar")
def _(sequences, tokens, old_tokens):
    log_probs = _picked(sequences, tokens)
    margin = (log_probs - old_tokens).sum(-1)
    supervised = F.cross_entropy(sequences[:1].reshape(-1, sequences.shape[-1]), tokens[0])
    return -F.logsigmoid(0.1 * (margin[:1] - margin[1:])).mean() + supervised
