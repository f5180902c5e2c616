"""Random programs of sharded heads; see :mod:`tests.fuzz.ranks`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.fuzz import campaign, ranks
from tests.fuzz.campaign import Tally

# of a sharded head all readers fuse, or none
PROGRAMS = 8


def main(rank: int, world: int, device: torch.device, even: bool) -> Tally:
    """A campaign, on a rank. ``even``: with classes that divide by the ranks and sizes that never
    vary: other heads are left as they are."""
    sizes = tuple(replace(some, v=-(-some.v // world) * world) for some in campaign.SIZES)
    with ExitStack() as stack:
        if even:
            stack.enter_context(mock.patch.object(campaign, "SIZES", sizes))
            stack.enter_context(torch._dynamo.config.patch(automatic_dynamic_shapes=False))
        seed, first, reduce = 8, 0, 0
        return ranks.main(rank, world, device, seed, PROGRAMS, first, reduce)


@pytest.mark.parametrize("even", [True, False])
def test_sharded_programs_do_what_eager_does(even, worlds):
    for tally in worlds[2].run(__name__, even):
        assert not tally.failures, "\n".join(tally.failures[:3])
        assert tally.valid == PROGRAMS
        assert tally.fused > PROGRAMS / 2 or not even
