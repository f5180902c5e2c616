"""The measured programs: losses of a linear's logits, their means over rows.

In: operands by their names (:data:`benchmarks.loss.case.SHAPES`). Out: a loss, or a loss and
metrics::

    >>> program = PROGRAMS["jsd"]
    >>> program.names
    ('x', 'w', 'teacher_x', 'teacher_w')
    >>> case = Case("eager", 8, 4, 16, "float32", "cpu", program="jsd")
    >>> program.loss(*case.operands(program.names).values()).shape
    torch.Size([])

What a row contributes depends on its operands, and on its place modulo ``CHECKED_ROWS``: where rows
repeat, a few of them have the loss of all.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.loss.case import CHECKED_ROWS, CROSS_ENTROPY, Case

Function = Callable[..., Any]


def plain(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """The program: x ``[N, D]``, w ``[V, D]``, labels int64 ``[N]``; mean loss in f32."""
    return F.cross_entropy(_float(F.linear(x, w)), labels)


def _float(logits: Tensor) -> Tensor:
    """``logits.float()``, but for the exact results, which stay in float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


def capped(softcap: float) -> Function:
    """:func:`plain`, or the same with a cap on the logits, spelled as in transformers' Gemma 2."""
    if not softcap:
        return plain

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, w)
        logits = logits / softcap
        logits = torch.tanh(logits)
        logits = logits * softcap
        return F.cross_entropy(_float(logits), labels)

    return loss


# ---------------------------------------------------------------- losses without a formula


