"""The bytes that ranks of a sharded head exchange are those that benchmarks/README.md lists."""

from __future__ import annotations

import pytest

from tests.benchmarks.bytes_cases import BATCH, DTYPE, HIDDEN, PROGRAMS, SEQ, D, V
from tests.support import ranks

N, E = BATCH * SEQ, DTYPE.itemsize
A_ROW = ("all_reduce", 4 * N)  # one f32 of each row
# program → what the loss exchanges: a maximum, a sum of exponentials and the target's logit; or logits
PARALLEL, GATHERED = [A_ROW] * 3, [("all_gather_into_tensor", E * N * V)]
LOSS = {
    "fusedce": PARALLEL,
    "fusedce, of the program that gathers": GATHERED,
    "loss_parallel": PARALLEL,
    "gathered logits": GATHERED,
}
# the hidden states in forward, and their gradient in backward
STATES = {
    "replicated": ([], [("all_reduce", E * N * D)]),
    "sequence-sharded": (
        [("all_gather_into_tensor", E * N * D)],
        [("reduce_scatter_tensor", E * N * D)],
    ),
}


@pytest.fixture(scope="module")
def exchanged():
    """What each rank says of all programs."""
    return ranks.run("tests.benchmarks.bytes_cases", 2)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("program", PROGRAMS)
def test_what_ranks_exchange(program, hidden, exchanged):
    forward, backward = STATES[hidden]
    for rank in exchanged:
        assert rank[program, hidden] == (sorted([*forward, *LOSS[program]]), backward)
