"""``python -m benchmarks.parity``: checks that programs with few fused losses need no more memory.

It compiles each program of :mod:`benchmarks.parity.cases` with ``backend="fusedce"`` in two
processes: with fxpass, and with ``FUSEDCE=0``, the inner backend alone. They step in turn, and the
memory that a step adds is compared; then two others, whose times are. (Where memory is measured,
the allocator returns what is freed to the system at once, which takes time.)::

    python -m benchmarks.parity --markdown benchmarks/parity.md
    python -m benchmarks.parity --programs plain "cross-entropy, 16 chunks" --rounds 5

A program whose outputs or gradients differ from eager's is refused. The exit status is 1 if a
program is refused or takes more than ``LIMIT`` times the inner backend's memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.about import about, heading
from benchmarks.loss.measure import say
from benchmarks.loss.table import MIB
from benchmarks.parity.cases import PROGRAMS
from benchmarks.parity.worker import Job
from benchmarks.process import Worker, WorkerError

LIMIT = 1.05
# Distance from eager in float32, relative to the norm: thousands of terms summed in another order.
TOLERANCE = 1e-4
COLUMNS = ("program", "fused", "MiB", "MiB, FUSEDCE=0", "memory", "time")


@dataclass
class Row:
    """One program: bytes and seconds of every step, with fxpass and without.

    Attributes:
        failure: why there are no numbers; empty if there are.
        matched, rejected: losses.
    """

    program: str
    failure: str = ""
    matched: int = 0
    rejected: int = 0
    bytes: dict[bool, list[int]] = field(default_factory=lambda: {True: [], False: []})
    seconds: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})

    @property
    def memory(self) -> float:
        """The median of the bytes with fxpass, relative to the inner backend alone."""
        # a step may add 0 bytes, since memory is counted in pages
        ours, theirs = (max(1, statistics.median(self.bytes[on])) for on in (True, False))
        return ours / theirs

    @property
    def time(self) -> float:
        """The median of the seconds with fxpass, relative to the inner backend alone."""
        return statistics.median(self.seconds[True]) / statistics.median(self.seconds[False])

    @property
    def kept(self) -> bool:
        """Whether the program has numbers within the limit."""
        return not self.failure and self.memory <= LIMIT

    def cells(self) -> list[str]:
        """The cells of its line in the table."""
        if self.failure:
            return [self.program, "-", "-", "-", "-", self.failure.replace("|", "\\|")]
        mib = [f"{statistics.median(self.bytes[on]) / MIB:.0f}" for on in (True, False)]
        fused = f"{self.matched} of {self.matched + self.rejected}"
        over = "" if self.kept else f" (more than {LIMIT:g})"
        return [self.program, fused, *mib, f"{self.memory:.2f}{over}", f"{self.time:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, prints and writes; returns the exit status."""
    args = _parser().parse_args(argv)
    rows = []
    for i, program in enumerate(args.programs, 1):
        say(f"[{i}/{len(args.programs)}] {program}")
        rows.append(measure(program, args))
        say("  " + ", ".join(rows[-1].cells()[1:]))
    text = document(rows, args)
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text)
    return 0 if all(row.kept for row in rows) else 1


def measure(program: str, args: argparse.Namespace) -> Row:
    """Numerics first, then steps in turn."""
    row = Row(program)
    try:
        # glibc returns freed tensors to the system: resident memory is the memory of live tensors
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
        for on, answer in _measured("measure", row, args):
            if answer["bytes"] is None:
                raise WorkerError("the peak of memory is unknown on this platform")
            row.bytes[on].append(answer["bytes"])
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
        for on, answer in _measured("time", row, args):
            row.seconds[on].append(answer["seconds"])
    except WorkerError as error:
        row.failure = str(error)
    finally:
        os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    return row


def _measured(
    command: str, row: Row, args: argparse.Namespace
) -> Iterator[tuple[bool, dict[str, Any]]]:
    """What two new processes answer to a command, in turn, with fxpass and without; nothing if the
    results are wrong, which the row says then."""
    workers: dict[bool, Worker] = {}
    try:
        for on in (True, False):
            job = Job(row.program, args.n, args.d, args.v, args.inner, on)
            workers[on] = Worker("benchmarks.parity.worker", job, args.timeout)
        for worker in workers.values():
            worker.answer()
        for on, answer in zip(workers, _check(workers.values()), strict=True):
            row.failure = row.failure or wrong(on, answer["distance"])
            if on:
                row.matched, row.rejected = answer["matched"], answer["rejected"]
        for _ in range(0 if row.failure else args.rounds):
            for on, worker in workers.items():
                yield on, worker.ask(command)
    finally:
        for worker in workers.values():
            worker.close()


def _check(workers: Iterable[Worker]) -> list[dict[str, Any]]:
    """The workers' checks, in parallel: compilers use one thread each and take most of the time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda worker: worker.ask("check"), workers))


def wrong(on: bool, distance: float) -> str:
    """Why a program gets no numbers; empty if it does."""
    if distance <= TOLERANCE:
        return ""
    who = "with fxpass" if on else "with FUSEDCE=0"
    return f"refused: {who} the results are {distance:.1e} from eager's"


def document(rows: Sequence[Row], args: argparse.Namespace) -> str:
    """The table under its heading."""
    lines = [
        f"## Memory parity: {heading(about('cpu'))}",
        "",
        f"N={args.n} D={args.d} V={args.v}, float32, training, {args.inner} inside. Peak memory of "
        f"a step beside what is in use before it; `memory` and `time` are relative to `FUSEDCE=0`.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    add("--n", type=int, default=2048, help="rows (tokens)")
    add("--d", type=int, default=256, help="hidden size")
    add("--v", type=int, default=16000, help="classes")
    add("--inner", default="inductor", help="the inner backend")
    add("--rounds", type=int, default=9, help="steps of each")
    add("--timeout", type=float, default=600.0, help="seconds that one answer may take")
    add("--markdown", type=Path, help="the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
