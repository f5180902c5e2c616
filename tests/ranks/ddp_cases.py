"""What ranks train with DistributedDataParallel.

Seen in torch 2.13: ``torch.compile(DDP(model))`` and ``DDP(torch.compile(model))`` give the backend
the same graphs. With ``torch._dynamo.config.optimize_ddp`` (the default) each graph is cut where
one of DDP's buckets of gradients is full, so that communication starts before backward ends. The
cuts are found from the loss upward, and the head is the first that has a large weight: the cut is
before its linear, and head and loss are in one part. They are not where another large weight is
used in between, as by a second head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import parallel
from tests.ranks.parallel import Network, next_id_loss, seeded, sorted_next_id_loss

WIDTH, INNER = 256, 1024
CLASSES = 1100  # so that each large weight has more than the 1 MiB of the smallest buckets


class LargeHead(Network):
    """Ids [B, S] to loss and logits."""

    def __init__(self, blocks: int = 1, tied: bool = False) -> None:
        super().__init__(WIDTH, INNER, blocks)
        self.body.embed = nn.Embedding(CLASSES, WIDTH)
        self.lm_head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.lm_head.weight = nn.init.normal_(self.body.embed.weight, std=0.3)


class UnusedParameter(LargeHead):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(3))


class TwoHeads(LargeHead):
    """Both heads before both losses."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(input_ids)
        logits, others = self.lm_head(x), self.second(x)
        return next_id_loss(logits, labels) + next_id_loss(others, labels), logits


class ReadInTheNextPart(LargeHead):
    """A large weight is applied to the logits, after the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(CLASSES, WIDTH, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(self.body(input_ids))
        loss = next_id_loss(logits, labels)
        return loss + self.after(logits.tanh()).square().mean(), logits


class RowRegion(LargeHead):
    """Returns values of rows in the place of logits."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return sorted_next_id_loss(self.lm_head(self.body(input_ids)), labels)


@dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
        outside: compile what DDP returns, not what it is given.
        ddp: further arguments of DDP.
        split: ``optimize_ddp``.
        longer: by how much sequences grow at each step, which makes shapes dynamic.
        parts: of how many batches the gradients are summed.
    """

    name: str
    model: Callable[[], nn.Module] = LargeHead
    outside: bool = False
    ddp: dict[str, Any] = field(default_factory=dict)
    split: bool = True
    longer: int = 0
    parts: int = 1


CASES = [
    Case("outside", lambda: LargeHead(blocks=0), outside=True),
    Case("one graph", outside=True, split=False),
    Case("static", ddp={"static_graph": True}),
    Case("unused", UnusedParameter, ddp={"find_unused_parameters": True}),
    Case("tied and accumulated", lambda: LargeHead(tied=True), parts=2),
    Case("dynamic", longer=1),
    Case("two heads", TwoHeads),
    Case("next part", ReadInTheNextPart),
    Case("row region", RowRegion),
]


def main(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """What every case became, by name."""
    results: dict[str, Any] = {}
    for case in CASES:
        given = parallel.batches(range(rank, rank + 1), device, case.longer)
        everyone = parallel.batches(range(world), device, case.longer)
        alone = course(case, everyone, None, ddp=False)
        eager = course(case, given, None)
        settings = {"backend": "fusedce", "options": {"fusedce.inner": "aot_eager"}}
        results[case.name] = parallel.compare(course(case, given, settings), eager, alone)
    case = Case("switched off")
    given = parallel.batches(range(rank, rank + 1), device)
    options = {"fusedce.inner": "aot_eager", "fusedce.enabled": "0"}
    off = course(case, given, {"backend": "fusedce", "options": options})
    results["switched off"] = parallel.identical(off, course(case, given, {"backend": "aot_eager"}))
    return results


def course(
    case: Case, given: list[Tensor], settings: dict[str, Any] | None, ddp: bool = True
) -> parallel.Course:
    """Trains; the logits are read after the last step.

    Args:
        settings: what torch.compile is given; None for eager.
        ddp: else one process without DDP.
    """
    torch._dynamo.config.optimize_ddp = case.split
    device = given[0].device
    model = seeded(case.model).to(device)
    call: Any = model
    sync: parallel.Sync = lambda last: nullcontext()  # noqa: E731
    if settings and not case.outside:
        call = torch.compile(call, **settings)
    if ddp:
        ids = [device.index] if device.type == "cuda" else None
        call = wrapped = DistributedDataParallel(call, device_ids=ids, bucket_cap_mb=1, **case.ddp)
        sync = lambda last: nullcontext() if last else wrapped.no_sync()  # noqa: E731
    if settings and case.outside:
        call = torch.compile(call, **settings)
    parameters = dict(model.named_parameters())
    return parallel.train(call, parameters, given, parts=case.parts, sync=sync, late=True)
