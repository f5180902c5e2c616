"""Combinations of features, launched through Triton's own binder and front end for GPUs that need
not be there: each launch binds, its kernel compiles to Triton's IR, and it is the one that
``for_call`` lists. See ``tests/support/driver.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# cases of launches, and of captures, in the quick tier and for each seed of the full one
COUNTS = {"launch_cases": (40, 16), "reduction_launches": (12, 6)}
MANY = {"launch_cases": (400, 100), "reduction_launches": (60, 15)}
MODULES = pytest.mark.parametrize("module", COUNTS)


def check(module: str, what: str, seed: int, count: int) -> None:
    """In a process of its own: TRITON_INTERPRET decides at import what a kernel is."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", f"tests.support.{module}", what, str(seed), str(count)],
        cwd=Path(__file__).parents[3],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert not process.returncode, process.stderr
    found = json.loads(process.stdout)
    assert found["launches"] > count
    assert not found["failures"], "\n".join(found["failures"])


@MODULES
def test_launches(module):
    check(module, "launches", seed=0, count=COUNTS[module][0])


@MODULES
def test_a_capture_loads_nothing_that_the_warm_up_did_not(module):
    """Whatever the numbers of rows, and wherever their tensors lie."""
    check(module, "rows", seed=0, count=COUNTS[module][1])


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
@MODULES
def test_many_launches(module, seed):
    check(module, "launches", seed, count=MANY[module][0])


@pytest.mark.full
@pytest.mark.parametrize("seed", [1])
@MODULES
def test_many_captures(module, seed):
    check(module, "rows", seed, count=MANY[module][1])
