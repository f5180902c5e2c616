"""Why a custom function is no part of a region, where no loss is in sight and nothing is said."""

from __future__ import annotations

import pytest

from tests.programs.catalog import of
from tests.support import row_tags

ROWS = {row.name: row for row in of("custom_functions")}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("overwriting gradients", "writes to its arguments, or to what it saved"),
        ("mean gradients", "reads the gradient of a result that mixes rows"),
    ],
)
def test_what_stays(name, reason):
    row = ROWS[name]
    assert any(reason in no for no in row_tags.check(row.program(), *row.tensors()).refused)
