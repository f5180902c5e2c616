"""Every row is what it says, in the first way and in its own; in the full tier also in a dealt one."""

from __future__ import annotations

import warnings
import zlib

import pytest
import torch

from tests.programs.catalog import catalog
from tests.programs.operands import OPERANDS, TRAINED
from tests.programs.row import RAISES, Row
from tests.support import row_tags
from tests.support.oracle import FIRST, WAYS, check

ROWS = {f"{row.kind}: {row.name}": row for row in catalog(libraries=False)}
# Each row runs in one of them, so that each way meets rows of each kind.
DEALT = (
    *("aot_eager", "bf16", "autocast", "dynamic", "no_grad", "chunks"),
    *("outside", "checkpointed", "exported"),
)


def dealt(row: Row) -> str:
    """The way of a row that the hash of its name draws."""
    ways = [way for way in DEALT if way not in (*row.ways, *row.never)]
    return ways[zlib.crc32(row.name.encode()) % len(ways)]


OWN = [(name, way) for name, row in ROWS.items() for way in (FIRST, *row.ways)]


def test_names_are_unique_and_operands_known():
    assert len(ROWS) == len(catalog(libraries=False))
    for row in ROWS.values():
        assert set(row.names) <= OPERANDS.keys()
        assert set(row.gradients) <= TRAINED
        assert {*row.ways, *row.never, *row.computes} <= WAYS.keys()


@pytest.mark.parametrize(("name", "way"), OWN, ids=[f"{name} [{way}]" for name, way in OWN])
def test_row(name, way):
    check(ROWS[name], way)


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_row_in_a_dealt_way(name):
    check(ROWS[name], dealt(ROWS[name]))


@pytest.mark.full
@pytest.mark.parametrize("name", ROWS)
def test_tags_keep_their_promises(name):
    row = ROWS[name]
    if row.becomes != RAISES:
        with warnings.catch_warnings(), torch._dynamo.config.patch(**row.dynamo):
            warnings.simplefilter("ignore")  # of libraries, and of torch about them
            with torch.set_grad_enabled(bool(row.gradients)):
                found = row_tags.check(row.program(), *row.tensors(), dynamic=False)
        assert not found.wrong
