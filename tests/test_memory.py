"""The point of it all: the logits never exist, measured by the operating system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import measure
from benchmarks.worker import Case


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_extra_peak_memory_is_at_most_a_third_of_inductors():
    """N=2048, D=512, V=32000 in f32, forward and backward, gradients included."""
    cases = [
        Case(provider, 2048, 512, 32000, "float32", "cpu", True)
        for provider in ("inductor", "fusedce")
    ]
    inductor, fused = measure(cases, rounds=0)
    assert not inductor.failure
    assert not fused.failure
    assert inductor.extra_bytes
    assert fused.extra_bytes
    assert fused.extra_bytes <= inductor.extra_bytes / 3


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_a_whole_model_that_returns_its_logits():
    """V=64000, 2048 rows, hidden 128, AdamW: the whole process's peak during a training step."""

    def peak(backend: str) -> int:
        program = [sys.executable, str(Path(__file__).with_name("llama_step.py")), backend]
        return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)

    assert peak("fusedce") <= 0.45 * peak("inductor")
