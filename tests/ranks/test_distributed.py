"""The functional entry point for sharded heads: equal to one process, clear about bad input."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from fxpass.distributed import linear_cross_entropy
from tests.ranks.distributed_cases import CASES
from tests.support import ranks
from tests.support.numerics import assert_close


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name):
    case = CASES[name]
    exact, eager = case.whole(torch.float64), case.whole(torch.float32)
    for rank in ranks.run("tests.ranks.distributed_cases", 2):
        got = rank[name]
        dtype = torch.bfloat16 if case.autocast else torch.float32
        assert_close(*([some[key] for key in exact] for some in (got, eager, exact)), dtype)


@pytest.fixture
def alone(tmp_path):
    """A world of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"classes": 14}, "rank 0 of 1 has 12 of 14 classes, and should have 14"),
        ({"target": torch.zeros(2, 5, dtype=torch.long)}, "of the same rows"),
        ({"reduction": "max"}, "reduction must be one of none, mean, sum"),
        ({"label_smoothing": 2.0}, "label_smoothing must be in"),
        ({"logits": "z.item()"}, "z.item()"),
    ],
)
def test_bad_input_is_named(changes, said):
    given = {"target": torch.zeros(2, 6, dtype=torch.long), **changes}
    with pytest.raises(ValueError, match=re.escape(said)):
        linear_cross_entropy(torch.randn(2, 6, 5), torch.randn(12, 5), **given)


@pytest.mark.usefixtures("alone")
def test_a_class_that_does_not_exist():
    target = torch.full((2, 6), 12)
    with pytest.raises(IndexError, match="class 12 is out of bounds"):
        linear_cross_entropy(torch.randn(2, 6, 5), torch.randn(12, 5), target)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="needs a process group"):
        linear_cross_entropy(torch.randn(3, 5), torch.randn(12, 5), torch.zeros(3).long())
