"""Sequence and context parallelism with plain tensors: rows on several ranks, one mean over all.

Real gloo groups; the cases are ``sequence_cases.py``. Losses and gradients of all ranks together are
those of one process that has every row. ``torch.distributed.tensor.experimental.context_parallel``
splits the batch of one case; its attention cannot be run here: in torch 2.13 it has rules for the
kernels of GPUs only (``aten._scaled_dot_product_flash_attention_for_cpu.default does not have a
sharding strategy registered``), so attention is written out over keys that are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.ranks.sequence_cases import CASES, Case, train
from tests.support import ranks
from tests.support.numerics import FLOOR, assert_close, error

F32 = torch.float32
# Dynamo ends the graph between linear and loss.
BROKEN = {"meanwhile", "refused"}
Results = dict[str, Any]  # of one rank and one case


def test_three_ranks():
    results = ranks.run("tests.ranks.sequence_cases", world=3)
    for case in CASES:
        each = [rank[case.name] for rank in results]
        if case.name == "refused" and not any(rank["broken"] for rank in each):
            check_counters(case, each, matched=1, rejected=0)
            check_zeros_of_torch(each)
            continue
        if case.name in BROKEN:
            check_counters(case, each, matched=0, rejected=1)
        else:
            check_counters(case, each, matched=1, rejected=0)
            check_graphs(case, each)
        if case.name == "unlike means":
            check_a_mean_of_nothing(each)
        else:
            check_values(case, each)


def check_values(case: Case, each: list[Results]) -> None:
    """What all ranks computed together is what one process does."""
    count = len(each) if case.averaged else 1
    together = {run: added(each, run, count) for run in ("eager", "traced", "fused")}
    exact = train(case, case.batch(), alone=True, double=True)
    eager = train(case, case.batch(), alone=True)
    assert all(gradient.norm() > 0 for gradient in exact[1:]), case.name
    try:
        assert_close(together["fused"], eager, exact, F32)
        assert_close(together["traced"], eager, exact, F32)
    except AssertionError as wrong:
        raise AssertionError(f"{case.name}: {wrong}") from wrong
    if case.name == "loss in place":
        # what any backend computes, and not what eager does, whose autograd knows no all_reduce
        for gradient, part in zip(together["fused"][1:], together["eager"][1:], strict=True):
            assert error(part * len(each), gradient) < 4 * FLOOR[F32]
    else:
        assert_close(together["eager"], eager, exact, F32)


def check_zeros_of_torch(each: list[Results]) -> None:
    """Where torch does not refuse, its gradients are zero: the collective is an autograd.Function
    that returns what it wrote to. fxpass's are those of eager."""
    for rank in each:
        loss = rank["eager"][0]
        assert error(rank["traced"][0], loss) < 4 * FLOOR[F32]
        assert not any(gradient.any() for gradient in rank["traced"][1:])
        for fused, eager in zip(rank["fused"], rank["eager"], strict=True):
            assert eager.norm() > 0
            assert error(fused, eager) < 4 * FLOOR[F32]


def added(each: list[Results], run: str, count: int) -> list[Tensor]:
    """Loss and gradients of all ranks, added up and divided by ``count``."""
    return [
        torch.stack(tensors).sum(0) / count for tensors in zip(*(r[run] for r in each), strict=True)
    ]


def check_counters(case: Case, each: list[Results], matched: int, rejected: int) -> None:
    for rank in each:
        assert (rank["matched"], rank["rejected"]) == (matched, rejected), case.name


def check_graphs(case: Case, each: list[Results]) -> None:
    """The collectives are in one graph with the operator."""
    for rank in each:
        if case.ddp:  # cut by Dynamo where a bucket of gradients is full
            assert len(rank["graphs"]) > 2
            continue
        (graph,) = rank["graphs"]
        assert "class_reductions" in graph, case.name
        assert "= all_reduce(" in graph, case.name
        assert ("= all_gather_into_tensor(" in graph) == case.attends, case.name


def check_a_mean_of_nothing(each: list[Results]) -> None:
    """The mean of a rank without valid rows is nan, as in eager, and its gradients are not."""
    assert [bool(rank["fused"][0].isnan()) for rank in each] == [False, False, True]
    for rank in each:
        for ours, theirs in zip(rank["fused"], rank["eager"], strict=True):
            assert error(ours, theirs) < 4 * FLOOR[F32]
