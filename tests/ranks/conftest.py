"""Ranks that stay up for all cases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import World


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[int, World]]:
    """By their number of ranks; they are started by the first case."""
    found = {size: World(size, "tests.ranks.tables") for size in (2, 4)}
    yield found
    for world in found.values():
        world.stop()
