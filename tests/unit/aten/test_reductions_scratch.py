"""The plan of reductions tells the truth: what they allocate, to the byte, against its scratch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpass.aten import reductions
from fxpass.aten.reductions import Operands
from fxpass.plan import plan as plans
from fxpass.plan.plan import MIB, Plan, plan_of_reductions
from fxpass.spec import expression
from fxpass.spec.reductions import LogitSum, Moment, Reductions
from tests.support.allocations import Allocations

N, D, V = 130, 24, 6011
CPU = torch.device("cpu")
ALL = ("x", "weight", "bias")
SOFTCAP = expression.parse("30*tanh(z/30)")
GATED = expression.parse("2*z*tanh(z)+3*sigmoid(z)")
SPECS = {
    "lse": Reductions(("lse",), gradients=ALL),
    "frozen": Reductions(("pick",), gradients=("x",)),
    "an entropy": Reductions(("pick", Moment(1, 1)), gradients=ALL),
    "soft-cap": Reductions(("pick", Moment(1, 1)), SOFTCAP, ALL),
    "gated": Reductions(("lse", "argmax"), GATED, ALL),
    "maxima": Reductions(("max", "amax", "peak"), gradients=ALL),
    "squares": Reductions((Moment(2, 2), Moment(0, 2)), gradients=ALL),
    "classes": Reductions((Moment(1, 1, 0), LogitSum(0)), gradients=(*ALL, "given0")),
    "values": Reductions((Moment(0, 1, 1),), gradients=ALL),
    "values and soft-cap": Reductions((Moment(1, 2, 1), LogitSum(1)), SOFTCAP, (*ALL, "given1")),
    "only the scale": Reductions(("lse",), gradients=("scale",)),
}


def operands(spec: Reductions, dtype: torch.dtype, scaled: bool) -> Operands:
    picked = "pick" in spec.outputs
    return Operands(
        torch.randn(N, D, dtype=dtype),
        torch.randn(V, D, dtype=dtype),
        torch.randn(V, dtype=dtype),
        torch.ones(N) if scaled else None,
        torch.zeros(N, dtype=torch.int64) if picked else None,
        (torch.rand(V, dtype=dtype), torch.rand(N, V, dtype=dtype)),
    )


@pytest.fixture(params=[1, 6])
def memory_mb(request, monkeypatch):
    budget = request.param * MIB
    monkeypatch.setattr(plans, "CPU_BUDGET", (budget, budget))
    plans._of_reductions.cache_clear()
    yield request.param
    plans._of_reductions.cache_clear()


def assert_kept(found: Plan, allocated: Allocations, outputs: list[Tensor], memory_mb: int) -> None:
    of_rows = (128 + 4 * D) * N  # sums and indices; x's gradient in f32
    taken = allocated.peak(outputs)
    assert found.scratch / 8 < taken <= found.scratch + found.sums + of_rows
    assert found.scratch <= memory_mb * MIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_the_budget_is_kept(name, dtype, memory_mb):
    spec = SPECS[name]
    scaled = memory_mb == 1 or "scale" in spec.gradients
    given = operands(spec, dtype, scaled)
    of_call = N, D, V, dtype, CPU, spec, scaled
    found = plan_of_reductions(*of_call, backward=False)
    with torch.no_grad(), Allocations() as allocated:
        out, _ = reductions.forward(given, spec, found)
    assert_kept(found, allocated, [*out], memory_mb)

    found = plan_of_reductions(*of_call, backward=True)
    incoming = torch.ones_like(out.rows)
    with torch.no_grad(), Allocations() as allocated:
        grads = reductions.backward(given, spec, found, out, incoming)
    assert_kept(found, allocated, [*grads.values()], memory_mb)


def test_the_users_budget_is_the_plans():
    of_call = N, D, V, torch.float32, CPU
    spec = Reductions(("lse",), gradients=ALL, memory_mb=2)
    found = plan_of_reductions(*of_call, spec, False, backward=True)
    assert (
        found.scratch <= 2 * MIB < plan_of_reductions(*of_call, SPECS["lse"], False, True).scratch
    )
    with pytest.raises(ValueError, match="memory_mb must not be negative"):
        Reductions(("lse",), memory_mb=-1)
