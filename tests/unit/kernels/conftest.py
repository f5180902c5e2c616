"""The GPUs that kernels are compiled for: ``target``, and ``nvidia`` for those whose code is read."""

from __future__ import annotations

from tests.support.compiled import TARGETS

NAMED = {"target": TARGETS, "nvidia": ("sm_80", "sm_90", "sm_100")}


def pytest_generate_tests(metafunc):
    for name in NAMED.keys() & set(metafunc.fixturenames):
        metafunc.parametrize(name, NAMED[name])
