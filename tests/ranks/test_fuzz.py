"""Random programs of sharded heads; see :mod:`tests.fuzz.ranks`."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import ranks
from tests.fuzz.campaign import Tally

# of a sharded head all readers fuse, or none
PROGRAMS = 8


def main(rank: int, world: int, device: torch.device, even: bool) -> Tally:
    """A campaign, on a rank."""
    seed, first, reduce = 8, 0, 0
    return ranks.main(rank, world, device, seed, PROGRAMS, first, reduce, even)


@pytest.mark.parametrize("even", [True, False])
def test_sharded_programs_do_what_eager_does(even, worlds):
    for tally in worlds[2].run(__name__, even):
        assert not tally.failures, "\n".join(tally.failures[:3])
        assert tally.valid == PROGRAMS
        assert tally.fused > PROGRAMS / 2 or not even
