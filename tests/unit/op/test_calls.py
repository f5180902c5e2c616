"""What a call reads and leaves alone: the same bits again, no writes, picks; by each implementation."""

from __future__ import annotations

import pytest
import torch

from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.outputs import Moment
from tests.support.reduction_cases import (
    BF16,
    F16,
    F32,
    F64,
    FEW,
    SOME,
    case,
    check,
    computes,
)
from tests.unit.op.test_limits import OF_ROWS, WAYS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, in the interpreter


@pytest.mark.parametrize(
    ("implementation", "way", "dtype"),
    [(*one, t) for one in WAYS for t in (F64, F32, BF16, F16) if one[1] != "triton" or t != F64],
)
def test_the_bits_are_the_same_and_nothing_is_written_to_operands(
    implementation, way, dtype, sizes
):
    """Results have memory of their own, and gradients the dtypes of their operands."""
    total = ["pick", Moment(1, 1)]
    for has_total in (False, True):
        if not computes(way, has_total):
            continue
        outputs, more = (["argmax"], {"total": total}) if has_total else (SOME, {})
        shape = FEW if has_total else sizes[-1]
        bias = compute_dtype(dtype) if has_total else dtype
        found = case(outputs, dtype, "3*tanh(z/3)", bias, True, True, shape, **more)
        assert found.picks is not None
        before = [t.clone() for t in (*found.all, found.picks)]
        answers = []
        for _ in range(2):
            leaves = [t.detach() for t in found.all]
            for name, t in zip(found.tensors, leaves, strict=True):
                t.requires_grad_(name not in found.frozen)
            results = found.run(leaves)
            out = results["total" if has_total else "rows"]
            out.backward(grad := torch.ones_like(out))
            assert torch.equal(grad, torch.ones_like(out))
            trained = [t for t in leaves if t.requires_grad]
            assert not results["indices"].requires_grad
            assert all(t.grad.dtype == t.dtype for t in trained)
            answers.append([*results.values(), *(t.grad for t in trained)])
        assert all(map(torch.equal, *answers))
        assert all(map(torch.equal, (*found.all, found.picks), before))
        every = [t for t in (*answers[1], *found.all) if t.numel()]
        assert len({t.untyped_storage().data_ptr() for t in every}) == len(every)


@pytest.mark.parametrize(("implementation", "way"), WAYS)
def test_no_rows(implementation, way, sizes):
    total = ["pick", Moment(1, 1)] if way == "in place" else []
    outputs = [] if total else SOME
    for _, d, v in sizes:
        found = case(outputs, bias=F32, scaled=not total, shape=(0, d, v), total=total)
        leaves = [t.requires_grad_(k not in found.frozen) for k, t in found.tensors.items()]
        results = found.run(leaves)
        if not total:
            assert results["rows"].shape == (len(found.spec.rows), 0)
            assert results["indices"].shape == (1, 0)
        found.fused(*leaves).sum().backward()
        assert not any(t.grad.any() for t in leaves if t.requires_grad)


@OF_ROWS
@pytest.mark.parametrize("picks", [[[1, 1, 1]] * 7, [[1, 10, 1]] * 7, [[]] * 7])
def test_a_class_that_is_picked_twice_or_none(implementation, way, picks, sizes):
    found = case(["lse", "pick"], many=True)
    found = found._replace(picks=torch.tensor(picks, dtype=torch.int64))
    check(found, F32, 4e-6 if way == "triton" else 0.0)
