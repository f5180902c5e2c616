"""The tests of ``fxpass.match`` are about known formulas: what has none is left as it is."""

import pytest


@pytest.fixture(autouse=True)
def _known_formulas(known_formulas):
    """Without row regions, which would fuse what ``fxpass.match`` declines."""
