"""Rows about logits that leave, and writes, with a setting: their values are eager's."""

from __future__ import annotations

import pytest

from tests.programs.catalog import catalog
from tests.support.oracle import Way, outcome

# kind → the settings that its rows meet in turn
DEALT = {
    "logits that leave": ({"fusedce.logits": "keep"}, {"fusedce.logits": "defer"}),
    "writes": ({"fusedce.logits": "keep"}, {"fusedce.strategy": "tiled"}),
}
CASES = [
    pytest.param(
        row,
        settings[i % len(settings)],
        marks=[pytest.mark.full] * (i % 4 > 1),
        id=f"{row.name}, {settings[i % len(settings)]}",
    )
    for kind, settings in DEALT.items()
    for i, row in enumerate(catalog(kinds=[kind], libraries=False))
]


@pytest.mark.parametrize(("row", "setting"), CASES)
def test_rows_with_a_setting(row, setting):
    found = outcome(row, Way(options=setting))
    assert not found.wrong, found
