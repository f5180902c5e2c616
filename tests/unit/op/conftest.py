"""What several tests of the operators need."""

from __future__ import annotations

import pytest

from tests.support.reduction_cases import implement


@pytest.fixture
def few(monkeypatch):
    """Reductions in chunks of 3 rows, blocks of 2 rows, products of 4 classes."""
    implement("chunked", monkeypatch)


@pytest.fixture
def tiled(monkeypatch):
    """Reductions in tiles of 3 rows and 4 classes."""
    implement("tiled", monkeypatch)
