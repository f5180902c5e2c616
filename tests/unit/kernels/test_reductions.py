"""One list of calls, by each implementation, ATen or kernels: values and gradients against float64."""

from __future__ import annotations

import pytest

from tests.support.reduction_cases import (
    FLOORS,
    PLANS,
    cases_of,
    check,
    implement,
    made,
    precisions,
    where,
)

# numpy's, in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
RUNS = [(way, name) for way in PLANS for name in cases_of(way)]


@pytest.mark.parametrize(
    ("implementation", "way", "name"),
    [("triton" if way == "triton" else "aten", way, name) for way, name in RUNS],
)
def test_values_and_gradients(implementation, way, name, device, monkeypatch):
    """In each dtype, as accurate as eager."""
    options = cases_of(way)[name]
    for turn, (dtype, multiplied) in enumerate(precisions(way, options)):
        implement(way, monkeypatch, multiplied)
        with where(way, device):
            check(made(options, dtype, turn), dtype, FLOORS.get(way, 0.0))
