"""Every case of :mod:`tests.ranks.tables`, on worlds of real process groups."""

from __future__ import annotations

import pytest

from tests.ranks import case
from tests.ranks.tables import CASES


@pytest.mark.parametrize("name", CASES)
def test_ranks(name, worlds):
    """The ranks do what the case says."""
    found = CASES[name]
    case.check(found, worlds[found.world].run("tests.ranks.tables", name))
