"""The benchmarks refuse numbers from a provider that computes something else."""

from __future__ import annotations

import pytest

from benchmarks import providers
from benchmarks.__main__ import Row, measure, table, wrong
from benchmarks.worker import Case, errors

EAGER = {"eager loss": 1e-7, "eager dx": 1e-6, "eager dw": 1e-6}


@pytest.mark.parametrize(
    ("off", "reason"),
    [
        ({}, ""),
        ({"dw": 3e-6}, ""),  # within twice eager's error and the floor
        ({"dw": 1e-3}, "dw is off by 1.0e-03"),
        ({"loss": float("nan")}, "loss is off"),
    ],
)
def test_what_counts_as_wrong(off, reason):
    found = wrong({"loss": 1e-7, "dx": 1e-6, "dw": 1e-6, **EAGER, **off}, "float32")
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


def case(provider: str) -> Case:
    return Case(provider, 8, 4, 16, "float32", "cpu", True)


def test_errors_are_against_float64():
    right = errors(providers.plain, case("eager"))
    assert right["dw"] == right["eager dw"] < 1e-6
    half = errors(lambda x, w, t: providers.plain(x, w, t) / 2, case("eager"))
    assert half["loss"] == pytest.approx(0.5, rel=1e-3)
    assert "loss is off" in wrong(half, "float32")


def test_a_provider_that_fails_has_a_reason_and_no_numbers():
    eager, broken = measure([case("eager"), case("no such provider")], rounds=1)
    assert eager.seconds
    assert not eager.failure
    assert not broken.seconds
    assert "no such provider" in broken.failure


def test_the_table_compares_with_inductor_round_by_round():
    rows = [
        Row("inductor", seconds=[1.0, 2.0, 4.0], extra_bytes=4 << 20),
        Row("fusedce", seconds=[0.5, 1.0, 2.0], extra_bytes=1 << 20),
        Row("broken", failure="dx is off"),
    ]
    _, _, inductor, fused, broken = table(rows).splitlines()
    assert inductor == "| inductor | 2000 | 1000-4000 | 1.00 | 4 | 1.00 |"
    assert fused == "| fusedce | 1000 | 500-2000 | 0.50 | 1 | 0.25 |"
    assert "dx is off" in broken
