"""Combinations of features, launched through Triton's own binder and front end for GPUs that need
not be there: each launch binds, its kernel compiles to Triton's IR, and it is the one that
``for_reductions`` lists. See ``tests/support/driver.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def check(what: str, seed: int, count: int) -> None:
    """In a process of its own: TRITON_INTERPRET decides at import what a kernel is."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.launch_cases", what, str(seed), str(count)],
        cwd=Path(__file__).parents[3],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert not process.returncode, process.stderr
    found = json.loads(process.stdout)
    assert found["launches"] > count
    assert not found["failures"], "\n".join(found["failures"])


def test_launches():
    check("launches", seed=0, count=24)


def test_a_capture_loads_nothing_that_the_warm_up_did_not():
    """Whatever the numbers of rows, and wherever their tensors lie."""
    check("rows", seed=0, count=12)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_many_launches(seed):
    check("launches", seed, count=150)


@pytest.mark.full
def test_many_captures():
    check("rows", seed=1, count=60)
