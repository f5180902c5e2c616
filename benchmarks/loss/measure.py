"""Measures one case with every provider: numerics first, then memory, then time.

In: a case, names of providers, an :class:`Effort`. Out: the rows of a :class:`Result`.

Every provider runs in a separate process, and the providers step in turn, so that a drift of the
machine's speed affects all of them. A provider whose error against float64 exceeds twice eager's
error is refused.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.loss.case import CHECKED_ROWS, Case
from benchmarks.loss.kinds import KINDS, Kind
from benchmarks.loss.providers import BARE
from benchmarks.loss.rows import Result, Row
from benchmarks.process import EXACT_MEMORY, Worker, WorkerError

Say = Callable[[str], None]
MEASURED = 3  # steps whose memory a second process measures; the median counts


class Effort(NamedTuple):
    """The limits of a measurement.

    Attributes:
        rounds: steps of each provider.
        seconds: time limit of a provider's steps; it steps at least once.
        timeout: seconds that a command may take before its provider is stopped.
    """

    rounds: int = 7
    seconds: float = math.inf
    timeout: float = 1800.0


def measure(cases: Sequence[Case], rounds: int) -> list[Row]:
    """The rows of some providers of one case, each step as long as it takes."""
    result = Result("", cases[0].to(""))
    run(result, [case.provider for case in cases], Effort(rounds), say=lambda text: None)
    return result.rows


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def run(
    result: Result,
    names: Sequence[str],
    effort: Effort,
    kind: Kind = KINDS["loss"],
    say: Say = say,
) -> None:
    """Measures ``result.case`` with each provider and fills ``result.rows``.

    Raises:
        KeyboardInterrupt: after Ctrl-C; the rows have the measurements so far, and all processes
            have ended.
    """
    with tempfile.TemporaryDirectory(prefix="fxpass-benchmarks-") as caches:
        _Run(result, names, effort, kind, say, caches if kind.twice else "").all()


class _Run:
    """The processes of one case.

    Attributes:
        caches: the folder of Inductor's caches; empty: the usual one.
    """

    def __init__(
        self,
        result: Result,
        names: Sequence[str],
        effort: Effort,
        kind: Kind,
        say: Say,
        caches: str,
    ) -> None:
        self.result, self.effort, self.kind, self.say = result, effort, kind, say
        self.caches = caches
        self.workers: dict[str, Worker] = {}
        result.rows = [Row(name) for name in dict.fromkeys([*kind.always, *names])]

    def all(self) -> None:
        """Fills the rows."""
        rows = self.result.rows
        try:
            for row in rows:  # the processes import at the same time
                self._start(row)
            for row in rows:
                self._attempt(row, lambda worker, row: worker.answer())
            for row in sorted(rows, key=lambda row: row.name != "eager"):
                if row.name in self.workers:
                    self._attempt(row, self._check)
                    self.say(f"  {_progress(row)}")
            self._take_turns()
            self._close()
            for row in rows if self.kind.twice else ():
                if not row.failure:
                    self._start(row, **EXACT_MEMORY)
                    self._attempt(row, self._again)
                    self._close()
        except BaseException:
            for row in rows:
                row.failure = row.failure or ("" if row.seconds else "interrupted")
            for worker in self.workers.values():
                worker.kill()
            raise

    def _start(self, row: Row, **environ: str) -> None:
        """Starts a process, if the provider can run."""
        provider, case = self.kind.providers.get(row.name), self.result.case
        why = provider.problem(case) if provider else f"no provider {row.name}"
        if why:
            row.failure = f"not run: {why}"
            return
        cache = str(Path(self.caches, row.name)) if self.caches else ""
        case = case.to(row.name, cache)
        self.workers[row.name] = Worker(self.kind.worker, case, self.effort.timeout, **environ)

    def _close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    def _attempt(self, row: Row, function: Callable[[Worker, Row], object]) -> None:
        """Calls the function; if the provider's process fails, stores the reason in its row."""
        if row.name not in self.workers:
            return
        try:
            function(self.workers[row.name], row)
        except WorkerError as error:
            row.failure = str(error)
            row.log = self.workers.pop(row.name).log
            row.seconds.clear()

    def _check(self, worker: Worker, row: Row) -> None:
        """Compares a provider with float64, then measures its memory."""
        case = self.result.case
        answer = checked = worker.ask("check")
        row.errors, row.first_seconds = answer["errors"], answer["seconds"]
        row.zeros = answer.get("zeros", {})
        if row.name == "eager":
            self.result.eager = row.errors
        if row.name != BARE:
            self.result.eager = self.result.eager or self._eager_errors()
            row.failure = self.kind.refuses(row.errors, self.result.eager, case.dtype)
        if row.failure or not self.kind.measures:
            self.workers.pop(row.name).close()
            return
        row.matched, row.rejected = answer.get("matched", 0), answer.get("rejected", 0)
        if answer["rehearsed"] or answer["seconds"] <= self.effort.seconds:
            answer = worker.ask("measure")
            row.compile_seconds = _compilation(row, checked["seconds"], answer["seconds"])
        row.extra_bytes = answer["bytes"]
        seconds = answer["seconds"]
        if seconds is not None and seconds > self.effort.seconds:
            row.seconds, row.alone = [seconds], True
            self.workers.pop(row.name).close()

    def _eager_errors(self) -> dict[str, float]:
        """Eager's errors with few rows, if eager is not measured or ran out of memory.

        Raises:
            WorkerError: eager fails with few rows too.
        """
        few = self.result.case.to("eager")
        few = dataclasses.replace(few, n=min(few.n, CHECKED_ROWS))
        self.say(f"  eager's own errors, at {few.n} rows")
        worker = Worker(self.kind.worker, few, self.effort.timeout)
        try:
            worker.answer()
            return worker.ask("check")["errors"]
        except WorkerError as error:
            raise WorkerError(f"refused: eager's own errors are unknown: {error}") from None
        finally:
            worker.close()

    def _again(self, worker: Worker, row: Row) -> None:
        """Compiles in a second process, and measures memory there."""
        worker.answer()
        first = worker.ask("check")["seconds"]
        answers = [worker.ask("measure") for _ in range(MEASURED)]
        row.second_seconds = _compilation(row, first, answers[0]["seconds"])
        if row.extra_bytes is not None:
            row.extra_bytes = round(statistics.median(answer["bytes"] for answer in answers))

    def _take_turns(self) -> None:
        """Runs rounds of one step of each provider, until the rounds or the time limits end."""
        for _ in range(self.effort.rounds):
            for row in self.result.rows:
                spent = sum(row.seconds) + (row.median or 0)
                if row.name in self.workers and (not row.seconds or spent <= self.effort.seconds):
                    self._attempt(row, _step)
                    if row.failure:
                        self.say(f"  {_progress(row)}")


def _step(worker: Worker, row: Row) -> None:
    row.seconds.append(worker.ask("step")["seconds"])


def _compilation(row: Row, first: float, second: float | None) -> float | None:
    """Seconds of a first step without those of a step; of a provider that compiles."""
    compiles = second is not None and row.name not in ("eager", BARE)
    return max(first - second, 0.0) if compiles and second is not None else None


def _progress(row: Row) -> str:
    if row.failure:
        return f"{row.name}: {row.failure}"
    size = "" if row.extra_bytes is None else f", {row.extra_bytes / 2**20:.0f} MiB"
    return f"{row.name}: first step {row.first_seconds or 0:.2f} s{size}"
