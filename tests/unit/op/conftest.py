"""What several tests of the operators need."""

from __future__ import annotations

import pytest

from fxpass.aten import chunked, tiles
from fxpass.op import run
from fxpass.plan.plan import Plan
from fxpass.spec.dtypes import compute_dtype


@pytest.fixture
def few(monkeypatch):
    """Reductions in chunks of 3 rows, blocks of 2 rows, products of 4 classes."""
    plan = Plan("aten", "chunked", 3, 4, block=2)
    monkeypatch.setattr(run, "plan", lambda *_: plan)


@pytest.fixture(params=["the fastest dtype", "f32"])
def multiplied(request, monkeypatch):
    """Products in the dtype of this machine, and as on a CPU without products in bf16."""
    if request.param == "f32":
        for module in (chunked, tiles):
            monkeypatch.setattr(module, "multiplied_in", lambda dtype, _: compute_dtype(dtype))


@pytest.fixture
def tiled(monkeypatch):
    """Reductions in tiles of 3 rows and 4 classes."""
    plan = Plan("aten", "tiled", 3, 4)
    monkeypatch.setattr(run, "plan", lambda *_: plan)


@pytest.fixture
def in_place(monkeypatch):
    """Totals with their logits in the weight's gradient, 4 classes at a time; reductions without a
    total in one chunk."""

    def plan(*of_call):
        total = of_call[5].total and of_call[5].gradients
        return Plan("aten", "chunked", 100, 4, in_place=bool(total))

    monkeypatch.setattr(run, "plan", plan)
