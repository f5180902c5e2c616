"""The cases of :mod:`tests.ranks.tables` for four ranks, on one world of real process groups."""

from __future__ import annotations

import pytest

from tests.ranks import case
from tests.ranks.tables import CASES


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].world == 4])
def test_ranks(name, worlds):
    """The ranks do what the case says."""
    case.check(CASES[name], worlds[4].run("tests.ranks.tables", name))
