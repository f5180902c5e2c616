"""Class reductions over sharded classes against the operator on all classes."""

from __future__ import annotations

import pytest
import torch

from fxpass.spec.dtypes import compute_dtype
from tests.ranks.sharded_reductions_cases import CASES, upstream
from tests.support import ranks
from tests.support.numerics import assert_close, in_other_orders

MODULE = "tests.ranks.sharded_reductions_cases"


def whole(found, dtype, x, weight):
    """The operator on all classes, in this dtype: each row, the gradients, and the indices."""
    tensors = found.tensors | {"x": x, "weight": weight}
    leaves = [
        t.detach().to(torch.float64 if dtype == torch.float64 else t.dtype).requires_grad_()
        for t in tensors.values()
    ]
    trained = [t for n, t in zip(tensors, leaves, strict=True) if n not in found.frozen]
    results = found.run(leaves)
    indices = results.get("indices", torch.empty((0, len(x)), dtype=torch.int64))
    if "rows" not in results:
        return [torch.zeros_like(t) for t in trained], indices
    rows = results["rows"]
    rows.backward(upstream(rows.shape[1], rows.shape[0]).to(rows))
    return [*rows.detach(), *(t.grad for t in trained)], indices


def joined(name, each):
    """One gradient from those of the ranks' operands."""
    if name in ("x", "scale"):
        return torch.stack([rank[name].double() for rank in each]).sum(0)
    return torch.cat([rank[name] for rank in each], 0 if name in ("weight", "bias") else -1)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_as_of_all_classes(name, world):
    case, each = CASES[name], [rank[name] for rank in ranks.run(MODULE, world)]
    found, dtype = case.problem(), case.dtype
    x, weight = found.tensors["x"], found.tensors["weight"]
    exact, _ = whole(found, torch.float64, x, weight)
    unsharded, indices = whole(found, dtype, x, weight)
    for rank in each:
        assert torch.equal(rank["indices"], indices)
        assert rank["rows"].dtype == compute_dtype(dtype)
        assert torch.equal(rank["rows"].nan_to_num(), each[0]["rows"].nan_to_num())
        assert all(rank[key].dtype == found.tensors[key].dtype for key in found.spec.gradients)

    def others():
        return in_other_orders(lambda x, w: whole(found, dtype, x, w)[0], x, weight)

    got = [*each[0]["rows"], *(joined(key, each) for key in found.spec.gradients)]
    assert_close(got, unsharded, exact, dtype, others)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("an impossible")])
def test_an_impossible_shard_has_finite_gradients(name, world):
    for rank in ranks.run(MODULE, world):
        assert all(rank[name][key].isfinite().all() for key in CASES[name].problem().tensors)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_exchange_a_maximum_and_a_sum(name, world):
    """And, where the first class counts, its index; nothing in backward."""
    first = {"argmax", "max"} & set(CASES[name].outputs)
    for rank in ranks.run(MODULE, world):
        assert rank[name]["exchanges"] == (2 + bool(first), 0)


def test_calls_that_are_refused():
    for rank in ranks.run(MODULE, 2):
        last, beyond, negative, sizes, unnamed, total = rank["refused"]
        assert last.startswith("IndexError: class")
        assert beyond.startswith("IndexError: class 4 is out of bounds")
        assert negative.startswith("IndexError: class -1 is out of bounds")
        assert sizes.startswith("ValueError: fxpass::class_reductions needs picks [3] or [3, K]")
        assert unnamed.startswith("RuntimeError: fxpass::class_reductions: x requires a gradient")
        assert total.startswith("ValueError: a total needs")


def test_a_second_derivative_is_refused():
    for rank in ranks.run(MODULE, 2):
        assert "no second derivative" in rank["twice"]


def test_compiled_as_in_eager():
    for rank in ranks.run(MODULE, 2):
        torch.testing.assert_close(rank["compiled"][:4], rank["compiled"][4:])
