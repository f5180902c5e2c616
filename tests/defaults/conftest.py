"""Tests of what users get who set nothing: other tests fuse losses of any size."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    monkeypatch.delenv("FUSEDCE_MIN_LOGITS_MB")
