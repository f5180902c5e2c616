"""The GPUs that kernels are compiled for: ``target``, and ``nvidia`` for those whose code is read."""

from __future__ import annotations

from tests.support.compiled import TARGETS

NAMED = {"target": TARGETS, "nvidia": ("sm_80", "sm_90", "sm_100")}
LANDING = "sm_90"  # others with --targets all, as tests/README.md says


def pytest_generate_tests(metafunc):
    for name in NAMED.keys() & set(metafunc.fixturenames):
        every = metafunc.config.option.targets == "all"
        metafunc.parametrize(name, NAMED[name] if every else [LANDING])
