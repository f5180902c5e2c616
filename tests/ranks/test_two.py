"""The cases of :mod:`tests.ranks.tables` for two ranks, on one world of real process groups."""

from __future__ import annotations

import pytest

from tests.ranks import case
from tests.ranks.tables import CASES


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].world == 2])
def test_ranks(name, worlds):
    """The ranks do what the case says."""
    case.check(CASES[name], worlds[2].run("tests.ranks.tables", name))
