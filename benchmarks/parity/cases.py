"""Training programs in which fxpass fuses no loss, one loss, or many losses.

In: sizes. Out: :class:`Program`: a function and its tensors. A step of a program is one call and
the backward of its first output::

    >>> program = PROGRAMS["plain"](Sizes(8, 4, 16))
    >>> [tuple(t.shape) for t in program(*program.tensors)]
    [()]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.loss.case import SEED


@dataclass(frozen=True)
class Sizes:
    """Rows, hidden size and classes of a head."""

    n: int
    d: int
    v: int

    def randn(self, *shape: int) -> Tensor:
        """A random tensor with the scale of a layer's weights."""
        return torch.randn(*shape) * self.d**-0.5


@dataclass(frozen=True)
class Program:
    """A function of ``tensors`` whose outputs are scalars: a loss, then metrics."""

    function: Callable[..., tuple[Tensor, ...]]
    tensors: tuple[Tensor, ...]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return self.function(*tensors)

    def step(self, function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        """Outputs and gradients of one step of ``function``, compiled or not."""
        for tensor in self.tensors:
            tensor.grad = None
        outputs = function(*self.tensors)
        outputs[0].backward()
        return [*(t.detach() for t in outputs), *self.gradients()]

    def gradients(self) -> list[Tensor]:
        """The gradients of the last step."""
        return [t.grad for t in self.tensors if t.grad is not None]


def _plain(sizes: Sizes) -> Program:
    def mlp(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
        for weight in weights:
            x = F.gelu(F.linear(x, weight)).sin()
        return (x.square().mean(),)

    torch.manual_seed(SEED)
    width = 2 * sizes.d
    weights = [(torch.randn(width, width) * width**-0.5).requires_grad_() for _ in range(6)]
    return Program(mlp, (torch.randn(4 * sizes.n, width), *weights))


def _head(function: Callable[..., tuple[Tensor, ...]], heads: int = 1) -> Callable[..., Program]:
    """A program of hidden states, labels, a trained head, and frozen heads."""

    def make(sizes: Sizes) -> Program:
        torch.manual_seed(SEED)
        hidden = torch.randn(sizes.n, sizes.d, requires_grad=True)
        labels = torch.randint(sizes.v, (sizes.n,))
        weights = [sizes.randn(sizes.v, sizes.d) for _ in range(heads)]
        return Program(function, (hidden, labels, weights[0].requires_grad_(), *weights[1:]))

    return make


def _cross_entropy(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    return (F.cross_entropy(F.linear(h, w), labels),)


def _merged(h: Tensor, labels: Tensor, up: Tensor, frozen: Tensor) -> tuple[Tensor, ...]:
    """A LoRA merged into a frozen head: the graph computes the weight."""
    weight = frozen + up[:, :4] @ up[:4]
    return (F.cross_entropy(F.linear(h, weight), labels),)


def _no_grad_block(h: Tensor, labels: Tensor, w: Tensor, frozen: Tensor) -> tuple[Tensor, ...]:
    """A preference loss: the policy's forward, the reference's without gradients, the loss."""
    logits = F.linear(h, w)
    with torch.no_grad():
        reference = -F.cross_entropy(F.linear(h, frozen), labels, reduction="none")
    ours = -F.cross_entropy(logits, labels, reduction="none")
    return (-F.logsigmoid(0.1 * (ours - reference)).mean(),)


def _teacher(h: Tensor, labels: Tensor, w: Tensor, frozen: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w)
    with torch.no_grad():
        teacher = F.linear(h, frozen)
    kl = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    return (F.cross_entropy(logits, labels) + 0.5 * kl,)


def _metrics(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w)
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().mean()
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return loss, accuracy, entropy


def _log_probs_and_entropy(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A policy gradient with an entropy bonus."""
    log_probs = F.linear(h, w).log_softmax(-1)
    picked = log_probs.gather(-1, labels[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    ratios = (picked - picked.detach()).exp()
    return (-(ratios * torch.linspace(-1, 2, len(labels))).mean() - 0.01 * entropy.mean(),)


def _log_probs_by_rows(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A loop over four sequences, as in TRL's ``selective_log_softmax``."""
    logits, index = F.linear(h, w).unflatten(0, (4, -1)), labels.view(4, -1)
    lse = torch.stack([torch.logsumexp(row, -1) for row in logits])
    picked = logits.gather(-1, index[..., None])[..., 0] - lse
    return (-(picked.flatten() * torch.linspace(-1, 2, len(labels))).mean(),)


def _masked(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """A vocabulary whose last classes are padding."""
    count = len(w) - len(w) // 16
    logits = F.linear(h, w).masked_fill(torch.arange(len(w)) >= count, -1e4)
    return (F.cross_entropy(logits, labels.clamp(max=count - 1)),)


def _margin(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """CosFace."""
    cosines = F.linear(F.normalize(h), F.normalize(w))
    margins = 0.35 * F.one_hot(labels, len(w))
    return (F.cross_entropy(16 * (cosines - margins), labels),)


def _binary(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(h, w)
    return (F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, len(w)).to(logits)),)


def _chunks(count: int) -> Callable[..., Program]:
    def loss(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        parts = zip(h.chunk(count), labels.chunk(count), strict=True)
        sums = [F.cross_entropy(F.linear(x, w), y, reduction="sum") for x, y in parts]
        return (torch.stack(sums).sum() / len(labels),)

    return _head(loss)


def _log_prob_chunks(count: int) -> Callable[..., Program]:
    def loss(h: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        picked = [
            F.linear(x, w).log_softmax(-1).gather(-1, y[:, None])[:, 0]
            for x, y in zip(h.chunk(count), labels.chunk(count), strict=True)
        ]
        ratios = (torch.cat(picked) - torch.cat(picked).detach()).exp()
        return (-(ratios * torch.linspace(-1, 2, len(labels))).mean(),)

    return _head(loss)


PROGRAMS: dict[str, Callable[[Sizes], Program]] = {
    "plain": _plain,
    "cross-entropy": _head(_cross_entropy),
    "merged LoRA": _head(_merged, 2),
    "no_grad block": _head(_no_grad_block, 2),
    "KL with a teacher": _head(_teacher, 2),
    "accuracy and entropy": _head(_metrics),
    "log-probabilities and entropy": _head(_log_probs_and_entropy),
    "log-probabilities, 4 sequences": _head(_log_probs_by_rows),
    "masked classes": _head(_masked),
    "margin at the target": _head(_margin),
    "binary cross-entropy": _head(_binary),
    **{f"cross-entropy, {n} chunks": _chunks(n) for n in (4, 16, 32)},
    **{f"log-probabilities, {n} chunks": _log_prob_chunks(n) for n in (4, 16, 32)},
}
