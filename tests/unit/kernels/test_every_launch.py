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
from typing import Any

import pytest


def printed(*command: str) -> dict[str, Any]:
    """In a process of its own: TRITON_INTERPRET decides at import what a kernel is."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=Path(__file__).parents[3],
        env=environ,
        capture_output=True,
        text=True,
    )
    assert not process.returncode, process.stderr
    return json.loads(process.stdout)


def assert_all_bind(what: str, seed: int, count: int) -> None:
    found = printed("tests.support.launch_cases", what, str(seed), str(count))
    assert found["launches"] > count
    assert not found["failures"], "\n".join(found["failures"])


def test_launches():
    assert_all_bind("launches", seed=0, count=12)


def test_a_capture_loads_nothing_that_the_warm_up_did_not():
    """Whatever the numbers of rows, and wherever their tensors lie."""
    assert_all_bind("rows", seed=0, count=6)


# of a step over N x D x V: launches, products of each size with the dtype of the result and beta,
# dtypes of the gradients, and the peak of what is allocated, gradients included
STEPS = {
    "bf16": {
        "launches": 4,
        "products": {
            "2048x4096x128256 bfloat16 beta=0": 4,
            "2048x128256x4096 bfloat16 beta=0": 4,
            "128256x2048x4096 bfloat16 beta=0": 1,
            "128256x2048x4096 bfloat16 beta=1": 3,
        },
        "dtypes": {"x": "bfloat16", "weight": "bfloat16"},
        "MiB": 1567,
    },
    "f32 sums": {  # the peak is of the operator, which rounds them
        "launches": 5,
        "products": {
            "3328x1024x151936 bfloat16 beta=0": 4,
            "3328x151936x1024 bfloat16 beta=0": 4,
            "151936x3328x1024 float32 beta=0": 1,
            "151936x3328x1024 float32 beta=1": 3,
            "3072x1024x151936 bfloat16 beta=0": 1,
            "3072x151936x1024 bfloat16 beta=0": 1,
            "151936x3072x1024 float32 beta=1": 1,
        },
        "dtypes": {"x": "bfloat16", "weight": "float32"},
        "MiB": 1589,
    },
    "f32 weight": {
        "launches": 4,
        "products": {
            "2048x2048x128256 bfloat16 beta=0": 4,
            "2048x128256x2048 float32 beta=0": 4,
            "128256x2048x2048 float32 beta=0": 1,
            "128256x2048x2048 float32 beta=1": 3,
        },
        "dtypes": {"x": "float32", "weight": "float32"},
        "MiB": 1567,
    },
    "in backward": {
        "launches": 8,
        "products": {
            "2048x2048x128256 bfloat16 beta=0": 4,
            "8192x2048x32256 bfloat16 beta=0": 3,
            "8192x32256x2048 float32 beta=0": 1,
            "32256x8192x2048 bfloat16 beta=0": 3,
            "8192x32256x2048 float32 beta=1": 2,
            "8192x2048x31488 bfloat16 beta=0": 1,
            "8192x31488x2048 float32 beta=1": 1,
            "31488x8192x2048 bfloat16 beta=0": 1,
        },
        "dtypes": {"x": "float32", "weight": "bfloat16"},
        "MiB": 1069,
    },
}


def test_what_a_step_of_a_gpu_takes():
    assert printed("tests.support.counted_steps") == STEPS


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 3))
def test_many_launches(seed):
    assert_all_bind("launches", seed, count=60)


@pytest.mark.full
def test_many_captures():
    assert_all_bind("rows", seed=1, count=60)
