"""The point of it all: the logits never exist, measured by the operating system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.loss.case import Case
from benchmarks.loss.measure import measure


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_extra_peak_memory_is_at_most_035_of_inductors():
    """N=2048, D=512, V=32000 in f32, forward and backward, gradients included. Inductor holds the
    logits once and the gradients (``python -m benchmarks`` measures 319 MiB)."""
    n, d, v = 2048, 512, 32000
    (fused,) = measure([Case("fusedce", n, d, v, "float32", "cpu", True)], rounds=0)
    assert not fused.failure
    assert fused.extra_bytes
    assert round(fused.extra_bytes / (4 * (n * v + v * d + n * d)), 2) <= 0.35


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_a_whole_model_that_returns_its_logits():
    """V=64000, 2048 rows, hidden 128, AdamW: the whole process's peak during a training step.

    Inductor's is 2238 MiB and takes minutes to find out, so it is not run here. That was torch
    2.13.0 for CPUs, of which 406 MiB are there when all is imported; builds for CUDA bring more
    (2.11.0: 655 MiB). One copy of the logits, 500 MiB, would be over the bound.
    """
    program = [sys.executable, "-m", "tests.support.llama_step", "fusedce"]
    environment = {**os.environ, "FUSEDCE_INNER": "aot_eager"}
    done = subprocess.run(program, check=True, capture_output=True, text=True, env=environment)
    peak, imported = map(int, done.stdout.split())
    assert peak - imported <= 0.45 * (2238 << 20) - (406 << 20)


DIGEST = """
import torch
from fxpass.cli.memory import Memory
from fxpass.op.fingerprint import ReadOrder, fingerprint

weight = torch.ones(1 << 13, 1 << 12, dtype={dtype})[:, {columns}]
memory = Memory(torch.device("cpu"))
memory.start()
fingerprint(weight, ReadOrder.of(weight))
print(memory.added())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize(("dtype", "columns"), [("torch.float32", ":"), ("torch.bfloat16", "1:")])
def test_a_digest_leaves_no_holes_in_the_heap(dtype, columns):
    """128 MiB, with the C library's own thresholds."""
    program = DIGEST.format(dtype=dtype, columns=columns)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert int(done.stdout) <= 24 << 20, done.stderr
