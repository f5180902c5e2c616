"""Losses over per-token log-probabilities: policies and preferences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.row import IN_BF16, Row

KIND = "losses of log-probabilities"


def _picked(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


# fmt: off
ROWS = (
    Row("REINFORCE", "-(_picked(z, labels) * advantages).mean()", of="Williams 1992", ways=IN_BF16),
    Row("PPO, clipped",
        "ratio = torch.exp(_picked(z, labels) - old); clipped = ratio.clamp(0.8, 1.2); "
        "torch.max(-advantages * ratio, -advantages * clipped).mean()",
        of="verl"),
    Row("GRPO, with a k3 estimate",
        "log_probs = _picked(s, tokens); "
        "k3 = (old_tokens - log_probs).exp() - (old_tokens - log_probs) - 1; "
        "loss = -(log_probs - log_probs.detach()).exp() + 0.04 * k3; "
        "((loss * mask).sum(-1) / mask.sum(-1)).mean()",
        of="TRL", ways=IN_BF16),
    Row("log-probabilities used twice",
        "log_probs = _picked(z, labels); ratio = (log_probs - old).exp(); "
        "(-ratio.mean(), log_probs)",
        of="GRPO recipes"),
    Row("log_softmax used twice",
        "log_probs = F.log_softmax(z, dim=-1); "
        "(log_probs.gather(-1, labels[:, None])[:, 0], log_probs.gather(-1, candidates))",
        of="RL scripts"),
    Row("GSPO, a ratio for each sequence",
        "log_ratio = (_picked(s, tokens) - old_tokens) * mask; "
        "ratio = (log_ratio.sum(-1) / mask.sum(-1).clamp(min=1)).exp(); "
        "-torch.min(ratio, ratio.clamp(0.9, 1.1)).mean()",
        of="Qwen's GSPO"),
    Row("DPO, chosen and rejected in one batch",
        "margin = ((_picked(s, tokens) - old_tokens) * mask).sum(-1); "
        "chosen, rejected = margin.chunk(2); "
        "(-F.logsigmoid(0.1 * (chosen - rejected)).mean(), margin.detach())",
        of="TRL"),
    Row("SimPO, averages and a margin",
        "average = (_picked(s, tokens) * mask).sum(-1) / mask.sum(-1); "
        "-F.logsigmoid(2.0 * (average[:1] - average[1:]) - 0.5).mean()",
        of="SimPO"),
    Row("odds ratio",
        "average = (_picked(s, tokens) * mask).sum(-1) / mask.sum(-1); "
        "odds = average - torch.log1p(-average.exp()); "
        "-F.logsigmoid(odds[:1] - odds[1:]).mean() - average[:1].mean()",
        of="ORPO"),
    Row("two losses on chosen rows",
        "log_probs = _picked(s, tokens); margin = (log_probs - old_tokens).sum(-1); "
        "supervised = F.cross_entropy(s[:1].reshape(-1, s.shape[-1]), tokens[0]); "
        "-F.logsigmoid(0.1 * (margin[:1] - margin[1:])).mean() + supervised",
        of="DPO with a supervised loss"),
)
