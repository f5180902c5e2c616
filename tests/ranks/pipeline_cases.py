"""A model of two pipeline stages, one on each rank, whose last linear and loss are fused or not.

``torch.distributed.pipelining``: each rank has a ``PipelineStage``, a schedule takes a batch through
them in micro-batches. Where head and loss are, ``CASES`` says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

B, S, D, V = 8, 5, 16, 50
PARTS = 4  # micro-batches
IGNORED = -100


class First(nn.Module):
    """Ids [B, S] to hidden states [B, S, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.body = nn.Linear(D, D)

    def forward(self, ids: Tensor) -> Tensor:
        return self.body(self.embed(ids)).tanh()


class Last(nn.Module):
    """Hidden states to what ``ends`` says: hidden states, logits, or with labels the loss."""

    def __init__(self, ends: str) -> None:
        super().__init__()
        self.ends = ends
        self.body = nn.Linear(D, D)
        self.head = nn.Linear(D, V, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        hidden = self.body(hidden).tanh()
        if self.ends == "hidden":
            return hidden
        logits = self.head(hidden)
        return logits if labels is None else mean(logits, labels)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


@dataclass(frozen=True)
class Case:
    """A step of a pipeline.

    Attributes:
        ends: what the last stage returns: ``hidden``: head and loss are the schedule's ``loss_fn``;
            ``loss``: they are in the stage, which gets labels; ``logits``: between them is the
            border of the stage.
        per_token: whether the mean is over all tokens, and not over those of a micro-batch.
    """

    name: str
    schedule: Any
    ends: str
    inner: str = "eager"
    per_token: bool = False


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * grad


def functions_outlive_outputs() -> bool:
    """Whether backward can start at an ``autograd.Function`` whose output was detached, as schedules
    with a zero bubble do. In torch 2.11 it cannot: they are not for what AOTAutograd compiles."""
    out: Any = _Doubled.apply(torch.ones(1, requires_grad=True))
    node = out.grad_fn
    out.detach_()
    try:
        return bool(node._input_metadata)
    except RuntimeError:
        return False


ZERO_BUBBLES = [
    Case("zero bubble", ScheduleInterleavedZeroBubble, "hidden", per_token=True),
    Case("zero bubble aot", ScheduleInterleavedZeroBubble, "hidden", inner="aot_eager"),
]
CASES = [
    Case("gpipe", ScheduleGPipe, "hidden"),
    Case("1f1b", Schedule1F1B, "hidden", inner="aot_eager"),
    *(ZERO_BUBBLES if functions_outlive_outputs() else []),
    Case("tokens", Schedule1F1B, "hidden", per_token=True),
    Case("gpipe labels", ScheduleGPipe, "loss"),
    Case("1f1b labels", Schedule1F1B, "loss"),
    Case("gpipe logits", ScheduleGPipe, "logits"),
    Case("1f1b logits", Schedule1F1B, "logits"),
]


def stages(case: Case) -> tuple[First, Last]:
    torch.manual_seed(0)
    return First(), Last(case.ends)


def batch(case: Case) -> tuple[Tensor, Tensor]:
    """Ids and labels [B, S]."""
    random = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(V, (2, B, S), generator=random)
    if case.per_token:  # unlike numbers of them in the micro-batches
        labels[0] = labels[-1, 1:] = IGNORED
    return ids, labels


# ---------------------------------------------------------------- what a rank does


def main(rank: int, world: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """By case: ``fused``: this rank's gradients and, on the last, the micro-batches' losses."""
    found = {}
    for case in CASES:
        # zero-bubble schedules retain the graph, which torch refuses for donated buffers
        with functorch_config.patch(donated_buffer=case not in ZERO_BUBBLES):
            found[case.name] = run(case, rank, device)
    return found


def run(case: Case, rank: int, device: torch.device) -> dict[str, Any]:
    torch._dynamo.reset()
    counters.clear()
    options: dict[str, Any] = {"fusedce.inner": case.inner}
    module = stages(case)[rank].to(device)
    ids, labels = (t.to(device) for t in batch(case))
    module.compile(backend="fusedce", options=options)
    loss_of: Callable[..., Tensor] = loss_function(case, module, labels)
    if case.ends != "loss":
        loss_of = torch.compile(loss_of, backend="fusedce", options=options)
    stage: Any = PipelineStage(module, rank, 2, device)
    if case.schedule is ScheduleInterleavedZeroBubble:
        stage = [stage]  # as many as a rank has
    schedule = case.schedule(stage, PARTS, loss_fn=loss_of, scale_grads=not case.per_token)
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(ids)
    else:
        given: dict[str, Any] = {"labels": labels} if case.ends == "loss" else {}
        # a stage's losses cannot be put together again as what it returns
        schedule.step(target=labels, losses=losses, return_outputs=case.ends != "loss", **given)
    return {
        "losses": [loss.detach().cpu() for loss in losses],
        "gradients": {n: p.grad.cpu() for n, p in module.named_parameters() if p.grad is not None},
        **{name: counters["fusedce"][name] for name in ("matched", "rejected")},
        "graphs": counters["stats"]["unique_graphs"],
    }


def loss_function(case: Case, last: nn.Module, labels: Tensor) -> Callable[..., Tensor]:
    """A schedule's: of what the last stage returns, and the labels of its micro-batch."""
    if case.ends == "loss":
        return lambda loss, part: loss
    if case.ends == "logits":
        return mean
    head: Any = getattr(last, "head", None)
    if not case.per_token:
        return lambda hidden, part: mean(head(hidden), part)
    tokens = (labels != IGNORED).sum()

    def share(hidden: Tensor, part: Tensor) -> Tensor:
        logits = head(hidden)
        return F.cross_entropy(logits.view(-1, V), part.view(-1), reduction="sum") / tokens

    return share


def alone(case: Case, double: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The micro-batches' losses and all gradients, without a pipeline."""
    first, last = (copy.deepcopy(m).double() if double else m for m in stages(case))
    ids, labels = batch(case)
    loss_of = loss_function(case, last, labels)
    losses = []
    for part, target in zip(ids.chunk(PARTS), labels.chunk(PARTS), strict=True):
        given = (target,) if case.ends == "loss" else ()
        losses.append(loss_of(last(first(part), *given), target))
    (sum(losses) / (1 if case.per_token else PARTS)).backward()  # type: ignore[union-attr]
    named = [*first.named_parameters("first"), *last.named_parameters("last")]
    return [loss.detach() for loss in losses], {n: p.grad for n, p in named if p.grad is not None}
