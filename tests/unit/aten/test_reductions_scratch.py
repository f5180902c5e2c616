"""The plan of reductions tells the truth: what they allocate, to the byte, against its scratch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxpass.aten import blocks, reductions, tiles
from fxpass.aten.reductions import Operands
from fxpass.formula import expression
from fxpass.formula.outputs import OF_PICKS, Moment
from fxpass.formula.reductions import Reductions
from fxpass.plan import budget as budgets
from fxpass.plan import plan as plans
from fxpass.plan.budget import MIB
from fxpass.plan.plan import Plan, plan_head
from tests.support.allocations import Allocations
from tests.support.pairs import in_pairs

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
    "a maximum": Reductions(("max", "lse"), gradients=ALL, detached=("max",)),
    "squares": Reductions((Moment(2, 2), Moment(0, 2)), gradients=ALL),
    "classes": Reductions((Moment(1, 1, 0),), gradients=ALL),
    "values": Reductions((Moment(0, 1, 1),), gradients=ALL),
    "values and soft-cap": Reductions((Moment(1, 2, 1),), SOFTCAP, ALL),
    "all of it": Reductions(
        ("pick", "lse", "argmax", Moment(2, 2, 1), Moment(0, 2, 0)),
        GATED,
        ALL,
    ),
}
TOTALS = {
    "a loss": Reductions((), gradients=ALL, total=("pick",)),
    "a loss and metrics": Reductions(
        ("argmax", "max", Moment(1, 1)), gradients=ALL, total=("pick",)
    ),
    "soft-cap": Reductions((), SOFTCAP, ALL, ("pick", "lse")),
    "gated": Reductions((), GATED, ALL, ("lse", Moment(1, 1))),
    "smoothing": Reductions((), gradients=ALL, total=("pick", Moment(0, 1))),
    "a logit": Reductions((), gradients=ALL, total=("at",)),
    "soft targets": Reductions((), SOFTCAP, ("weight",), (Moment(0, 1, 1), Moment(2, 2))),
}


def operands(spec: Reductions, dtype: torch.dtype, scaled: bool, d: int = D) -> Operands:
    picked = not set(OF_PICKS).isdisjoint((*spec.outputs, *spec.total))
    return Operands(
        torch.randn(N, d, dtype=dtype),
        torch.randn(V, d, dtype=dtype),
        torch.randn(V, dtype=dtype),
        torch.ones(N) if scaled else None,
        torch.zeros(N, dtype=torch.int64) if picked else None,
        (torch.rand(V, dtype=dtype), torch.rand(N, V, dtype=dtype)),
        torch.ones(len(spec.total), N) if spec.total else None,
    )


@pytest.fixture
def memory_mb(request, monkeypatch):
    budget = request.param * MIB
    monkeypatch.setattr(budgets, "CPU_BUDGET", (budget, budget))
    plans._plan.cache_clear()
    yield request.param
    plans._plan.cache_clear()


F32, BF16 = torch.float32, torch.bfloat16
DTYPES = ((F32, F32), (BF16, BF16), (BF16, F32))


@pytest.fixture
def dtype(request, monkeypatch):
    """The dtype of the operands, which are multiplied in it or in f32."""
    dtype, multiplied = request.param
    for module in (plans, blocks, tiles):
        monkeypatch.setattr(module, "multiplied_in", lambda *_: multiplied)
    return dtype


def assert_kept(
    found: Plan, allocated: Allocations, outputs: list[Tensor], memory_mb: int, d: int = D
) -> None:
    of_rows = (128 + 4 * d) * N  # sums and indices; x's gradient in f32
    taken = allocated.peak(outputs)
    assert found.scratch / 8 < taken <= found.scratch + found.sums + of_rows
    assert found.scratch <= memory_mb * MIB


@in_pairs("dtype", "memory_mb", name=SPECS, dtype=DTYPES, memory_mb=(1, 6))
def test_the_budget_is_kept(name, dtype, memory_mb):
    spec = SPECS[name]
    scaled = memory_mb == 1
    given = operands(spec, dtype, scaled)
    of_call = N, D, V, dtype, CPU, spec, scaled
    found = plan_head(*of_call, backward=False)
    with torch.no_grad(), Allocations() as allocated:
        out, _ = reductions.forward(given, spec, found)
    assert found.strategy == ("chunked" if spec.reads_max else "tiled")
    assert_kept(found, allocated, [*out], memory_mb)

    found = plan_head(*of_call, backward=True)
    incoming = torch.ones(len(spec.of_backward.rows), N)
    with torch.no_grad(), Allocations() as allocated:
        grads = reductions.backward(given, spec.of_backward, found, out, incoming)
    assert_kept(found, allocated, [*grads.values()], memory_mb)


def test_the_users_budget_is_the_plans():
    of_call = N, D, V, torch.float32, CPU
    spec = Reductions(("lse",), gradients=ALL, memory_mb=2)
    found = plan_head(*of_call, spec, False, backward=True)
    assert found.scratch <= 2 * MIB < plan_head(*of_call, SPECS["lse"], False, True).scratch
    with pytest.raises(ValueError, match="memory_mb must not be negative"):
        Reductions(("lse",), memory_mb=-1)


@in_pairs(
    *("dtype", "memory_mb"),
    **{"name": TOTALS, "dtype": DTYPES, "memory_mb": (1, 6)},
    **{"in_place": (False, True), "scaled": (False, True)},
)
def test_the_budget_of_a_total_is_kept(in_place, name, scaled, dtype, memory_mb, monkeypatch):
    spec, d = TOTALS[name], D
    if in_place:
        d = N
        monkeypatch.setattr(plans, "CPU_TILE", memory_mb * MIB // 6)
    given = operands(spec, dtype, scaled, d)
    found = plan_head(N, d, V, dtype, CPU, spec, scaled, True)
    assert (found.strategy, found.in_place) == ("chunked", in_place)
    with torch.no_grad(), Allocations() as allocated:
        out, grads = reductions.forward(given, spec, found)
    assert_kept(found, allocated, [*out, *grads.values()], memory_mb, d)


def test_which_totals_are_in_place():
    """Those whose logits fit into the weight's gradient, and are large."""
    spec = TOTALS["a loss"]

    def in_place(n=600, d=600, v=15000, spec=spec):
        return plan_head(n, d, v, torch.float32, CPU, spec, False, True).in_place

    assert in_place()
    assert not in_place(n=601)
    assert not in_place(v=5000)
    assert not in_place(spec=Reductions((), gradients=("x",), total=("pick",)))
    assert not in_place(spec=SPECS["lse"])


@pytest.mark.parametrize("dtype", DTYPES, indirect=True)
@pytest.mark.parametrize(("n", "d", "v"), [(2048, 512, 32000), (1024, 1024, 128256)])
def test_evaluation_takes_a_tile(n, d, v, dtype):
    found = plan_head(n, d, v, dtype, CPU, Reductions(("pick",)), False, False)
    assert found.scratch <= 24 * MIB
    assert found.rows == n  # the weight is read once


def test_the_users_budget_includes_sums():
    def of(memory_mb):
        spec = Reductions((), gradients=ALL, total=("pick",), memory_mb=memory_mb)
        return plan_head(4096, 256, 32000, torch.bfloat16, CPU, spec, False, True)

    found = of(96)
    assert found.sums == 32000 * 256 * 4
    assert found.scratch + found.sums <= 96 * MIB
    assert "over its budget" not in found.reason
    assert "; the smallest block takes " in of(1).reason
    assert " is over its budget of 1.0 MiB" in of(1).reason
