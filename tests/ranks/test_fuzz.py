"""Random programs of sharded heads; see :mod:`tests.fuzz.ranks`."""

from __future__ import annotations

# of a sharded head all readers fuse, or none
PROGRAMS = 8


def test_sharded_programs_do_what_eager_does(worlds):
    seed, first, reduce = 8, 0, 0
    for tally in worlds[2].run("tests.fuzz.ranks", seed, PROGRAMS, first, reduce):
        assert not tally.failures, "\n".join(tally.failures[:3])
        assert tally.valid == PROGRAMS
        assert tally.fused > PROGRAMS / 12
