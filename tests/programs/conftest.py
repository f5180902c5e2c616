"""Each module of rows is a test file: ``pytest tests/programs/rows/entropies.py -k Categorical``.

Its tests are ``test_row``, every row in the first way and in its own ways, and in the full tier
``test_dealt``, the values of some in one more way.
"""

from __future__ import annotations

import types
import zlib

import pytest

from tests.programs.catalog import LIBRARIES, of
from tests.programs.row import Row
from tests.support.oracle import FIRST, check, outcome

# Rows run in one of them in the full tier, so that each way meets rows of each kind.
DEALT = (
    *("aot_eager", "bf16", "autocast", "dynamic", "no_grad", "chunks"),
    *("outside", "checkpointed", "exported"),
)
# Of so many rows, one is dealt a way.
EACH = 8


def _number(row: Row) -> int:
    return zlib.crc32(row.name.encode())


def dealt(row: Row) -> str:
    """The way of a row that the hash of its name draws."""
    ways = [way for way in DEALT if way not in (*row.ways, *row.never)]
    return ways[_number(row) // EACH % len(ways)]


class Rows(pytest.Module):
    """The tests of a module of rows."""

    def _getobj(self) -> types.ModuleType:
        rows = {row.name: row for row in of(self.path.stem)}
        own = [(name, way) for name, row in rows.items() for way in (FIRST, *row.ways)]

        @pytest.mark.parametrize(("name", "way"), own, ids=[f"{n} [{way}]" for n, way in own])
        def test_row(name: str, way: str) -> None:
            check(rows[name], way)

        drawn = [name for name, row in rows.items() if not _number(row) % EACH]

        @pytest.mark.full
        @pytest.mark.parametrize("name", drawn)
        def test_dealt(name: str) -> None:
            assert not outcome(rows[name], dealt(rows[name])).wrong

        module = types.ModuleType(f"tests of {self.path.stem}")
        some = drawn and self.path.stem not in LIBRARIES
        tests = [test_row, test_dealt] if some else [test_row]
        vars(module).update({test.__name__: test for test in tests})
        return module


def pytest_collect_file(file_path, parent):
    """Modules of rows; those of a library in the full tier, and where it is installed."""
    if file_path.parent.name == "rows" and file_path.suffix == ".py":
        return Rows.from_parent(parent, path=file_path)
    return None
