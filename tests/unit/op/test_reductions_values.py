"""Reductions of logits through the operator: values and gradients against float64."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.outputs import TOTAL
from tests.support.reduction_cases import (
    COMBINATIONS,
    DTYPES,
    MASKED,
    OUTPUTS,
    TRANSFORMS,
    D,
    K,
    N,
    V,
    case,
    check,
)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_each_output(output, dtype):
    for transform in TRANSFORMS:
        check(case([output], dtype, transform), dtype)
        check(case([output], dtype, transform, dtype, many=True), dtype)
        check(case([output], dtype, transform, compute_dtype(dtype), scaled=True), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_combinations(chunks, name, dtype, request):
    if chunks > 1:
        request.getfixturevalue("few")
    for transform, many in itertools.product(TRANSFORMS, (False, True)):
        check(case(COMBINATIONS[name], dtype, transform, dtype, many, many), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("plan", ["few", "tiled"])
@pytest.mark.parametrize("first", [0, 1])
def test_every_other_output_is_detached(first, plan, name, dtype, request):
    request.getfixturevalue(plan)
    found = case(COMBINATIONS[name], dtype, MASKED, dtype, bool(first), bool(first))
    if plan == "tiled" and found.spec.of_largest:
        request.getfixturevalue("few")
    rows = found.spec.rows
    spec = dataclasses.replace(found.spec, detached=rows[first::2] if len(rows) > 1 else ())
    weights = ("given0", "given1")
    unread = tuple(name for i, name in enumerate(weights) if i not in spec.of_backward.read)
    gradients = tuple(name for name in spec.gradients if name not in unread)
    spec = dataclasses.replace(spec, gradients=gradients)
    check(found._replace(spec=spec, frozen=(*found.frozen, *unread)), dtype)


@pytest.mark.usefixtures("tiled", "multiplied")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_rounded_as_in_forward(dtype):
    """Of nearly certain classes, p - 1 is the difference of an lse and a logit."""
    found = case(("lse", "pick", "argmax"), dtype, size=30.0)
    x, weight = found.tensors.values()
    spec = dataclasses.replace(found.spec, detached=("lse",))
    found = found._replace(spec=spec, picks=F.linear(x, weight).argmax(1))
    check(found, dtype)


@pytest.mark.parametrize("shape", [(1, 5, 11), (7, 1, 11), (7, 5, 1), (1, 1, 1), (33, 17, 129)])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_sizes(name, shape):
    check(case(COMBINATIONS[name], bias=torch.float32, scaled=True, shape=shape))


@pytest.mark.parametrize("many", [False, True])
def test_no_rows(many):
    found = case(
        COMBINATIONS["everything"],
        bias=torch.float32,
        scaled=True,
        many=many,
        shape=(0, D, V),
    )
    tensors = [t.requires_grad_() for t in found.tensors.values()]
    results = found.run(tensors)
    rows, indices = results["rows"], results["indices"]
    assert rows.shape == (len(found.spec.rows) + (2 * (K - 1) if many else 0), 0)
    assert indices.shape == (1, 0)
    rows.sum().backward()
    assert all(t.grad is not None and not t.grad.any() for t in tensors)


def test_no_picks():
    found = case(["lse", "pick"])._replace(picks=torch.empty(N, 0, dtype=torch.int64))
    check(found)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("dtype", DTYPES)
def test_indices(dtype):
    found = case(["argmax", "max"], dtype, "0.5-0.5*z", dtype, scaled=True)
    results = found.run([*found.tensors.values()])
    rows, indices = results["rows"], results["indices"]
    z = found.eager(*(t.double() for t in found.tensors.values()))
    assert indices.dtype == torch.int64
    assert rows.dtype == compute_dtype(dtype)
    x, weight, bias, scale = (t.double() for t in found.tensors.values())
    logits = (0.5 - 0.5 * F.linear(x, weight, bias)) * scale.unsqueeze(1)
    at = logits.gather(1, indices[0].unsqueeze(1)).squeeze(1)
    rounding = 4 * torch.finfo(dtype).eps  # of two logits that are nearly equal, either counts
    assert torch.allclose(at, logits.amax(1), rtol=rounding, atol=rounding)
    assert torch.allclose(rows.double(), z, rtol=2e-2)


@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("weight", "bias"), ("scale", "given0")])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_frozen_operands(name, frozen):
    check(case(COMBINATIONS[name], bias=torch.float32, scaled=True, frozen=frozen))


@pytest.mark.usefixtures("few")
def test_only_the_scale_and_given_values_need_gradients():
    frozen = ("x", "weight", "bias")
    check(case(COMBINATIONS["everything"], bias=torch.float32, scaled=True, frozen=frozen))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [1, 3])
def test_non_contiguous_operands(chunks, dtype, request):
    if chunks > 1:
        request.getfixturevalue("few")
    found = case(COMBINATIONS["everything"], dtype, bias=dtype, scaled=True, many=True)
    for name, tensor in found.tensors.items():
        strided = tensor.repeat_interleave(2, dim=-1)[..., ::2]
        found.tensors[name] = tensor.T.contiguous().T if name == "x" else strided
        assert torch.equal(found.tensors[name], tensor)
    assert found.picks is not None
    check(found._replace(picks=found.picks.T.contiguous().T), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_huge_logits(output, dtype):
    check(case([output], dtype, bias=dtype, size=1e4), dtype)


def test_the_total_is_one():
    found = case([TOTAL])
    leaves = [t.requires_grad_() for t in found.tensors.values()]
    rows = found.fused(*leaves)
    rows.sum().backward()
    assert torch.allclose(rows, torch.ones(N))
    assert all(t.grad is not None and t.grad.abs().max() < 1e-5 for t in leaves)
