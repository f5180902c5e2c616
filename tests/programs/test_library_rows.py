"""The rows that call a library's own functions, in the first way and in their own."""

from __future__ import annotations

import pytest

from tests.programs.catalog import LIBRARIES, missing, of
from tests.support.oracle import FIRST, check

ROWS = {row.name: row for name in LIBRARIES if not missing(name) for row in of(name)}
OWN = [(name, way) for name, row in ROWS.items() for way in (FIRST, *row.ways)]


def test_libraries_are_there():
    assert ROWS


@pytest.mark.parametrize(("name", "way"), OWN, ids=[f"{name} [{way}]" for name, way in OWN])
def test_row(name, way):
    check(ROWS[name], way)
