"""``python -m benchmarks.programs``: lists which reductions of a head's logits are fused.

It runs every row that names where it comes from (:mod:`tests.programs.catalog`) through the tests'
oracle, and writes a table: fused, logits kept, or why not. It takes a few minutes on two cores::

    python -m benchmarks.programs --markdown benchmarks/programs/results.md
    python -m benchmarks.programs --kinds entropies z-losses
    python -m benchmarks.programs --only 'log_softmax.*'
    FUSEDCE_STRATEGY=tiled python -m benchmarks.programs

The exit status is 1 if a program is WRONG.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from benchmarks.loss.measure import say
from benchmarks.programs.table import Result, document
from tests.programs.catalog import catalog
from tests.programs.row import Row
from tests.support.oracle import FIRST, outcome


def ways(row: Row) -> list[str]:
    """In f32, and in bf16 if the row names it; none if it does not say where it is from."""
    return [way for way in (FIRST, *row.ways) if row.of and way in (FIRST, "bf16")]


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rows = [row for row in catalog() if row.of]
    kinds = list(dict.fromkeys(row.kind for row in rows))
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, metavar="KIND")
    parser.add_argument("--only", default="", help="a pattern of the programs' names")
    parser.add_argument("--markdown", type=Path, help="where the table is written")
    args = parser.parse_args(argv)
    results = []
    for row in catalog(args.only, args.kinds):
        for way in ways(row):
            results.append(Result(row, way, outcome(row, way)))
            result = results[-1]
            wrong = f", WRONG: {result.outcome.wrong}" * bool(result.outcome.wrong)
            say(f"{row.kind}: {result.name}: {result.status}{wrong}")
    text = document(results)
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text)
    return int(any(result.outcome.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
