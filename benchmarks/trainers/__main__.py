"""``python -m benchmarks.trainers``: training loops whose loss is outside of the compiled model.

It runs each program of :mod:`benchmarks.trainers.programs` in eager, with Inductor and with fusedce
(``model.compile(backend=...)``), each in a separate process, on a tiny Llama in f32 and random
tokens. A program is fused if its logits never existed as a whole, forward or backward. Memory is
what the steps add at most to what the process holds, after the first steps, which compile::

    python -m benchmarks.trainers --markdown benchmarks/trainers/results.md
    python -m benchmarks.trainers --only 'DPO|GRPO' --classes 64000

The exit status is 1 if the losses of a program differ from eager's with fusedce, or it fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.about import about, heading
from benchmarks.loss.measure import say
from benchmarks.loss.table import MIB
from benchmarks.process import Worker, WorkerError
from benchmarks.trainers.programs import PROGRAMS
from benchmarks.trainers.table import BACKENDS, Row, table
from benchmarks.trainers.task import WARM, Sizes
from benchmarks.trainers.worker import Job


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, trains, prints and writes; returns the exit status."""
    args = _parser().parse_args(argv)
    sizes = Sizes(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Sizes)})
    names = [name for name in PROGRAMS if re.search(args.only, name)]
    rows = []
    for i, name in enumerate(names, 1):
        rows.append(Row(name))
        say(f"[{i}/{len(names)}] {name}")
        if missing := PROGRAMS[name].missing:
            rows[-1].failures["fusedce"] = f"needs {', '.join(missing)}"
            continue
        for backend in args.backends:
            measure(rows[-1], backend, sizes, args.timeout)
        say("  " + ", ".join(rows[-1].cells()[1:]))
        if args.markdown:
            args.markdown.write_text(document(rows, sizes))
    print(document(rows, sizes), end="")
    return int(any(row.wrong for row in rows))


def measure(row: Row, backend: str, sizes: Sizes, timeout: float) -> None:
    """Trains a program with a backend, in a process of its own."""
    # glibc returns freed tensors to the system: resident memory is the memory of live tensors
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    worker = Worker("benchmarks.trainers.worker", Job(row.program, backend, vars(sizes)), timeout)
    try:
        worker.answer()
        row.answers[backend] = worker.ask("train")
    except WorkerError as error:
        row.failures[backend] = str(error)
    finally:
        worker.close()
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def document(rows: Sequence[Row], sizes: Sizes) -> str:
    """The table under its heading."""
    logits = 4 * sizes.rows * sizes.classes / MIB
    return (
        f"## Losses outside of the compiled model: {heading(about('cpu'))}\n\n"
        f"A Llama of {sizes.layers} layers x {sizes.hidden}, {sizes.classes:,} classes, "
        f"{sizes.sequences} x {sizes.tokens} tokens a step, f32: {logits:.0f} MiB of logits. "
        f"{sizes.steps} steps of plain gradient descent on the same tokens; MiB are the most "
        f"that a step adds to what the process holds, after the first {WARM} steps. Losses differ "
        f"from eager's by at most what is listed.\n\n{table(rows)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    for field in dataclasses.fields(Sizes):
        add(f"--{field.name}", type=int, default=field.default)
    add("--only", default="", help="a pattern of the programs' names")
    add("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    add("--timeout", type=float, default=900.0, help="seconds that one training may take")
    add("--markdown", type=Path, help="where the table is written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
