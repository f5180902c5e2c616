"""Worlds of ranks: what a rank that fails leaves behind, and that calls do not see each other."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from tests.support.ranks import World


def main(rank: int, world: int, device: torch.device, what: str) -> Any:
    """A call of a world: this module's, since it is a test that gives it."""
    if what == "raises" and rank == 1:
        raise ValueError("the second rank cannot")
    if what == "dies" and rank == 1:
        print("about to end", flush=True)
        os._exit(3)
    if what == "hangs" and rank == 1:
        time.sleep(600)
    if what == "leaves":
        counters["fusedce"]["matched"] += 1
        dist.new_group([0])
        torch.rand(3)
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    groups = len(dist.distributed_c10d._world.pg_map)
    return float(total), counters["fusedce"]["matched"], groups, float(torch.rand(()))


def test_a_world_outlives_ranks_that_fail():
    """A call fails with what its ranks wrote, those that wait in a collective are ended, and the
    next call has another world; what a call leaves is gone in the next one."""
    with World(2, __name__) as world:
        before = world.run(__name__, "nothing")
        for what, said, seconds in (
            ("raises", "ValueError: the second rank cannot", 60),
            ("dies", "about to end", 60),
            ("hangs", "time.sleep(600)", 3),
        ):
            with pytest.raises(AssertionError) as failed:
                world.run(__name__, what, seconds=seconds)
            assert "rank 1 of 2" in str(failed.value)
            # of a rank that hangs faulthandler writes the file and the line
            assert said in str(failed.value) or "test_worlds.py" in str(failed.value)
        assert world.run(__name__, "leaves")[0][1:3] == (1, 2 + 0)
        assert world.run(__name__, "nothing") == before
        assert world.started == 4
    assert before[0][0] == 3.0
    assert before[0][1:3] == (0, 1)
