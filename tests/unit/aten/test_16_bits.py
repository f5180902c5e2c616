"""16-bit operands in ATen: multiplied as they are or in f32, in every way that losses are run.

Which of the two a CPU takes is :mod:`fxpass.plan.cpu`'s decision; here both are held to eager's own
error, wherever the tests run.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fxpass.aten import chunked, in_place, tiled
from fxpass.plan import cpu
from fxpass.spec import expression
from fxpass.spec.spec import Spec
from tests.support.implementations import (
    GRADIENTS,
    TRANSFORMS,
    assert_as_autograd,
    centred,
    problem,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def chunks_of_three(inputs, spec, multiplied):
    return chunked.run(inputs, spec, 3, 8, 2, multiplied)


def one_chunk(inputs, spec, multiplied):
    return chunked.run(inputs, spec, 7, 8, 64, multiplied)


def logits_in_place(inputs, spec, multiplied):
    return in_place.run(inputs, spec, 8, multiplied)


def tiles(inputs, spec, multiplied):
    forward = dataclasses.replace(spec, gradients=())
    loss, lse, *_, rest = tiled.run(inputs, forward, 3, 8, multiplied)
    inputs = inputs._replace(lse=lse, lse_rest=rest)
    return tiled.run(inputs, spec, 3, 8, multiplied)._replace(loss=loss, lse=lse)


WAYS = [chunks_of_three, one_chunk, logits_in_place, tiles]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("dtype", "multiplied"), [(BF16, BF16), (BF16, F32), (F16, F32)])
@pytest.mark.parametrize("target", ["indices", "probabilities", "none"])
@pytest.mark.parametrize("logits", list(TRANSFORMS)[:3])
@pytest.mark.parametrize("scaled", [False, True])
def test_within_eagers_error(way, dtype, multiplied, target, logits, scaled):
    weighted = smoothed = target != "none"
    inputs = problem("cpu", dtype, 7, 9, 37, True, target, weighted, scaled, scaled)
    smoothing = {"label_smoothing": 0.1} if smoothed else {}
    expr = expression.parse(logits)
    spec = Spec(gradients=GRADIENTS, target=target, transform=expr, lse=True, **smoothing)
    before = [None if t is None else t.clone() for t in inputs]
    out = way(inputs, spec, multiplied)
    for tensor, copy in zip(inputs, before, strict=True):
        assert tensor is None or torch.equal(tensor, copy)
    assert_as_autograd(out, inputs, spec)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [F32, torch.float64])
def test_wide_operands(way, dtype):
    inputs = problem("cpu", dtype, 7, 9, 37, row_scaled=True)
    spec = Spec(gradients=GRADIENTS, lse=True)
    assert_as_autograd(way(inputs, spec, dtype), inputs, spec)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16, torch.float64])
def test_targets_of_any_sum(way, dtype):
    """Where they sum to 0, only the softmax has no part in the gradient."""
    inputs = problem("cpu", dtype, 7, 9, 37)
    target = centred(7, 37)
    target[3:5] *= torch.tensor([[-1e-3], [50.0]])
    target[5], target[6] = 2, 1e-39
    inputs = inputs._replace(target=target)
    spec = Spec(gradients=GRADIENTS, target="probabilities", lse=True)
    multiplied = F32 if dtype == F16 else dtype
    for row in range(7):  # one after the other: a large row would hide the error of a small one
        one = inputs._replace(row_scale=torch.where(torch.arange(7) == row, 0.7, 0.0))
        assert_as_autograd(way(one, spec, multiplied), one, spec)


@pytest.mark.parametrize("multiplied", [BF16, F32])
def test_a_confident_row_has_a_small_gradient(multiplied):
    """Its softmax is of the logits that were rounded, not of others that add up to more than 1."""
    inputs = problem("cpu", BF16, 7, 9, 37)
    x = torch.zeros_like(inputs.x)
    x[:, 0] = 30
    weight = inputs.weight.clone()
    weight[:, 0] = torch.linspace(-1, 1, 37).to(BF16) * 0.37
    inputs = inputs._replace(x=x, weight=weight, target=torch.full((7,), 36))
    spec = Spec(gradients=GRADIENTS)
    for way in WAYS[:3]:
        assert_as_autograd(way(inputs, spec, multiplied), inputs, spec, (2, 3, 4))


# ---------------------------------------------------------------- which dtype

EPYC = {"cpu_name": "AMD EPYC 9654", "avx512_bf16": True}
XEON = {"cpu_name": "Intel Xeon", "avx512_bf16": True, "avx512_fp16": True}
AMX = XEON | {"amx_bf16": True}
GRAVITON = {"cpu_name": "ARM Neoverse V1", "architecture": "aarch64", "bf16": True}


@pytest.mark.parametrize(
    ("machine", "limit", "dtype", "expected"),
    [
        (EPYC, "DEFAULT", BF16, BF16),
        (EPYC, "AVX512_CORE_BF16", BF16, BF16),
        (EPYC, "AVX512_CORE", BF16, F32),
        (EPYC, "AVX2", BF16, F32),
        (EPYC, "NO ONEDNN", BF16, F32),
        (EPYC, "DEFAULT", F16, F32),
        (XEON, "DEFAULT", BF16, F32),
        (XEON, "DEFAULT", F16, F32),
        (AMX, "DEFAULT", BF16, BF16),
        (AMX, "AVX512_CORE_FP16", BF16, F32),
        (AMX, "AVX512_CORE_AMX", BF16, BF16),
        (GRAVITON, "DEFAULT", BF16, BF16),
        ({}, "DEFAULT", BF16, F32),
        (AMX, "DEFAULT", F32, F32),
        (AMX, "DEFAULT", torch.float64, torch.float64),
    ],
)
def test_the_dtype_of_products(machine, limit, dtype, expected):
    assert cpu.decide(dtype, machine, limit)[0] == expected
