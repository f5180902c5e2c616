"""Trains one model with several providers, which take turns.

In: a job, names of providers. Out: a :class:`Row` for each. The other processes wait while a step
is timed, so that a drift of the machine's speed affects all providers. A program's whole training
is one step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks.process import EXACT_MEMORY, Worker, WorkerError
from benchmarks.training.job import Job
from benchmarks.training.table import Row, judge
from fxpass.cli.demo import print_progress
from fxpass.cli.demo_worker import MEASURED_STEP

WORKER = "benchmarks.training.worker"


def train(job: Job, names: Sequence[str], rounds: int, timeout: float) -> list[Row]:
    """Trains eager and the named providers.

    Args:
        job: the sizes; its provider is replaced.
        rounds: timed steps of each provider.
        timeout: seconds that a step may take.

    Returns:
        the rows, eager first. Ctrl-C ends the training and returns the steps so far.
    """
    rows = [Row(name) for name in dict.fromkeys(["eager", *names])]
    workers: dict[str, Worker] = {}

    def answer(row: Row) -> dict[str, Any]:
        try:
            return workers[row.name].answer()
        except WorkerError as error:
            row.failure, row.log = str(error), workers.pop(row.name).log
            print_progress(f"{row.name}: {row.failure}")
            return {}

    def take(turn: Sequence[Row]) -> None:
        alive = [row for row in turn if row.name in workers]
        for row in alive:
            workers[row.name].send("step")
        for row in alive:
            if found := answer(row):
                row.add(found)

    alone = [[row] for row in rows]
    # compilation for a GPU times kernels, so processes must not compile at the same time
    warm_up = [rows] if job.device == "cpu" else alone
    turns = [*warm_up * MEASURED_STEP, *alone * (1 + rounds)]
    try:
        for row in rows:  # the processes import at the same time
            of_row = dataclasses.replace(job, provider=row.name)
            environ = EXACT_MEMORY if job.program else {}
            workers[row.name] = Worker(WORKER, of_row, timeout, **environ)
        for row in rows:
            answer(row)
        for turn in alone if job.program else turns:
            take(turn)
        for worker in workers.values():
            worker.close()
    except KeyboardInterrupt:
        print_progress("interrupted")
    finally:  # the processes also end if this one is told to, or cannot print
        for worker in workers.values():
            worker.kill()
    judge(rows, job.dtype, job.program)
    return rows
