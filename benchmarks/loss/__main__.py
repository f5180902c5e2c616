"""``python -m benchmarks``: measures time, memory and errors of linear and cross-entropy.

It measures a suite of named heads (`benchmarks/loss/heads.py`), or one size::

    python -m benchmarks --suite quick
    python -m benchmarks --suite cpu --json cpu.json --markdown cpu.md --picture cpu.png
    python -m benchmarks --suite gpu --heads llama-3-8b --n 4096 8192 --json gpu.json --resume
    python -m benchmarks --n 2048 --d 512 --v 32000 --dtype bfloat16 --providers inductor fusedce

Every provider runs in a separate process, and the providers step in turn, so that a drift of the
machine's speed affects all of them. A provider whose error against float64, in loss or gradients,
exceeds twice eager's error is refused. Progress goes to standard error, tables to standard output;
Ctrl-C prints the tables so far. The exit status is 1 if fusedce is refused. For a whole model's
training step: ``python -m benchmarks.training``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.about import about, heading
from benchmarks.loss import picture
from benchmarks.loss.case import FLOOR, Case
from benchmarks.loss.heads import HEADS, SUITES
from benchmarks.loss.measure import Effort, measure, run, say
from benchmarks.loss.providers import PROVIDERS
from benchmarks.loss.rows import Result, find
from benchmarks.loss.table import document, section

__all__ = ["main", "measure"]

FREE_N, FREE_D, FREE_V, FREE_DTYPE = 2048, 512, 32000, "float32"
SAME = ("device_name", "versions", "threads", "fxpass", "seed")  # for results in one file


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, prints and writes; returns the exit status."""
    args = parser().parse_args(argv)
    for file in (args.json, args.markdown, args.picture):
        if file and not file.parent.is_dir():
            raise SystemExit(f"{file.parent} is not a directory")
    if args.picture and picture.problem():
        raise SystemExit(picture.problem())
    what = about(args.device)
    results = _read(args.json, what) if args.resume else []
    cases, effort = plan(args)
    print(f"# {heading(what)}\n", flush=True)
    status = 0
    for i, (head, case) in enumerate(cases, 1):
        if find(results, head, case):
            continue
        result = Result(head, case)
        say(f"[{i}/{len(cases)}] {f'{head}: ' if head else ''}{case}")
        try:
            run(result, args.providers, effort)
        except KeyboardInterrupt:
            status = 130
        print(section(result) + "\n", flush=True)
        if any(row.failure.startswith("refused") for row in result.rows if "fusedce" in row.name):
            status = status or 1
        # an interrupted case is printed but not stored, so that --resume measures it again
        write(args, [*results, result], what)
        if status == 130:
            break
        results.append(result)
        _write_json(args.json, results, what)
    return status


def plan(args: argparse.Namespace) -> tuple[list[tuple[str, Case]], Effort]:
    """The cases to measure, without a provider, each with its head's name; and the effort."""
    free = not args.heads and any((args.n, args.d, args.v, args.dtype, args.forward))
    if args.suite is None and free:
        d, v = args.d or FREE_D, args.v or FREE_V
        cases = [
            ("", Case("", n, d, v, dtype, args.device, not args.forward))
            for dtype in args.dtype or [FREE_DTYPE]
            for n in args.n or [FREE_N]
        ]
        effort = Effort()
    else:
        on_cpu = torch.device(args.device).type == "cpu"
        suite = SUITES[args.suite or ("cpu" if on_cpu else "gpu")]
        names = args.heads or list(suite.rows)
        suite = suite._replace(
            rows={k: tuple(args.n or suite.rows.get(k, (FREE_N,))) for k in names},
            dtypes=tuple(args.dtype or suite.dtypes),
            backward=(False,) if args.forward else suite.backward,
        )
        cases = list(suite.cases(args.device))
        effort = Effort(suite.rounds, suite.seconds)
    given = {k: getattr(args, k) for k in Effort._fields if getattr(args, k) is not None}
    return cases, effort._replace(**given)


def write(args: argparse.Namespace, results: Sequence[Result], what: dict[str, object]) -> None:
    """The markdown and the picture, where they are asked for."""
    if args.markdown:
        args.markdown.write_text(document(results, what))
    if args.picture:
        picture.draw(results, what, args.picture)


def _write_json(file: Path | None, results: Sequence[Result], what: dict[str, object]) -> None:
    if file:
        value = {"about": what, "command": sys.argv[1:], "cases": [r.as_json() for r in results]}
        new = file.with_name(file.name + ".new")  # never half a file
        new.write_text(json.dumps(value, indent=1) + "\n")
        new.replace(file)


def _read(file: Path | None, what: dict[str, object]) -> list[Result]:
    """The results in the file; none if there is no file."""
    if file is None:
        raise SystemExit("--resume needs --json: it continues this file")
    if not file.exists():
        return []
    value = json.loads(file.read_text())
    for key in SAME:
        if value["about"][key] != what[key]:
            old, new = value["about"][key], what[key]
            raise SystemExit(f"{file} was measured with {key} {old}, this would be {new}")
    return [Result.from_json(case) for case in value["cases"]]


def parser() -> argparse.ArgumentParser:
    """The command line of ``python -m benchmarks``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--suite", choices=SUITES, help="default: cpu, or gpu where there is one")
    add("--heads", nargs="+", choices=HEADS, help="these heads of the suite, or others")
    add("--n", type=int, nargs="+", help="rows (tokens); also for a suite")
    add("--d", type=int, help="hidden size of a free case")
    add("--v", type=int, help="classes of a free case")
    add("--dtype", nargs="+", choices=sorted(FLOOR), help="also for a suite")
    add("--forward", action="store_true", help="evaluation only, without gradients")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    add("--rounds", type=int, help="steps of each provider")
    add("--seconds", type=float, help="time limit of a provider's steps in one case (at least one)")
    add("--timeout", type=float, help="seconds after which a provider is stopped")
    add("--json", type=Path, help="all measurements, written after every case")
    add("--resume", action="store_true", help="skip the cases in the file of --json")
    add("--markdown", type=Path, help="the tables")
    add("--picture", type=Path, help="time against memory, for example a .png; needs matplotlib")
    return parser


if __name__ == "__main__":
    sys.exit(main())
