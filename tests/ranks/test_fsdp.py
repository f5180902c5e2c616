"""FSDP2 on real process groups: what is fused, equality with eager, logits that outlive weights.

What the ranks do is in ``fsdp_cases.py``. One test, since what costs is to start them.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.ranks import parallel
from tests.support import ranks, tiny

FREED = "was freed before they were used"
ADVICE = 'computed with the loss (FUSEDCE_LOGITS=keep, or options={"fusedce.logits": "keep"})'
BF16 = {"mixed", "autocast", "uneven"}


def test_three_ranks():
    """Two of them train together, most of the time."""
    *two, third = ranks.run("tests.ranks.fsdp_cases", 3)
    assert all(rank.pop("switched off") for rank in two)
    for logits in [rank.pop("logits") for rank in two]:
        check_logits(logits)
    check_courses([{"uneven": rank.pop("uneven")} for rank in (*two, third)])
    check_courses(two)


def check_courses(of_ranks: list[dict[str, Any]]) -> None:
    """Every case trains like eager, and like one process; head and loss are fused where they can."""
    for case in of_ranks[0]:
        courses = [rank[case] for rank in of_ranks]
        dtype = torch.bfloat16 if case in BF16 else torch.float32
        parallel.assert_trains_like_eager(courses, tiny.RTOL[dtype], case)
        for course in courses:
            check_fused(case, course)


def check_fused(case: str, course: dict[str, Any]) -> None:
    counts = course["matched"], course["rejected"]
    if case in ("head apart", "one frame"):
        assert counts == (0, 1), case
        assert course["kind"] == "Tensor", case
        assert "the linear is in another graph, or there was a graph break" in course["said"][-1]
        return
    losses = 2 if case == "checkpointed, loss of logits" else 1  # one is outside
    assert counts == (losses, 0), case
    assert course["casts"] == (2 if case == "autocast" else 0), case
    if case == "row region":
        assert "region of 1 head" in course["said"][-1]
        return
    assert course["kind"] == "DeferredLogits", case
    if case == "head with loss":  # its weight is freed with the end of its own forward
        assert_stale(course["logits"], FREED)
    else:
        assert "logits" in course["off"], case


def check_logits(found: dict[str, Any]) -> None:
    """Values of the weights that the forward had, or an error that says what to do."""
    assert_right(found.pop("one_rank_reads"))
    assert_stale(found.pop("after_backward"), FREED)
    error, gathered_again, moved = found.pop("after_the_next_forward")
    assert gathered_again, "the weight tells by itself that it is another: nothing was tested"
    assert moved > 0.2
    assert_stale(error, "was changed in place (through .data) before they were used")
    assert_right(found.pop("gathered_unchanged"))
    whole, row, other_rows = found.pop("read_before")
    assert_right(whole)
    assert_right(row)
    assert_stale(other_rows, FREED)
    right, moved = found.pop("not_resharded")
    assert_right(right)
    assert moved > 0.1
    assert_right(found.pop("kept"))
    assert not found


def assert_right(off: Any) -> None:
    assert isinstance(off, float), off
    assert off < tiny.RTOL[torch.float32]


def assert_stale(error: Any, what: str) -> None:
    assert isinstance(error, str), f"values that are off by {error}"
    assert error.startswith("StaleLogitsError: ")
    assert what in error
    assert "FSDP" in error
    assert error.endswith(ADVICE)
