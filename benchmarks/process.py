"""A worker process that answers one command at a time, with a timeout.

:class:`Worker` is the driver's side: a module and its job in, answers out, or an error if the
process raised, died, or took too long. :func:`serve` is the worker's side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

GRACE = 30.0  # seconds that a process may take to end
LOG = 4000  # characters of the output that are stored
# glibc returns freed tensors to the system at once, which takes time: resident memory is the memory
# of live tensors
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class WorkerError(Exception):
    """The worker gave no answer and has ended; the message has the reason."""


class Worker:
    """A process of ``python -m module job``; its first answer means that it is ready.

    Args:
        module: the module to run; it calls :func:`serve`.
        job: a dataclass, passed to the module as JSON.
        timeout: seconds that one answer may take.
        environ: what is added to the environment.
    """

    def __init__(self, module: str, job: Any, timeout: float, **environ: str) -> None:
        self.timeout, self.log = timeout, ""
        self.printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 (close() closes it)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(dataclasses.asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.printed,
            text=True,
            env={**os.environ, **environ},
        )

    def send(self, command: str) -> None:
        """Sends one command; the caller has to read its answer."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            WorkerError: the process gave no answer and has ended.
        """
        assert self.process.stdout
        begin = time.monotonic()
        timer = threading.Timer(self.timeout, self.process.kill)
        timer.daemon = True
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        late = time.monotonic() - begin >= self.timeout
        found = json.loads(line) if line else {"error": ""}
        if "error" not in found:
            return found
        self.kill() if line else self.close()
        raise WorkerError(found["error"] or self._how_it_died(late))

    def ask(self, command: str) -> dict[str, Any]:
        """The answer to one command; raises as :meth:`answer`."""
        self.send(command)
        return self.answer()

    def _how_it_died(self, late: bool) -> str:
        code = self.process.returncode
        if late:
            return f"took more than {self.timeout:g} s"
        if code == -signal.SIGKILL:
            return "killed by the system, most likely because of its memory"
        last = (self.log.strip().splitlines() or ["it printed no reason"])[-1]
        return f"ended with status {code}: {last[:150]}"

    def kill(self) -> None:
        """Ends the process now."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Ends the process after its current command; stores the end of its output in ``log``."""
        if self.printed.closed:
            return
        try:
            self.process.communicate(timeout=GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self.printed.seek(0)
        self.log = self.printed.read()[-LOG:]
        self.printed.close()


def serve(make: Callable[[dict[str, Any]], Any]) -> None:
    """Makes a session from the JSON in the first argument; answers until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints must not look like answers
    session = None
    for command in itertools.chain([""], sys.stdin):
        found: dict[str, Any] = {}
        try:
            if session is None:
                session = make(json.loads(sys.argv[1]))
            else:
                found = getattr(session, command.strip())()
        except Exception as error:
            traceback.print_exc()
            found = {"error": reason(error)}
        print(json.dumps(found), file=results, flush=True)


def reason(error: Exception) -> str:
    """An exception in one line; those of Dynamo and the allocator have several lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {' '.join(lines[:2])}"
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
        text = f"out of memory: {lines[0]}"
    return text if len(text) <= 200 else text[:197] + "..."
