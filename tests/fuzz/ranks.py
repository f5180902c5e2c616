"""Random programs whose classes are dealt to ranks, against the same programs on one.

In: the numbers of a campaign. Out: its tally, the same on each rank. Every rank draws, runs and judges
the same programs, whose heads are products of DTensors in the compiled run alone; they agree on what
has failed. ``python -m tests.fuzz --ranks`` starts them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.fuzz import campaign
from tests.fuzz.campaign import Drawn, Tally
from tests.programs.row import Function, Row


@functools.cache
def mesh() -> DeviceMesh:
    """All ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def spread(x: Tensor) -> Tensor:
    """A DTensor that each rank has whole."""
    return DTensor.from_local(x, mesh(), [Replicate()], run_check=False)


def dealt(w: Tensor) -> Tensor:
    """A DTensor of whose first dimension each rank has a part."""
    return spread(w).redistribute(placements=[Shard(0)])  # type: ignore[attr-defined]


def gathered(z: DTensor) -> Tensor:
    """The plain tensor of all ranks."""
    return z.redistribute(placements=[Replicate()]).to_local()


def _over_ranks(row: Row, compile: Callable[[Function], Function]) -> Function:
    names = {"spread": spread, "dealt": dealt, "gathered": gathered}
    return compile(replace(row, scope={**row.scope, **names}).program())


def judge(drawn: Drawn) -> tuple[str, str]:
    """What all ranks agree on: the first one's verdict that has failed, or else any."""
    way = replace(drawn.way, spell=_over_ranks)
    every: list[Any] = [None] * mesh().size()
    dist.all_gather_object(every, campaign.judge(replace(drawn, way=way)))
    return next((one for one in every if one[0] == "failed"), every[0])


def main(
    rank: int,
    world: int,
    device: torch.device,
    seed: Any,
    programs: Any,
    first: Any,
    reduce: Any,
    even: bool = True,
) -> Tally:
    """What a campaign found, the same on each rank. ``even``: with classes that divide by the ranks
    and sizes that never vary; other heads are left as they are."""
    del rank, device
    numbers: dict[str, Any] = {"first": int(first), "reduce": bool(int(reduce))}
    report = list[str]().append  # the tally has them too
    sizes = tuple(replace(some, v=-(-some.v // world) * world) for some in campaign.SIZES)
    with ExitStack() as stack:
        if even:
            stack.enter_context(mock.patch.object(campaign, "SIZES", sizes))
            stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False))
        return campaign.campaign(
            int(seed), int(programs), **numbers, ranks=True, judge=judge, report=report
        )
