"""Several reductions of one head together, over equal and over different rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributions import Categorical

from tests.programs.row import BOTH, FORMULA, IN_BF16, REGION, Row

KIND = "several reductions of one head"

# fmt: off
ROWS = (
    Row("policy loss and entropy bonus",
        "policy = Categorical(logits=z, validate_args=False); "
        "(-policy.log_prob(labels) * advantages - 0.01 * policy.entropy()).mean()",
        of="A2C", ways=IN_BF16),
    Row("policy loss, entropy bonus, accuracy",
        "log_probs = z.log_softmax(-1)\n"
        "ratio = (log_probs.gather(-1, labels[:, None])[:, 0] - old).exp()\n"
        "entropy = -(log_probs.exp() * log_probs).sum(-1)\n"
        "loss = -(torch.min(ratio, ratio.clamp(0.8, 1.2)) * advantages + 0.01 * entropy).mean()\n"
        "with torch.no_grad():\n"
        "    accuracy = (z.argmax(-1) == labels).float().mean()\n"
        "(loss, accuracy)",
        of="RL trainers"),
    Row("log-probabilities and entropy",
        "y = z / temperature; log_probs = y.gather(-1, labels[:, None])[:, 0] - y.logsumexp(-1); "
        "(log_probs, y.logsumexp(-1) - (y.softmax(-1) * y).sum(-1))", REGION,
        of="verl's actor", ways=IN_BF16),
    Row("log-probabilities and entropy, bias and temperature",
        "log_probs = (F.linear(x, weight, bias) / temperature).log_softmax(-1); "
        "entropy = -(log_probs.exp() * log_probs).sum(-1); "
        "(log_probs.gather(-1, labels[:, None]).squeeze(-1), entropy)", BOTH,
        of="RL heads"),
    Row("log-probabilities, entropy logged",
        "log_probs = s.log_softmax(-1)\n"
        "picked = log_probs.gather(-1, tokens[..., None]).squeeze(-1)\n"
        "loss = -((picked - old_tokens).exp() * mask).sum() / mask.sum()\n"
        "with torch.no_grad():\n"
        "    entropy = -(log_probs.exp() * log_probs).sum(-1)\n"
        "(loss, (entropy * mask).sum() / mask.sum())", FORMULA,
        of="TRL's GRPO, restated"),
    Row("loss, z-loss, accuracy",
        "loss = F.cross_entropy(z, labels) + 0.01 * z.logsumexp(-1).square().mean()\n"
        "with torch.no_grad():\n"
        "    accuracy = (z.argmax(-1) == labels).float().mean()\n"
        "(loss, accuracy)",
        of="OLMo"),
    Row("loss, z-loss, entropy, max probability, top-5",
        "lse = z.logsumexp(-1)\n"
        "loss = (lse - z.gather(-1, labels[:, None])[:, 0]).mean() + 0.01 * lse.square().mean()\n"
        "with torch.no_grad():\n"
        "    p = z.softmax(-1)\n"
        "    entropy = torch.special.entr(p).sum(-1).mean()\n"
        "    top5 = (z.topk(5, -1).indices == labels[:, None]).any(-1).float().mean()\n"
        "(loss, lse.detach().mean(), entropy, p.amax(-1).mean(), top5)", REGION,
        of="pretraining logs"),
    Row("loss with accuracy and entropy",
        "loss = F.cross_entropy(z, labels)\n"
        "with torch.no_grad():\n"
        "    accuracy = (z.argmax(-1) == labels).float().mean()\n"
        "    log_probs = z.log_softmax(-1)\n"
        "    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()\n"
        "(loss, accuracy, entropy)",
        of="supervised trainers"),
    Row("logits capped, their mean logged before the loss",
        "z = 30 * torch.tanh(z / 30); mean = z.detach().mean(); "
        "(F.cross_entropy(z, labels), mean)", REGION,
        of="supervised trainers"),
    Row("binary loss of masked classes, then accuracy",
        "z = z.masked_fill(torch.arange(z.shape[-1]) % 7 == 3, -20.0); "
        "targets = F.one_hot(labels, z.shape[-1]).to(z.dtype); "
        "loss = F.binary_cross_entropy_with_logits(z, targets); "
        "(loss, (z.argmax(-1) == labels).float().mean())", REGION,
        of="multi-label trainers"),
    Row("smoothing, plain loss logged",
        "smoothed = F.cross_entropy(z, labels, label_smoothing=0.1); "
        "(smoothed, F.cross_entropy(z.detach(), labels).exp())",
        of="translation recipes"),
    Row("hard and soft targets",
        "soft = F.kl_div(z.log_softmax(-1), teacher.softmax(-1), reduction='batchmean'); "
        "0.5 * F.cross_entropy(z, labels) + 0.5 * soft", REGION,
        of="distillation"),
    Row("hard targets and soft targets at a temperature",
        "target = (teacher / 2).softmax(-1); "
        "soft = -(target * F.log_softmax(z / 2, -1)).sum(-1).mean(); "
        "F.cross_entropy(z, labels) + 4 * soft", REGION,
        of="Hinton et al. 2015"),
    Row("cross-entropy and expected value",
        "p = z.softmax(-1); mean = (p * atoms).sum(-1); "
        "spread = (p * (atoms - mean[:, None]).square()).sum(-1); "
        "F.cross_entropy(z, labels) + (mean - atoms[labels]).square().mean() + spread.mean()",
        REGION, of="mean-variance loss"),
    Row("focal loss and accuracy, evaluation",
        "ce = F.cross_entropy(z, labels, reduction='none'); "
        "loss = ((1 - (-ce).exp()) ** 2 * ce).mean(); (loss, z.argmax(-1).eq(labels).sum())",
        of="evaluation", trained=()),
    Row("perplexity, entropy, accuracy, evaluation",
        "log_probs = z.log_softmax(-1); loss = -log_probs.gather(-1, labels[:, None]).mean(); "
        "entropy = -(log_probs.exp() * log_probs).sum(-1).mean(); "
        "(loss.exp(), entropy, (log_probs.argmax(-1) == labels).float().mean())",
        of="evaluation", trained=()),
    Row("shifted loss, metrics of all rows",
        "logits = s[:, :-1].reshape(-1, s.shape[-1])\n"
        "loss = F.cross_entropy(logits, tokens[:, 1:].reshape(-1))\n"
        "with torch.no_grad():\n"
        "    entropy = Categorical(logits=s, validate_args=False).entropy()\n"
        "(loss, entropy.mean())",
        of="supervised trainers"),
    Row("supervised rows and preference rows",
        "log_probs = s[:, :-1].log_softmax(-1); "
        "picked = log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1) * mask[:, 1:]; "
        "average = picked.sum(-1) / mask[:, 1:].sum(-1); "
        "odds = average - torch.log1p(-average.exp()); "
        "nll = F.cross_entropy(s[:1].flatten(0, 1), tokens[:1].flatten()); "
        "(nll - F.logsigmoid(odds[:1] - odds[1:]).mean(), s[1:].detach().mean())", BOTH,
        of="ORPO, restated"),
    Row("two halves with different losses",
        "half = len(labels) // 2; hard = F.cross_entropy(z[:half], labels[:half]); "
        "hard - (soft[half:] * z[half:].log_softmax(-1)).sum(-1).mean()", REGION,
        of="multi-task heads"),
    Row("loss on the next and the token after it",
        "v = s.shape[-1]; "
        "one = F.cross_entropy(s[:, :-1].reshape(-1, v), tokens[:, 1:].reshape(-1)); "
        "two = F.cross_entropy(s[:, :-2].reshape(-1, v), tokens[:, 2:].reshape(-1)); "
        "one + 0.3 * two",
        of="multi-token prediction"),
    Row("loss of all rows, entropy of some",
        "y = z[::2]; entropy = y.logsumexp(-1) - (y.softmax(-1) * y).sum(-1); "
        "F.cross_entropy(z, labels) - 0.01 * entropy.mean()", REGION,
        of="exploration bonus"),
)
