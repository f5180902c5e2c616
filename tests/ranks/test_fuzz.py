"""Random programs of sharded heads; see :mod:`tests.fuzz.sharded`."""

from __future__ import annotations

from tests.support import ranks

# of a sharded head all readers fuse, or none
PROGRAMS = 24


def test_sharded_programs_do_what_eager_does():
    seed, first, reduce = 8, 0, 0
    of_ranks = ranks.run("tests.fuzz.sharded", 2, *map(str, (seed, PROGRAMS, first, reduce)))
    for tally in of_ranks:
        assert not tally.failures, "\n".join(tally.failures[:3])
        assert tally.valid == PROGRAMS
        assert tally.fused > PROGRAMS / 12
