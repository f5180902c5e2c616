"""Measures one case with every provider: numerics first, then memory, then time.

In: a case, names of providers, an :class:`Effort`. Out: the rows of a :class:`Result`.

Every provider runs in a separate process, and the providers step in turn, so that a drift of the
machine's speed affects all of them. A provider whose error against float64 exceeds twice eager's
error is refused.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.loss.case import CHECKED_ROWS, Case
from benchmarks.loss.providers import BARE, PROVIDERS
from benchmarks.loss.rows import Result, Row, skipped, wrong
from benchmarks.process import Worker, WorkerError

WORKER = "benchmarks.loss.worker"
Say = Callable[[str], None]


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
    run(result, [case.provider for case in cases], Effort(rounds), lambda text: None)
    return result.rows


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def run(result: Result, names: Sequence[str], effort: Effort, say: Say = say) -> None:
    """Measures ``result.case`` with each provider and fills ``result.rows``.

    Raises:
        KeyboardInterrupt: after Ctrl-C; the rows have the measurements so far, and all processes
            have ended.
    """
    result.rows = [Row(name) for name in names]
    workers: dict[str, Worker] = {}
    try:
        _start(result, effort, workers)
        for row in sorted(result.rows, key=lambda row: row.name != "eager"):
            if row.name in workers:
                _attempt(row, workers, lambda row=row: _check(row, result, effort, workers, say))
                say(f"  {_progress(row)}")
        _take_turns(result, effort, workers, say)
    except BaseException:
        for row in result.rows:
            row.failure = row.failure or ("" if row.seconds else "interrupted")
        for worker in workers.values():
            worker.kill()
        raise
    for worker in workers.values():
        worker.close()


def _start(result: Result, effort: Effort, workers: dict[str, Worker]) -> None:
    """Starts a process for each provider that can run; they import at the same time."""
    for row in result.rows:
        provider = PROVIDERS.get(row.name)
        why = provider.problem(result.case) if provider else f"no provider {row.name}"
        if why:
            row.failure = skipped(row.name, why).failure
        else:
            workers[row.name] = Worker(WORKER, result.case.to(row.name), effort.timeout)
    for row in result.rows:
        if row.name in workers:
            _attempt(row, workers, workers[row.name].answer)


def _attempt(row: Row, workers: dict[str, Worker], function: Callable[[], object]) -> None:
    """Calls the function; if the provider's process fails, stores the reason in its row."""
    try:
        function()
    except WorkerError as error:
        row.failure = str(error)
        row.log = workers.pop(row.name).log


def _check(row: Row, result: Result, effort: Effort, workers: dict[str, Worker], say: Say) -> None:
    """Compares a provider with float64, then measures its memory."""
    worker = workers[row.name]
    answer = worker.ask("check")
    row.errors, row.first_seconds = answer["errors"], answer["seconds"]
    if row.name == "eager":
        result.eager = row.errors
    if row.name != BARE:
        if not result.eager:
            result.eager = _eager_errors(result.case, effort, say)
        row.failure = wrong(row.errors, result.eager, result.case.dtype)
    if row.failure:
        workers.pop(row.name).close()
        return
    if answer["rehearsed"] or answer["seconds"] <= effort.seconds:
        answer = worker.ask("measure")
    row.extra_bytes = answer["bytes"]
    seconds = answer["seconds"]
    if seconds is not None and seconds > effort.seconds:
        row.seconds, row.alone = [seconds], True
        workers.pop(row.name).close()


def _eager_errors(case: Case, effort: Effort, say: Say) -> dict[str, float]:
    """Eager's errors with few rows, if eager is not measured or ran out of memory.

    Raises:
        WorkerError: eager fails with few rows too.
    """
    few = dataclasses.replace(case.to("eager"), n=min(case.n, CHECKED_ROWS))
    say(f"  eager's own errors, at {few.n} rows")
    worker = Worker(WORKER, few, effort.timeout)
    try:
        worker.answer()
        return worker.ask("check")["errors"]
    except WorkerError as error:
        raise WorkerError(f"refused: eager's own errors are unknown: {error}") from None
    finally:
        worker.close()


def _take_turns(result: Result, effort: Effort, workers: dict[str, Worker], say: Say) -> None:
    """Runs rounds of one step of each provider, until the rounds or the time limits end."""

    def step(row: Row) -> None:
        row.seconds.append(workers[row.name].ask("step")["seconds"])

    for _ in range(effort.rounds):
        for row in result.rows:
            spent = sum(row.seconds) + (row.median or 0)
            if row.name in workers and (not row.seconds or spent <= effort.seconds):
                _attempt(row, workers, lambda row=row: step(row))
                if row.failure:
                    row.seconds.clear()
                    say(f"  {_progress(row)}")


def _progress(row: Row) -> str:
    if row.failure:
        return f"{row.name}: {row.failure}"
    size = "" if row.extra_bytes is None else f", {row.extra_bytes / 2**20:.0f} MiB"
    return f"{row.name}: first step {row.first_seconds or 0:.2f} s{size}"
