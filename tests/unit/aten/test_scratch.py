"""The budget is kept: what the ATen strategies allocate, to the byte, against the plan."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fxpass.aten import tiled
from fxpass.op.dispatch import compute
from fxpass.plan.plan import MIB, plan
from fxpass.spec import expression
from fxpass.spec.operands import Inputs
from fxpass.spec.spec import Spec
from tests.support.allocations import Allocations

N, D, V = 130, 24, 6011
CPU = torch.device("cpu")
ALL = ("x", "weight", "bias")
SOFTCAP = expression.parse("30*tanh(z/30)")
SPECS = {
    "forward": Spec(),
    "training": Spec(gradients=ALL),
    "frozen": Spec(gradients=("x",)),
    "smoothed": Spec(label_smoothing=0.1, gradients=ALL),
    "soft-cap": Spec(transform=SOFTCAP, gradients=ALL),
    "soft-cap forward": Spec(transform=SOFTCAP),
    "scaled": Spec(transform=expression.parse("2*z"), gradients=ALL),
    "gated": Spec(transform=expression.parse("2*z*tanh(z)+3*sigmoid(z)"), gradients=ALL),
    "probabilities": Spec(target="probabilities", gradients=ALL),
    "capped probabilities": Spec(target="probabilities", transform=SOFTCAP, gradients=ALL),
    "none": Spec(target="none", lse=True, gradients=ALL),
}


def inputs(spec: Spec, dtype: torch.dtype) -> Inputs:
    target = {
        "none": None,
        "indices": torch.arange(N),
        "probabilities": torch.full((1, V), 1 / V, dtype=dtype).expand(N, V),
    }[spec.target]
    return Inputs(
        x=torch.randn(N, D, dtype=dtype),
        weight=torch.randn(V, D, dtype=dtype),
        bias=torch.randn(V, dtype=dtype),
        target=target,
        class_weight=None if target is None else torch.ones(V, dtype=dtype),
        row_scale=torch.ones(N) if spec.gradients else None,
        lse=torch.zeros(N) if spec.strategy == "tiled" and spec.gradients else None,
        lse_rest=torch.zeros(N) if spec.strategy == "tiled" and spec.gradients else None,
    )


@pytest.mark.parametrize("strategy", ["chunked", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_mb", [1, 6])
@pytest.mark.parametrize("name", SPECS)
def test_the_budget_is_kept(name, memory_mb, dtype, strategy):
    spec = dataclasses.replace(SPECS[name], strategy=strategy, memory_mb=memory_mb)
    found = plan(N, D, V, dtype, CPU, spec)
    assert "over its budget" not in found.reason
    given = inputs(spec, dtype)
    with torch.no_grad(), Allocations() as allocated:
        out = compute(given, spec)
    taken = allocated.peak(out)
    of_rows = (128 + 4 * D) * N  # counts, losses and scales; x's gradient in f32
    assert found.scratch / 8 < taken <= found.scratch + found.sums + of_rows
    assert found.scratch <= memory_mb * MIB


@pytest.mark.parametrize(("rows", "classes"), [(128, 16), (16, 128), (100, 100)])
def test_forward_of_tiles_up_casts_to_one_place(rows, classes):
    """Wide operands, whose copies are most of it, and a last block and tile that are smaller."""
    n, d, v = 260, 512, 300
    spec = Spec(strategy="tiled")
    x, weight = (torch.randn(size, d, dtype=torch.bfloat16) for size in (n, v))
    given = Inputs(x, weight, None, torch.arange(n))
    with torch.no_grad(), Allocations() as allocated:
        out = tiled.run(given, spec, rows, classes, torch.float32)
    copies = (rows + classes) * d * 4
    assert copies < allocated.peak(out) < 1.5 * copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d", "v"), [(2048, 512, 32000), (1024, 1024, 128256)])
def test_evaluation_takes_a_tile(n, d, v, dtype):
    found = plan(n, d, v, dtype, CPU, Spec(strategy="tiled"))
    assert found.scratch <= 24 * MIB
    assert found.rows == n  # the weight is read once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_in_the_weights_gradient(dtype):
    """Rows as many as the hidden size: beside the gradients there is a tile."""
    n, d, v = 600, 600, 15000
    spec = Spec(gradients=("x", "weight"))
    found = plan(n, d, v, dtype, CPU, spec)
    assert found.in_place
    given = Inputs(
        torch.randn(n, d, dtype=dtype),
        torch.randn(v, d, dtype=dtype),
        None,
        torch.zeros(n, dtype=torch.int64),
    )
    with torch.no_grad(), Allocations() as allocated:
        out = compute(given, spec)
    assert allocated.peak(out) <= found.scratch + (128 + 4 * d) * n


def test_it_counts_what_lives_at_the_same_time():
    x = torch.zeros(1000)
    with Allocations() as allocated:
        y = x + 1  # 4000 bytes
        z = y[:10].view(2, 5)  # a view
        y = y * 2  # 4000 more
        del z
        out = x[5:].add_(1), y + 1
        del y
        x.clone().clone()
    assert allocated.peak([]) == 12000
    assert allocated.peak(out) == 8000
