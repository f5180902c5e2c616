"""``python -m benchmarks.programs``: lists which reductions of a head's logits are fused.

It compiles every program of :mod:`benchmarks.programs.catalog` with ``backend="fusedce"``, compares
values and gradients with eager and float64, and writes a table: fused, logits kept, or why not. It
runs in a few minutes on two cores::

    python -m benchmarks.programs --markdown benchmarks/programs/results.md
    python -m benchmarks.programs --kinds entropies z-losses
    python -m benchmarks.programs --only 'log_softmax.*bf16'
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
from benchmarks.programs.catalog import KINDS, catalog
from benchmarks.programs.measure import examine
from benchmarks.programs.table import document


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, prints and writes; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.programs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = list(KINDS.values())
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, metavar="KIND")
    parser.add_argument("--only", default="", help="a pattern of the programs' names")
    parser.add_argument("--markdown", type=Path, help="where the table is written")
    args = parser.parse_args(argv)
    programs = catalog(args.only, args.kinds)
    results = []
    for i, program in enumerate(programs, 1):
        results.append(examine(program))
        result = results[-1]
        wrong = f", WRONG: {result.wrong}" * bool(result.wrong)
        say(f"[{i}/{len(programs)}] {program.kind}: {program.name}: {result.status}{wrong}")
    text = document(results)
    print(text, end="")
    if args.markdown:
        args.markdown.write_text(text)
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
