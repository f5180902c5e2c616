"""``python -m benchmarks.accuracy``: the errors of each provider's loss and gradients.

It compares every provider with float64, in f32, bf16 and fp16, with and without autocast and a
GradScaler, and prints one table::

    python -m benchmarks.accuracy --table benchmarks/accuracy/results.md
    python -m benchmarks.accuracy --n 256 --v 1000 --dtypes float16 --providers eager fusedce

The exit status is 1 if fusedce is less accurate than eager in any setting, or was not compared; the
last lines name the settings. The default size takes 4 GB and about ten minutes on two cores, mostly
for products in fp16.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from benchmarks.accuracy.cases import Problem, measure, name, rounded, settings
from benchmarks.accuracy.schemes import SCHEMES
from benchmarks.accuracy.table import EXACT, Rows, section, table, worse

DTYPES = {name(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
DEFAULT = [who for who in SCHEMES if who != "liger"]  # an optional package


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, measures, prints, and compares fusedce with eager."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("--n", type=int, default=8192, help="rows (tokens)")
    parser.add_argument("--d", type=int, default=16, help="hidden size")
    parser.add_argument("--v", type=int, default=32000, help="classes")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--providers", nargs="+", choices=SCHEMES, default=DEFAULT)
    parser.add_argument("--table", type=Path, help="a markdown file to write")
    args = parser.parse_args(arguments)
    rows = run(args.n, args.d, args.v, args.dtypes, args.providers)
    given = sys.argv[1:] if arguments is None else arguments
    command = " ".join(["python -m benchmarks.accuracy", *given])
    if args.table:
        args.table.write_text(table(rows, args.n, args.d, args.v, command))
    if found := worse(rows):
        sys.exit("fusedce is worse than eager, or was not compared:\n  " + "\n  ".join(found))


def run(n: int, d: int, v: int, dtypes: list[str], providers: list[str]) -> Rows:
    """Setting → provider → row. Prints a setting's rows to standard output, progress to standard
    error."""
    rows: Rows = {}
    for dtype in dtypes:
        problem = Problem(n, d, v, DTYPES[dtype])
        for setting in settings([DTYPES[dtype]]):
            row = rows[setting] = {EXACT: rounded(setting, problem)}
            for who in providers:
                torch._dynamo.reset()  # else the next provider would get the code of this one
                begin = time.monotonic()
                row[who] = measure(SCHEMES[who].make(), setting, problem)
                seconds = time.monotonic() - begin
                print(f"{setting}, {who}: {seconds:.0f} s", file=sys.stderr, flush=True)
            print(f"## {setting}\n\n{section(row)}\n", flush=True)
    return rows


if __name__ == "__main__":
    main()
