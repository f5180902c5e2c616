"""Losses over sharded classes against the same losses in one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxpass.spec import expression
from tests.ranks.vocab_parallel_cases import CASES, GRADIENTS, N, weights
from tests.support import ranks
from tests.support.numerics import assert_close
from tests.support.targets import TRANSFORMS


def whole(case, dtype):
    """Loss and gradients by PyTorch, all classes at once; the logits' loss at least in f32."""
    tensors = case.tensors()
    x, weight, bias = (
        None if tensors[name] is None else tensors[name].to(dtype).requires_grad_()
        for name in GRADIENTS
    )
    at_least_f32 = torch.promote_types(dtype, torch.float32)
    transform = TRANSFORMS[expression.text(case.spec.transform)]
    z = transform(F.linear(x, weight, bias).to(at_least_f32))
    target, class_weight = tensors["target"], tensors["class_weight"]
    spec = case.spec
    loss = F.cross_entropy(
        z,
        target.to(at_least_f32) if spec.target == "probabilities" else target,
        None if class_weight is None else class_weight.to(at_least_f32),
        ignore_index=-100 if spec.ignore_index is None else spec.ignore_index,
        label_smoothing=spec.label_smoothing,
        reduction=spec.reduction,
    )
    (loss if loss.dim() == 0 else (loss * weights(N)).sum()).backward()
    return {"loss": loss.detach()} | {
        name: t.grad for name, t in zip(GRADIENTS, (x, weight, bias), strict=True) if t is not None
    }


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name, world):
    case, each = (
        CASES[name],
        [rank[name] for rank in ranks.run("tests.ranks.vocab_parallel_cases", world)],
    )
    exact, eager = whole(case, torch.float64), whole(case, case.dtype)
    for rank in each:
        assert torch.equal(rank["loss"], each[0]["loss"])
        assert torch.equal(rank["x"], each[0]["x"])
    got = {
        key: each[0][key] if key in ("loss", "x") else torch.cat([rank[key] for rank in each])
        for key in exact
    }
    assert got["x"].dtype == case.dtype
    assert_close(*([some[key] for key in exact] for some in (got, eager, exact)), case.dtype)
