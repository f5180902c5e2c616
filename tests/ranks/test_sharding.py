"""Sharded heads under torch.compile, on real process groups, against one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from fxpass.plan.devices import multiplied_in
from tests.ranks.sharding_cases import (
    FUSED,
    LEFT,
    OF_FOUR,
    OF_LOCAL_LOGITS,
    PARTS,
    ROWS,
    SMALL,
    UNEQUAL,
    Model,
    data_with_ignored,
    of_local_linear,
    operands,
    per_row,
    rows,
)
from tests.support import ranks
from tests.support.numerics import assert_close

WORLD = 2


def train(model, x, labels, dtype, autocast=False):
    """Loss (and logits) and gradients of a model on one rank, by name."""
    if dtype is not torch.bfloat16:
        model, x = model.to(dtype), x.to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype is torch.bfloat16):
        out = model(x, labels)
    loss, *logits = out if isinstance(out, tuple) else (out,)
    loss.backward()
    values = {"loss": loss.detach(), **({"logits": logits[0].detach()} if logits else {})}
    return values | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def check(results, reference, dtype):
    """All ranks agree, and are right."""
    eager, exact = reference(dtype), reference(torch.float64)
    for rank in results:
        values = rank["values"]
        assert values.keys() == exact.keys()
        for key, value in values.items():
            assert torch.equal(value, results[0]["values"][key]), key
        assert_close(*([some[key] for key in exact] for some in (values, eager, exact)), dtype)


@pytest.mark.parametrize("name", [*FUSED, *OF_FOUR])
def test_fused_as_in_one_process(name):
    case, world = (FUSED | OF_FOUR)[name], 4 if name in OF_FOUR else WORLD
    results = [rank[name] for rank in ranks.run("tests.ranks.sharding_cases", world)]
    for rank in results:
        assert (rank["matched"], rank["rejected"], rank["graphs"]) == (1, 0, 1), rank["said"]
        assert f"(classes sharded over {world} ranks)" in rank["said"][0]
        assert ("(logits kept" in rank["said"][0]) == ("returned" in name)
        # small ones are; not those of bf16 on CPUs that multiply it in f32
        widened = multiplied_in(torch.bfloat16, torch.device("cpu")) != torch.bfloat16
        widened = widened and case.autocast and not ranks.on_gpus(world)
        may = not widened and not case.settings
        may = may and "returned" not in name
        assert rank["saves"] == may
    dtype = torch.bfloat16 if case.autocast else torch.float32

    @functools.cache
    def reference(dtype):
        return train(case.model(), *case.data(), dtype, case.autocast)

    check(results, reference, dtype)
    # the gradients lie where their parameters do
    lies = "" if "lm_head.weight" in case.frozen else "(Shard(dim=0),)"
    assert {rank["placed"]["lm_head.weight"] for rank in results} == {lies}


NO_SHARDED_SEQUENCES = (
    "Attempted to flatten multiple dimensions, with dimension 1",  # torch 2.11
    "DTensorSpec doesn't allow specify shard_order",  # 2.15, when it compiles
)


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_other_ranks_count(name):
    """Rows sharded over ranks, of which not all count: the mean is over all of them."""
    reduction, dim = ROWS[name]
    results = [rank[f"rows, {name}"] for rank in ranks.run("tests.ranks.sharding_cases", WORLD)]
    if dim == 1 and any("refused" in rank for rank in results):
        for rank in results:
            for said in rank["refused"]:
                assert any(reason in said for reason in NO_SHARDED_SEQUENCES)
        return
    for rank in results:
        assert rank["matched"] == 1
        assert f"(rows over {WORLD})" in rank["said"][0]

    @functools.cache
    def reference(dtype):
        model = Model(lambda z, t: F.cross_entropy(*rows(z, t), reduction=reduction), 13, True)
        return train(model, *data_with_ignored(), dtype)

    check(results, reference, torch.float32)


PROGRAMS = {
    "gathered by hand": (SMALL, False, of_local_linear),
    "bias written": (SMALL, True, per_row),
    "weight written": (SMALL, True, per_row),
    "unequal shards": (UNEQUAL, True, per_row),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_all_ranks(name):
    sizes, biased, loss_of = PROGRAMS[name]
    results = [rank[name] for rank in ranks.run("tests.ranks.sharding_cases", WORLD)]

    def reference(dtype):
        x, w, b, t = operands(*sizes)
        x, w, b = (tensor.to(dtype) for tensor in (x, w, b))
        loss = loss_of(F.linear(x, w.requires_grad_(), b if biased else None), t)
        loss.backward()
        return [loss.detach(), w.grad]

    eager, exact = reference(torch.float32), reference(torch.float64)
    for rank in results:
        assert rank["matched"] == 1
        assert_close([value.cpu() for value in rank["values"]], eager, exact, torch.float32)


REASONS = {
    "hidden sharded": "the head's weight is placed [S(1)]",
    "own classes": "gives each rank only its part of the logits",
    "own rows": "gives each rank only its part of the logits, [S(1)]",
    "some classes": "selects some classes of sharded logits",
    "compiled on one rank": "one rank compiles for all ranks (compile_on_one_rank)",
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone(name):
    for rank in ranks.run("tests.ranks.sharding_cases", WORLD):
        assert (rank[name]["matched"], rank[name]["rejected"]) == (0, 1)
        assert REASONS[name] in rank[name]["said"][0]


@pytest.mark.parametrize("name", [*OF_LOCAL_LOGITS, *PARTS, "uneven", "largest class"])
def test_what_a_rank_does_with_its_part(name):
    """It is left alone: what is fused is of all logits, which exist beside it."""
    for rank in ranks.run("tests.ranks.sharding_cases", WORLD):
        found = rank["local"][name]
        for ours, theirs in zip(found["ours"], found["eager"], strict=True):
            torch.testing.assert_close(ours, theirs)
        assert found["matched"] == (name in ("lse", "max", "own labels", "largest class"))
