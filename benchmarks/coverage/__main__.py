"""``python -m benchmarks.coverage``: lists the classes of transformers whose losses fuse.

It makes a tiny model of every class of the causal-LM, masked-LM, sequence-to-sequence and
image-text-to-text mappings, fuses it and compares it with eager
(:mod:`benchmarks.coverage.worker`), each in a separate process. It appends each row to a file of
JSON lines; a new run continues this file. At the end it writes the table::

    python -m benchmarks.coverage --rows rows.jsonl --table benchmarks/coverage/results.md
    python -m benchmarks.coverage --rows rows.jsonl --only 'Gemma|T5'   # again, these
    python -m benchmarks.coverage --rows rows.jsonl --failed            # again, what did not fuse
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.coverage.table import FORMS, FUSED, kind, outcome, table

Row = dict[str, Any]


def main() -> None:
    """Parses the command line, fills the file of rows, writes the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--rows", type=Path, default=Path("coverage.jsonl"), help="appended to")
    parser.add_argument("--table", type=Path, help="where the table is written")
    parser.add_argument("--only", default="", help="a pattern: run these, again if need be")
    parser.add_argument("--failed", action="store_true", help="run again what did not fuse")
    parser.add_argument("--inner", default="eager", help="who compiles what fxpass gives it")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=240, help="limit for one class")
    args = parser.parse_args()
    rows = read(args.rows)
    names = wanted(rows, args.only, args.failed)
    for done, row in enumerate(run(names, args.inner, args.jobs, args.seconds), 1):
        rows[row["name"]] = row
        with args.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        outcomes = ", ".join(outcome(row, form) for form in FORMS)
        print(f"{done}/{len(names)} {row['name']}: {outcomes}", flush=True)
    if args.table:
        args.table.write_text(table(rows, args.inner))


def read(file: Path) -> dict[str, Row]:
    """Class name → the latest row of it."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {row["name"]: row for row in map(json.loads, lines)}


def wanted(rows: dict[str, Row], only: str, failed: bool) -> list[str]:
    """The classes to run: those without a row, or those that are asked for."""
    from benchmarks.coverage.models import classes

    if only:
        return [name for name in classes() if re.search(only, name)]
    if failed:
        return [
            name
            for name in classes()
            if name not in rows or any(kind(outcome(rows[name], f)) != FUSED for f in FORMS)
        ]
    return [name for name in classes() if name not in rows]


# ---------------------------------------------------------------- processes


@dataclass
class _Job:
    name: str
    process: Any
    answer: multiprocessing.connection.Connection
    end: float


def run(names: list[str], inner: str, jobs: int, seconds: float) -> Iterator[Row]:
    """The rows, in the order in which they finish; a crash or timeout is stored in the row."""
    from benchmarks.coverage.worker import warm_up

    warm_up()  # once: all workers are forked from this process
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), []
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(_start(context, waiting.pop(0), inner, seconds))
        job = _next_done(running)
        running.remove(job)
        yield _finish(job)


def _start(context: Any, name: str, inner: str, seconds: float) -> _Job:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(name, inner, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Job(name, process, ours, time.monotonic() + seconds)


def _work(name: str, inner: str, answer: multiprocessing.connection.Connection) -> None:
    from benchmarks.coverage.worker import examine

    begin = time.monotonic()
    row = examine(name, inner)
    answer.send({**row, "seconds": round(time.monotonic() - begin, 1)})
    answer.close()


def _next_done(running: list[_Job]) -> _Job:
    while True:
        left = min(job.end for job in running) - time.monotonic()
        handles = [job.answer for job in running]
        ready = multiprocessing.connection.wait(handles, timeout=max(left, 0))
        for job in running:
            if job.answer in ready or time.monotonic() > job.end:
                return job


def _finish(job: _Job) -> Row:
    try:
        row = job.answer.recv() if job.answer.poll() else None
        why = "took too long"
    except EOFError:
        job.process.join()
        row, why = None, f"its process ended with exit code {job.process.exitcode}"
    job.process.kill()
    job.process.join()
    job.answer.close()
    return row or {"name": job.name, "stage": "crash", "error": why}


if __name__ == "__main__":
    main()