def _jsd_rows(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
    """As TRL's ``generalized_jsd_loss``: ``[N]``."""
    student = F.linear(x, w).log_softmax(-1)
    teacher = F.linear(teacher_x, teacher_w).log_softmax(-1)
    half = math.log(0.5)
    mixed = torch.logsumexp(torch.stack([student + half, teacher + half]), dim=0)
    of_teacher = F.kl_div(mixed, teacher, reduction="none", log_target=True)
    of_student = F.kl_div(mixed, student, reduction="none", log_target=True)
    return (0.5 * of_teacher + 0.5 * of_student).sum(-1)


def jsd(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
    return _jsd_rows(x, w, teacher_x, teacher_w).mean()


def jsd_squared(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor) -> Tensor:
    """Backward has to compute the logits again: the rows' gradients are not known before."""
    return _jsd_rows(x, w, teacher_x, teacher_w).square().mean()


def kl(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, labels: Tensor) -> Tensor:
    """The divergence is at a temperature of 2."""
    z, teacher = F.linear(x, w), F.linear(teacher_x, teacher_w)
    soft = F.kl_div((z / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="none").sum(-1)
    return (0.5 * F.cross_entropy(z, labels, reduction="none") + 2 * soft).mean()


def lora(x: Tensor, frozen: Tensor, down: Tensor, up: Tensor, labels: Tensor) -> Tensor:
    z = F.linear(x, frozen) + 2.0 * F.linear(F.linear(x, down), up)
    return F.cross_entropy(z, labels)


def top_p(x: Tensor, w: Tensor) -> Tensor:
    """Of the classes that have 0.9 of the probability together."""
    ordered = F.linear(x, w).sort(-1, descending=True).values
    p = ordered.softmax(-1)
    kept = p.cumsum(-1) - p < 0.9
    log_probs = ordered.masked_fill(~kept, -1e4).log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1).mean()


def columns(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """Both directions of a contrastive loss, but for the entries of columns: rows repeat."""
    z = F.linear(x, w)
    return F.cross_entropy(z, labels) + z.logsumexp(0).mean() - math.log(len(x))


# ---------------------------------------------------------------- few fused losses, or many


def _mlp(x: Tensor, mlp: Tensor) -> Tensor:
    """No loss of logits at all."""
    x = x.repeat(4, 2)
    for _ in range(6):
        x = F.gelu(F.linear(x, mlp)).sin()
    return x.square().mean()


def _merged(x: Tensor, w: Tensor, frozen: Tensor, labels: Tensor) -> Tensor:
    """The graph computes the weight."""
    weight = frozen + w[:, :4] @ w[:4]
    return F.cross_entropy(F.linear(x, weight), labels)


def _no_grad_block(x: Tensor, w: Tensor, frozen: Tensor, labels: Tensor) -> Tensor:
    """A preference loss: the policy's forward, the reference's without gradients, the loss."""
    logits = F.linear(x, w)
    with torch.no_grad():
        reference = -F.cross_entropy(F.linear(x, frozen), labels, reduction="none")
    ours = -F.cross_entropy(logits, labels, reduction="none")
    return -F.logsigmoid(0.1 * (ours - reference)).mean()


def _teacher(x: Tensor, w: Tensor, frozen: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, w)
    with torch.no_grad():
        teacher = F.linear(x, frozen)
    kl = F.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")
    return F.cross_entropy(logits, labels) + 0.5 * kl


def _metrics(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    logits = F.linear(x, w)
    loss = F.cross_entropy(logits, labels)
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().mean()
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    return loss, accuracy, entropy


def _gain(picked: Tensor) -> Tensor:
    """A policy gradient's loss, of the log-probabilities of rows ``[N]``."""
    rows = torch.arange(len(picked), device=picked.device) % CHECKED_ROWS
    return -((picked - picked.detach()).exp() * (rows / 64 - 0.5)).mean()


def _log_probs_and_entropy(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """A policy gradient with an entropy bonus."""
    log_probs = F.linear(x, w).log_softmax(-1)
    picked = log_probs.gather(-1, labels[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return _gain(picked) - 0.01 * entropy.mean()


def _log_probs_by_rows(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """A loop over four sequences, as in TRL's ``selective_log_softmax``."""
    logits, index = F.linear(x, w).unflatten(0, (4, -1)), labels.view(4, -1)
    lse = torch.stack([torch.logsumexp(row, -1) for row in logits])
    return _gain((logits.gather(-1, index[..., None])[..., 0] - lse).flatten())


def _masked(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """A vocabulary whose last classes are padding."""
    count = len(w) - len(w) // 16
    logits = F.linear(x, w).masked_fill(torch.arange(len(w), device=w.device) >= count, -1e4)
    return F.cross_entropy(logits, labels.clamp(max=count - 1))


def _margin(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """CosFace."""
    cosines = F.linear(F.normalize(x), F.normalize(w))
    margins = 0.35 * F.one_hot(labels, len(w))
    return F.cross_entropy(16 * (cosines - margins), labels)


def _binary(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, w)
    return F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, len(w)).to(logits))


def _chunks(count: int) -> Function:
    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        parts = zip(x.chunk(count), labels.chunk(count), strict=True)
        sums = [F.cross_entropy(F.linear(rows, w), y, reduction="sum") for rows, y in parts]
        return torch.stack(sums).sum() / len(labels)

    return loss


def _log_prob_chunks(count: int) -> Function:
    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        picked = [
            F.linear(rows, w).log_softmax(-1).gather(-1, y[:, None])[:, 0]
            for rows, y in zip(x.chunk(count), labels.chunk(count), strict=True)
        ]
        return _gain(torch.cat(picked))

    return loss


# ---------------------------------------------------------------- the tables


class Program(NamedTuple):
    """A loss; the operands are the parameters of its function.

    Attributes:
        title: of its table.
        trained: the operands that get a gradient.
    """

    title: str
    loss: Function
    trained: tuple[str, ...] = ("x", "w")

    @property
    def names(self) -> tuple[str, ...]:
        """The operands."""
        return tuple(inspect.signature(self.loss).parameters)


REGIONS = {
    "jsd": Program("Jensen-Shannon of two heads", jsd),
    "jsd_squared": Program("Jensen-Shannon of two heads, squared", jsd_squared),
    "kl": Program("KL plus cross-entropy", kl),
    "lora": Program("low-rank adapter", lora, ("x", "down", "up")),
    "top_p": Program("entropy of the top-p classes", top_p),
    "columns": Program("softmaxes of rows and of columns", columns),
}
_LOSSES: dict[str, Function] = {
    CROSS_ENTROPY: plain,
    "merged LoRA": _merged,
    "no_grad block": _no_grad_block,
    "KL with a teacher": _teacher,
    "accuracy and entropy": _metrics,
    "log-probabilities and entropy": _log_probs_and_entropy,
    "log-probabilities, 4 sequences": _log_probs_by_rows,
    "masked classes": _masked,
    "margin at the target": _margin,
    "binary cross-entropy": _binary,
    **{f"cross-entropy, {n} chunks": _chunks(n) for n in (4, 16, 32)},
    **{f"log-probabilities, {n} chunks": _log_prob_chunks(n) for n in (4, 16, 32)},
}
PARITY = {
    "plain": Program("plain", _mlp, ("x", "mlp")),
    **{name: Program(name, loss) for name, loss in _LOSSES.items()},
}
PROGRAMS = {**REGIONS, **PARITY}


def function_of(case: Case, stack: nn.Module) -> Function:
    """The program of a case behind its layers, as its user writes it, of its operands."""
    loss = capped(case.softcap) if case.softcap else PROGRAMS[case.program].loss

    def behind(x: Tensor, *others: Tensor) -> Any:
        return loss(stack(x), *others)

    return behind if case.layers else loss
