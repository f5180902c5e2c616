"""A model of two pipeline stages, one on each rank, whose last linear and loss are fused or not.

``torch.distributed.pipelining``: each rank has a ``PipelineStage``, a schedule takes a batch through
them in micro-batches. The micro-batches' losses and the gradients of both stages are those of one
process. Zero-bubble schedules go backward twice, for the gradient of the hidden states and later for
the weights'.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from tests.ranks.case import Case, Found, Rank, Values, as_in_one_process

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


def mean(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), **options)


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


@dataclass(frozen=True)
class Step:
    """A step of a pipeline.

    Attributes:
        ends: what the last stage returns: ``hidden``: head and loss are the schedule's ``loss_fn``;
            ``loss``: they are in the stage, which gets labels; ``logits``: between them is the
            border of the stage.
        per_token: whether the mean is over all tokens, and not over those of a micro-batch.
    """

    schedule: Any
    ends: str
    inner: str = "eager"
    per_token: bool = False

    def stages(self) -> tuple[First, Last]:
        torch.manual_seed(0)
        return First(), Last(self.ends)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Ids and labels [B, S]."""
        random = torch.Generator().manual_seed(1)
        ids, labels = torch.randint(V, (2, B, S), generator=random)
        if self.per_token:  # unlike numbers of them in the micro-batches
            labels[0] = labels[-1, 1:] = IGNORED
        return ids, labels

    def loss(self, last: nn.Module, labels: Tensor) -> Callable[..., Tensor]:
        """A schedule's: of what the last stage returns, and the labels of its micro-batch."""
        if self.ends == "loss":
            return lambda loss, part: loss
        if self.ends == "logits":
            return mean
        head: Any = getattr(last, "head", None)
        if not self.per_token:
            return lambda hidden, part: mean(head(hidden), part)
        tokens = (labels != IGNORED).sum()
        return lambda hidden, part: mean(head(hidden), part, reduction="sum") / tokens

    def step(self, here: Rank) -> Values:
        """This rank's gradients and, on the last, the micro-batches' losses."""
        module = here.compile(self.stages()[here.rank].to(here.device), method=True)
        ids, labels = here.move(self.batch())
        loss_of = self.loss(module, labels)
        loss_of = loss_of if self.ends == "loss" else here.compile(loss_of)
        stage: Any = PipelineStage(module, here.rank, 2, here.device)
        twice = self.schedule is ScheduleInterleavedZeroBubble
        schedule = self.schedule(
            [stage] if twice else stage,  # as many as a rank has
            PARTS,
            loss_fn=loss_of,
            scale_grads=not self.per_token,
        )
        losses: list[Tensor] = []
        # zero-bubble schedules retain the graph, which torch refuses for donated buffers
        with functorch_config.patch(donated_buffer=not twice):
            if here.rank == 0:
                schedule.step(ids)
            else:
                given: dict[str, Any] = {"labels": labels} if self.ends == "loss" else {}
                # a stage's losses cannot be put together again as what it returns
                out = self.ends != "loss"
                schedule.step(target=labels, losses=losses, return_outputs=out, **given)
        return values_of(losses, **{("first", "last")[here.rank]: module})

    def alone(self, dtype: torch.dtype) -> Values:
        """Without a pipeline."""
        first, last = (copy.deepcopy(module).to(dtype) for module in self.stages())
        ids, labels = self.batch()
        loss_of = self.loss(last, labels)
        losses = []
        for part, target in zip(ids.chunk(PARTS), labels.chunk(PARTS), strict=True):
            given = (target,) if self.ends == "loss" else ()
            losses.append(loss_of(last(first(part), *given), target))
        (sum(losses) / (1 if self.per_token else PARTS)).backward()  # type: ignore[union-attr]
        return values_of(losses, first=first, last=last)

    def case(self) -> Case:
        options = {"fusedce.inner": self.inner}
        return Case(step=self.step, alone=self.alone, options=options, check=self.check)

    def check(self, case: Case, each: list[Found]) -> None:
        """Of the last stage's graphs, the one with the loss is fused, if the head is in it."""
        (*none, tried), counted = (
            [rank.facts[name] for name in ("matched", "rejected", "graphs")] for rank in each
        )
        assert none == [0, 0]
        # torch 2.11 finds out a stage's shapes by a run without gradients, which is one more graph
        tried -= 1
        assert tried in (0, 1)
        matched, rejected, graphs = {"hidden": (1, 0, 2), "loss": (1, 0, 1), "logits": (0, 1, 2)}[
            self.ends
        ]
        assert counted == [matched + tried * (self.ends == "loss"), rejected, graphs + tried]
        as_in_one_process(case, each)


def values_of(losses: list[Tensor], **stages: nn.Module) -> Values:
    grads = {
        f"{stage}.{name}": p.grad
        for stage, module in stages.items()
        for name, p in module.named_parameters()
    }
    return {
        **{f"loss {i}": loss.detach() for i, loss in enumerate(losses)},
        **{name: grad for name, grad in grads.items() if grad is not None},
    }


ZERO_BUBBLES = {
    "zero bubble": Step(ScheduleInterleavedZeroBubble, "hidden", per_token=True),
    "zero bubble aot": Step(ScheduleInterleavedZeroBubble, "hidden", inner="aot_eager"),
}
STEPS = {
    "gpipe": Step(ScheduleGPipe, "hidden"),
    "1f1b": Step(Schedule1F1B, "hidden", inner="aot_eager"),
    **(ZERO_BUBBLES if functions_outlive_outputs() else {}),
    "tokens": Step(Schedule1F1B, "hidden", per_token=True),
    "gpipe labels": Step(ScheduleGPipe, "loss"),
    "1f1b labels": Step(Schedule1F1B, "loss"),
    "gpipe logits": Step(ScheduleGPipe, "logits"),
    "1f1b logits": Step(Schedule1F1B, "logits"),
}
CASES = {name: step.case() for name, step in STEPS.items()}
