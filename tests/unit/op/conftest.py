"""What several tests of the engine need."""

from __future__ import annotations

import pytest

from tests.support.reduction_cases import D, N, V, implement, where


@pytest.fixture
def few(monkeypatch):
    """Reductions in chunks of 3 rows, blocks of 2 rows, products of 4 classes."""
    implement("chunked", monkeypatch)


@pytest.fixture
def tiled(monkeypatch):
    """Reductions in tiles of 3 rows and 4 classes."""
    implement("tiled", monkeypatch)


@pytest.fixture
def sizes(way, device, monkeypatch):
    """The engine runs an implementation. Of kernels also rows of several blocks."""
    implement(way, monkeypatch)
    with where(way, device):
        yield [(N, D, V), (3, 5, 8200)] if way == "triton" else [(N, D, V)]
