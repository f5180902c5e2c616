"""DistributedDataParallel on real process groups: its buckets, and equality with eager.

What the ranks do is in ``ddp_cases.py``. One test, since what costs is to start them.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.ranks import parallel
from tests.support import ranks, tiny

RTOL = tiny.RTOL[torch.float32]
# Graphs that the inner backend got: the embedding, two linears of a block, and the head with the loss.
PARTS = {"outside": 2, "one graph": 1, "dynamic": 2 * 4, "two heads": 5, "next part": 5}


def test_two_ranks():
    of_ranks = ranks.run("tests.ranks.ddp_cases", 2)
    assert all(rank.pop("switched off") for rank in of_ranks)
    for case in of_ranks[0]:
        courses = [rank[case] for rank in of_ranks]
        parallel.assert_trains_like_eager(courses, RTOL, case)
        for course in courses:
            assert course["graphs"] == PARTS.get(case, 4), case
            check_fused(case, course)


def check_fused(case: str, course: dict[str, Any]) -> None:
    # the shapes of the second step are another graph
    matched, rejected = {"dynamic": (2, 0), "two heads": (1, 1)}.get(case, (1, 0))
    assert (course["matched"], course["rejected"]) == (matched, rejected), case
    if case == "two heads":  # the first head is in a part before its loss
        assert "DistributedDataParallel's splitting put the linear into" in course["said"][-1]
    # DDP clones what the model returns to find out which parameters were not used
    plain = case in ("two heads", "unused", "row region")
    if case == "row region":
        assert any("region of 1 head" in line for line in course["said"])
    assert course["kind"] == ("Tensor" if plain else "DeferredLogits"), case
    # they were read after the optimizer's step
    assert "logits" in course["off"], case
