"""Metrics of the logits: beside a loss, under ``no_grad``, or alone in evaluation.

Out: ``KINDS``, the programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.programs.program import BF16, F32, Kind

kind = Kind("metrics")
KINDS = (kind,)

# ---------------------------------------------------------------- every metric in three places


def _target_rank(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits > logits.gather(-1, labels[:, None])).sum(-1)


def _target_is_largest(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels[:, None])[:, 0] >= logits.amax(-1)


METRICS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "argmax": lambda logits, labels: logits.argmax(-1),
    "argmax == labels": lambda logits, labels: (logits.argmax(dim=-1) == labels).float().mean(),
    "max, values and indices": lambda logits, labels: logits.max(-1),
    "amax": lambda logits, labels: logits.amax(dim=-1),
    "topk": lambda logits, labels: torch.topk(logits, 5, dim=-1),
    "mean logit": lambda logits, labels: logits.mean(-1),
    "max probability": lambda logits, labels: logits.softmax(-1).max(-1).values,
    "rank of the target": _target_rank,
    "target >= max": _target_is_largest,
}


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _under_no_grad(metric: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def program(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        loss = F.cross_entropy(logits, labels)
        with torch.no_grad():
            return loss, *_tuple(metric(logits, labels))

    return program


def _detached(metric: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def program(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        made = _tuple(metric(logits.detach(), labels))
        return F.cross_entropy(logits, labels), *made

    return program


def _alone(metric: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    def program(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        return _tuple(metric(logits, labels))

    return program


for _name, _metric in METRICS.items():
    kind(f"{_name}, no_grad beside a loss", "trainers", "scalar, metric")(_under_no_grad(_metric))
    kind(f"{_name}, detached before a loss", "trainers", "scalar, metric")(_detached(_metric))
    kind(f"{_name}, evaluation", "evaluation", "metric", gradients=())(_alone(_metric))

# ---------------------------------------------------------------- other spellings


@kind("argmax beside a loss, no detach", "tutorials", "scalar, scalar", dtypes=(F32, BF16))
def _(logits, labels):
    accuracy = (torch.argmax(input=logits, dim=1) == labels).sum() / len(labels)
    return F.cross_entropy(logits, labels), accuracy


@kind("argmax(keepdim) == labels[:, None]", "tutorials", "scalar, scalar")
def _(logits, labels):
    with torch.no_grad():
        hits = torch.eq(torch.argmax(logits, 1, True), labels.unsqueeze(1))
    return F.cross_entropy(logits, labels), hits.sum()


@kind("max().indices of the last dimension", "tutorials", "scalar, [N]")
def _(sequences, tokens):
    with torch.no_grad():
        predicted = torch.max(input=sequences, dim=2).indices
    loss = F.cross_entropy(sequences.view(-1, sequences.size(-1)), tokens.view(-1))
    return loss, (predicted == tokens).flatten()


@kind("rank by >=, reciprocal, evaluation", "retrieval", "scalar", gradients=())
def _(logits, labels):
    target = torch.gather(input=logits, dim=1, index=labels.view(-1, 1))
    return (logits >= target).sum(dim=1).float().reciprocal().mean()


@kind("logits[arange, argmax], evaluation", "greedy decoding", "[N]", gradients=())
def _(logits):
    best = logits.argmax(1, keepdim=True)
    return logits.gather(1, best).squeeze(1) - logits.logsumexp(1)


@kind("max(1)[1] as the prediction", "torch's examples", "scalar, scalar")
def _(logits, labels):
    _, predicted = torch.max(logits.data, 1)
    return F.cross_entropy(logits, labels), predicted.eq(labels).sum()


@kind("token accuracy of shifted logits", "TRL's supervised trainer", "scalar, scalar")
def _(sequences, ignored_tokens):
    logits, labels = sequences[:, :-1], ignored_tokens[:, 1:]
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
    with torch.no_grad():
        counted = labels != -100
        hits = (logits.argmax(-1) == labels) & counted
    return loss, hits.sum() / counted.sum()


@kind("top-1 and top-5 accuracy", "timm's accuracy, restated", "scalar, scalar, scalar")
def _(logits, labels):
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        _, predicted = logits.topk(5, 1, True, True)
        hits = predicted.t().eq(labels.reshape(1, -1).expand(5, -1))
        top1, top5 = (hits[:k].reshape(-1).float().sum(0) / len(labels) for k in (1, 5))
    return loss, top1, top5


@kind("target among the top k, evaluation", "torchmetrics, restated", "scalar", gradients=())
def _(logits, labels):
    top = torch.topk(logits, k=3, dim=1).indices
    return torch.any(top == labels.unsqueeze(1), dim=1).float().mean()


@kind("largest minus second, evaluation", "margin sampling", "[N]", gradients=())
def _(logits):
    top = logits.softmax(-1).topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]


@kind("argmax of log_softmax, evaluation", "greedy decoding", "[N], [N]", gradients=())
def _(logits):
    log_probs = logits.log_softmax(-1)
    return torch.argmax(log_probs, dim=-1), log_probs.max(-1).values


@kind("argmax of softmax, evaluation", "tutorials", "[N]", gradients=(), dtypes=(F32, BF16))
def _(logits):
    return logits.softmax(dim=1).argmax(dim=1)


@kind("loss and accuracy, evaluation", "evaluation", "scalar, scalar", gradients=())
def _(logits, labels):
    accuracy = (logits.argmax(-1) == labels).float().mean()
    return F.cross_entropy(logits, labels), accuracy


@kind("mean, largest and smallest logit, no_grad", "logging", "scalar, 3 scalars")
def _(logits, labels):
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        return loss, logits.mean(), logits.max(), logits.min()


@kind("standard deviation of logits, no_grad", "logging", "scalar, scalar")
def _(logits, labels):
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        return loss, logits.std(-1).mean()


@kind("a penalty on the largest logit", "recipes", "scalar")
def _(logits, labels):
    return F.cross_entropy(logits, labels) + 1e-2 * logits.amax(-1).square().mean()


@kind("hinge to the largest other logit", "Carlini and Wagner 2017", "scalar")
def _(logits, labels):
    target = logits.gather(-1, labels[:, None])[:, 0]
    other = logits.scatter(-1, labels[:, None], float("-inf")).amax(-1)
    return (other - target + 1).clamp(min=0).mean()


@kind("expected calibration of the top class", "calibration", "scalar, scalar")
def _(logits, labels):
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        confidence, predicted = logits.softmax(-1).max(-1)
        gap = confidence.mean() - predicted.eq(labels).float().mean()
    return loss, gap.abs()
