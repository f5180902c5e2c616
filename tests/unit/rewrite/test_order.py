"""Reductions of one head are one call of the operator: the programs are rows of the tables."""

from __future__ import annotations

import pytest

from tests.programs.catalog import of
from tests.programs.rows.order import ONE_CALL
from tests.support.programs import head_of

ROWS = {row.name: row for row in of("order")}


@pytest.mark.parametrize("name", [row.name for row in ONE_CALL])
def test_one_call(name):
    row = ROWS[name]
    assert len(head_of(row.program(), *row.tensors()).calls) == 1
