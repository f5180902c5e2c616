"""A worker's process: one command at a time, one answer at a time, and never longer than allowed.

In: a module that serves (:func:`benchmarks.loss.worker.serve`) and its job. Out: answers, or the
reason why there are none: the process raised, died, or took too long.
"""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

GRACE = 30.0  # seconds to end in, for a process that was asked to
LOG = 4000  # characters


class WorkerError(Exception):
    """The worker gave no answer and is gone; the message says why."""


class Worker:
    """A process of ``python -m module job``."""

    def __init__(self, module: str, job: str, timeout: float) -> None:
        """Starts it.

        Args:
            timeout: seconds that one answer may take.
        """
        self.timeout = timeout
        self.printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            text=True,
        )
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.log = ""

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            WorkerError: there is none; the process is gone.
        """
        try:
            line = self.lines.get(timeout=self.timeout)
        except queue.Empty:
            self.kill()
            raise WorkerError(f"took more than {self.timeout:g} s") from None
        if not line:
            raise WorkerError(self._how_it_died())
        found = json.loads(line)
        if "error" in found:
            self.kill()
            raise WorkerError(found["error"])
        return found

    def ask(self, command: str) -> dict[str, Any]:
        """The answer to one command.

        Raises:
            WorkerError: there is none; the process is gone.
        """
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        return self.answer()

    def _how_it_died(self) -> str:
        self.close()
        code = self.process.returncode
        if code == -signal.SIGKILL:
            return "killed by the system, most likely for its memory"
        last = (self.log.strip().splitlines() or ["no word of why"])[-1]
        return f"ended with status {code}: {last[:150]}"

    def kill(self) -> None:
        """Ends the process now."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Ends the process, which may finish what it does; keeps the end of what it printed."""
        if self.printed.closed:
            return
        assert self.process.stdin
        assert self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.printed.seek(0)
        self.log = self.printed.read()[-LOG:]
        self.printed.close()
