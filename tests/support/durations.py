"""What a test may take: ``pytest --limit-durations`` fails where one took longer, and names it.

No test has a clock inside: a limit is held where tests are scheduled, by ``.ci/run``.
"""

from __future__ import annotations

import pytest

# Seconds of one test's call. A machine of CI may be busy, and then takes longer by SLACK.
SECONDS = {"quick": 20, "full": 60}
SLACK = 3


class Durations:
    """A plugin that takes down the tests that took longer than their tier's limit."""

    def __init__(self) -> None:
        self.slow: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        limit = SECONDS["full" if "full" in report.keywords else "quick"]
        if report.when == "call" and report.duration > SLACK * limit:
            self.slow.append(f"{report.nodeid}: {report.duration:.0f} s, of {limit} s")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.slow:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.slow:
            terminalreporter.write_line(f"TOO SLOW {line}")
