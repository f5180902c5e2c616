"""What several tests of the operators need."""

from __future__ import annotations

import pytest

from fxpass.op import reductions
from fxpass.plan.plan import Plan


@pytest.fixture
def few(monkeypatch):
    """Reductions in chunks of 3 rows, blocks of 2 rows, products of 4 classes."""
    plan = Plan("aten", "chunked", 3, 4, block=2)
    monkeypatch.setattr(reductions, "plan_of_reductions", lambda *_: plan)
