"""Runs the tests that launch kernels, in parts that take a few minutes each.

``python -m tests.gpu --part 1/4`` needs fxpass, installed, pytest and expecttest alone. Test modules
that need more, such as transformers, are left out. Several processes share a part, because the
tests spend most of their time compiling. After eight minutes no further test starts; the last lines
then say how many tests did not run. Other arguments go to pytest::

    python -m tests.gpu --part 1/4 -k descriptors
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import pytest


class Part:
    """A plugin that keeps every ``of``-th test, and starts none after the last second."""

    def __init__(self, number: int, of: int, seconds: float):
        self.number, self.of, self.end = number, of, time.monotonic() + seconds
        self.not_run: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        mine = items[self.number - 1 :: self.of]
        others = [item for place, item in enumerate(items) if place % self.of != self.number - 1]
        config.hook.pytest_deselected(items=others)
        items[:] = mine

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if time.monotonic() < self.end:
            return None
        self.not_run.append(item.nodeid)
        return True

    def pytest_sessionfinish(self, session):
        if self.not_run:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.not_run:
            count, first = len(self.not_run), self.not_run[0]
            terminalreporter.write_line(f"NOT RUN for lack of time: {count} tests from {first}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    add = parser.add_argument
    add("--part", default="1/1", metavar="I/N", help="the I-th of N parts")
    add("--minutes", type=float, default=8.0, help="of all processes; after them no test starts")
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    add("--jobs", type=int, default=jobs, help=f"processes (here: {jobs})")
    known, others = parser.parse_known_args(argv)
    number, of = (int(word) for word in known.part.split("/"))
    if not 1 <= number <= of:
        parser.error(f"--part {known.part}: there is no such part")
    if known.jobs == 1:
        part = Part(number, of, 60 * known.minutes)
        return pytest.main(["-q", "-m", "gpu", *others], plugins=[part])
    return _share(number, of, known.minutes, known.jobs, others)


def _share(number: int, of: int, minutes: float, jobs: int, others: list[str]) -> int:
    """Runs a part in several processes and prints the end of what each prints."""
    command = [sys.executable, "-m", "tests.gpu", "--jobs", "1", "--minutes", str(minutes)]
    started = [
        subprocess.Popen(
            [*command, "--part", f"{(number - 1) * jobs + job + 1}/{of * jobs}", *others],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job in range(jobs)
    ]
    nothing = pytest.ExitCode.NO_TESTS_COLLECTED  # a process may be without work
    codes = set()
    for job, process in enumerate(started, 1):
        out, _ = process.communicate()
        print(f"---------------- process {job} of {jobs}\n{out[-20000:]}", flush=True)
        codes.add(process.returncode)
    return max(codes - {nothing} or {int(nothing)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
