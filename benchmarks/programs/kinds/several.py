"""Several reductions of one head together, over equal and over different rows.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributions import Categorical

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("several reductions of one head")
KINDS = (kind,)

# ---------------------------------------------------------------- equal rows


@kind("policy loss and entropy bonus", "A2C", "scalar", dtypes=(F32, BF16))
def _(logits, labels, advantages):
    policy = Categorical(logits=logits, validate_args=False)
    return (-policy.log_prob(labels) * advantages - 0.01 * policy.entropy()).mean()


@kind("policy loss, entropy bonus, accuracy", "RL trainers", "scalar, scalar")
def _(logits, labels, old, advantages):
    log_probs = logits.log_softmax(-1)
    ratio = (log_probs.gather(-1, labels[:, None])[:, 0] - old).exp()
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    loss = -(torch.min(ratio, ratio.clamp(0.8, 1.2)) * advantages + 0.01 * entropy).mean()
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().mean()
    return loss, accuracy


@kind("log-probabilities and entropy", "verl's actor", "[N], [N]", dtypes=(F32, BF16))
def _(logits, labels, temperature):
    z = logits / temperature
    log_probs = z.gather(-1, labels[:, None])[:, 0] - z.logsumexp(-1)
    return log_probs, z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)


@kind("log-probabilities and entropy, bias and temperature", "RL heads", "[N], [N]")
def _(x, weight, bias, labels, temperature):
    log_probs = (F.linear(x, weight, bias) / temperature).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, labels[:, None]).squeeze(-1), entropy


@kind("log-probabilities, entropy logged", "TRL's GRPO, restated", "scalar, scalar")
def _(sequences, tokens, old_tokens, mask):
    log_probs = sequences.log_softmax(-1)
    picked = log_probs.gather(-1, tokens[..., None]).squeeze(-1)
    loss = -((picked - old_tokens).exp() * mask).sum() / mask.sum()
    with torch.no_grad():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return loss, (entropy * mask).sum() / mask.sum()


@kind("loss, z-loss, accuracy", "OLMo", "scalar, scalar")
def _(logits, labels):
    loss = F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().mean()
    return loss, accuracy


@kind("loss, z-loss, entropy, max probability, top-5", "pretraining logs", "scalar, 4 metrics")
def _(logits, labels):
    lse = logits.logsumexp(-1)
    loss = (lse - logits.gather(-1, labels[:, None])[:, 0]).mean() + 1e-2 * lse.square().mean()
    with torch.no_grad():
        p = logits.softmax(-1)
        entropy = torch.special.entr(p).sum(-1).mean()
        top5 = (logits.topk(5, -1).indices == labels[:, None]).any(-1).float().mean()
    return loss, lse.detach().mean(), entropy, p.amax(-1).mean(), top5


@kind("loss with accuracy and entropy", "supervised trainers", "scalar, scalar, scalar")
def _(logits, labels):
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().mean()
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return loss, accuracy, entropy


@kind("logits capped, their mean logged before the loss", "supervised trainers", "scalar, scalar")
def _(logits, labels):
    logits = 30 * torch.tanh(logits / 30)
    mean = logits.detach().mean()
    return F.cross_entropy(logits, labels), mean


@kind("binary loss of masked classes, then accuracy", "multi-label trainers", "scalar, scalar")
def _(logits, labels):
    logits = logits.masked_fill(torch.arange(logits.shape[-1]) % 7 == 3, -20.0)
    targets = F.one_hot(labels, logits.shape[-1]).to(logits.dtype)
    loss = F.binary_cross_entropy_with_logits(logits, targets)
    return loss, (logits.argmax(-1) == labels).float().mean()


@kind("smoothing, plain loss logged", "translation recipes", "scalar, scalar")
def _(logits, labels):
    smoothed = F.cross_entropy(logits, labels, label_smoothing=0.1)
    return smoothed, F.cross_entropy(logits.detach(), labels).exp()


@kind("hard and soft targets", "distillation", "scalar")
def _(logits, labels, teacher):
    soft = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    return 0.5 * F.cross_entropy(logits, labels) + 0.5 * soft


@kind("hard targets and soft targets at a temperature", "Hinton et al. 2015", "scalar")
def _(logits, labels, teacher):
    target = (teacher / 2).softmax(-1)
    soft = -(target * F.log_softmax(logits / 2, -1)).sum(-1).mean()
    return F.cross_entropy(logits, labels) + 4 * soft


@kind("cross-entropy and expected value", "mean-variance loss", "scalar")
def _(logits, labels, atoms):
    p = logits.softmax(-1)
    mean = (p * atoms).sum(-1)
    spread = (p * (atoms - mean[:, None]).square()).sum(-1)
    return F.cross_entropy(logits, labels) + (mean - atoms[labels]).square().mean() + spread.mean()


@kind("focal loss and accuracy, evaluation", "evaluation", "scalar, scalar", gradients=())
def _(logits, labels):
    ce = F.cross_entropy(logits, labels, reduction="none")
    loss = ((1 - (-ce).exp()) ** 2 * ce).mean()
    return loss, logits.argmax(-1).eq(labels).sum()


@kind("perplexity, entropy, accuracy, evaluation", "evaluation", "3 scalars", gradients=())
def _(logits, labels):
    log_probs = logits.log_softmax(-1)
    loss = -log_probs.gather(-1, labels[:, None]).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return loss.exp(), entropy, (log_probs.argmax(-1) == labels).float().mean()


# ---------------------------------------------------------------- different rows


@kind("shifted loss, metrics of all rows", "supervised trainers", "scalar, scalar")
def _(sequences, tokens):
    logits = sequences[:, :-1].reshape(-1, sequences.shape[-1])
    loss = F.cross_entropy(logits, tokens[:, 1:].reshape(-1))
    with torch.no_grad():
        entropy = Categorical(logits=sequences, validate_args=False).entropy()
    return loss, entropy.mean()


@kind("supervised rows and preference rows", "ORPO, restated", "scalar, scalar")
def _(sequences, tokens, mask):
    log_probs = sequences[:, :-1].log_softmax(-1)
    picked = log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1) * mask[:, 1:]
    average = picked.sum(-1) / mask[:, 1:].sum(-1)
    odds = average - torch.log1p(-average.exp())
    nll = F.cross_entropy(sequences[:1].flatten(0, 1), tokens[:1].flatten())
    return nll - F.logsigmoid(odds[:1] - odds[1:]).mean(), sequences[1:].detach().mean()


@kind("two halves with different losses", "multi-task heads", "scalar")
def _(logits, labels, soft):
    half = len(labels) // 2
    hard = F.cross_entropy(logits[:half], labels[:half])
    return hard - (soft[half:] * logits[half:].log_softmax(-1)).sum(-1).mean()


@kind("loss on the next and the token after it", "multi-token prediction", "scalar")
def _(sequences, tokens):
    v = sequences.shape[-1]
    one = F.cross_entropy(sequences[:, :-1].reshape(-1, v), tokens[:, 1:].reshape(-1))
    two = F.cross_entropy(sequences[:, :-2].reshape(-1, v), tokens[:, 2:].reshape(-1))
    return one + 0.3 * two


@kind("loss of all rows, entropy of some", "exploration bonus", "scalar")
def _(logits, labels):
    z = logits[::2]
    entropy = z.logsumexp(-1) - (z.softmax(-1) * z).sum(-1)
    return F.cross_entropy(logits, labels) - 0.01 * entropy.mean()
