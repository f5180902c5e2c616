"""``python -m benchmarks``: measures time, memory and errors of losses of a linear's logits.

It measures a suite of named heads (`benchmarks/loss/heads.py`), or one size::

    python -m benchmarks --suite quick
    python -m benchmarks --suite cpu --json cpu.json --markdown cpu.md --picture cpu.png
    python -m benchmarks --suite gpu --heads llama-3-8b --n 4096 8192 --json gpu.json --resume
    python -m benchmarks --n 2048 --d 512 --v 32000 --dtype bfloat16 --providers inductor fusedce
    python -m benchmarks --suite regions --programs jsd top_p --layers 4
    python -m benchmarks --suite parity
    python -m benchmarks --suite accuracy --dtype float16

``regions`` are losses without a formula, ``parity`` programs with few fused losses or many; in a
second process they compile again, with the caches of the first. ``accuracy`` compares errors in
three dtypes, with and without autocast and a GradScaler.

Every provider runs in a separate process, and the providers step in turn, so that a drift of the
machine's speed affects all of them. A provider whose error against float64, in loss or gradients,
exceeds twice eager's error is refused. Progress goes to standard error, tables to standard output;
Ctrl-C prints the tables so far. The exit status is 1 if fusedce fails, is refused, or is not as
good as its suite asks. For a whole model's training: ``python -m benchmarks.training``.
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
from benchmarks.loss.case import CHECKED_ROWS, FLOOR, Case
from benchmarks.loss.heads import HEADS, ON_GPU, SUITES, Suite
from benchmarks.loss.kinds import KINDS, complaints
from benchmarks.loss.measure import Effort, run, say
from benchmarks.loss.programs import PROGRAMS
from benchmarks.loss.rows import Result, find
from benchmarks.loss.table import table

FREE = Suite({"": (2048,)}, ("float32",))
SAME = ("device_name", "versions", "threads", "fxpass", "seed")  # for results in one file
SUMMARIES = ("fusedce", "fusedce_chunked", "fusedce_tiled")


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, prints and writes; returns the exit status."""
    args = parser().parse_args(argv)
    for file in (args.json, args.markdown, args.picture):
        if file and not file.parent.is_dir():
            raise SystemExit(f"{file.parent} is not a directory")
    if args.picture and picture.problem():
        raise SystemExit(picture.problem())
    what, suite = about(args.device), suite_of(args)
    cases, effort = plan(args, suite)
    results = _read(args.json, what) if args.resume else []
    print(f"# {heading(what)}\n", flush=True)
    status = 0
    for i, (head, case) in enumerate(cases, 1):
        if find(results, head, case):
            continue
        result = Result(head, case)
        say(f"[{i}/{len(cases)}] {f'{head}: ' if head else ''}{case}")
        try:
            run(result, args.providers or suite.providers, effort, KINDS[suite.kind])
        except KeyboardInterrupt:
            status = 130
        print(section(result, suite.kind) + "\n", flush=True)
        found = complaints([result], suite.kind, suite.memory)
        for line in found:
            say(line)
        status = status or int(bool(found))
        # an interrupted case is printed but not stored, so that --resume measures it again
        write(args, [*results, result], what, suite)
        if status == 130:
            break
        results.append(result)
        _write_json(args.json, results, what)
    if status != 130:
        write(args, results, what, suite)  # also if nothing was left to measure
    return status


def suite_of(args: argparse.Namespace) -> Suite:
    """The named suite with what the command line replaces; without a name one case, or the suite of
    the device.

    Raises:
        SystemExit: layers get no whole sequences.
    """
    on_cpu, name = torch.device(args.device).type == "cpu", args.suite
    free = (args.n, args.d, args.v, args.dtype, args.forward)
    if name or args.heads or not any(free):
        suite = SUITES[name or ("cpu" if on_cpu else "gpu")]
    else:
        suite = FREE
    if suite.kind == "programs" and not on_cpu:
        suite = suite._replace(**ON_GPU)
    rows = {k: tuple(args.n or suite.rows.get(k, FREE.rows[""])) for k in args.heads or suite.rows}
    suite = suite._replace(
        rows=rows,
        dtypes=tuple(args.dtype or suite.dtypes),
        backward=(False,) if args.forward else suite.backward,
        programs=tuple(args.programs or suite.programs),
    )
    if args.layers and any(n % CHECKED_ROWS for sizes in rows.values() for n in sizes):
        raise SystemExit(f"--layers takes sequences: --n must be a multiple of {CHECKED_ROWS}")
    return suite


def plan(args: argparse.Namespace, suite: Suite) -> tuple[list[tuple[str, Case]], Effort]:
    """The cases to measure, without a provider, each with its title's beginning; and the effort."""
    cases = list(suite.cases(args.device, args.d, args.v, args.layers))
    effort = Effort(suite.rounds, suite.seconds)
    given = {k: getattr(args, k) for k in Effort._fields if getattr(args, k) is not None}
    return cases, effort._replace(**given)


def section(result: Result, kind: str) -> str:
    """The table of one case, with its title, and a comparison of fusedce with the others."""
    title = f"### {result.head + ': ' if result.head else ''}{result.case}"
    labels = {name: provider.label for name, provider in KINDS[kind].providers.items()}
    blocks = [title, table(result, KINDS[kind].columns, labels)]
    rows = [row for name in SUMMARIES if kind == "loss" and (row := result.row(name))]
    summaries = [f"- {text}" for row in rows if (text := result.summary(row))]
    return "\n\n".join([*blocks, *(["\n".join(summaries)] if summaries else [])])


def document(results: Sequence[Result], what: dict[str, object], suite: Suite) -> str:
    """All tables, and in what fusedce is not good enough."""
    parts = [f"## Benchmarks: {heading(what)}", *(section(r, suite.kind) for r in results)]
    found = complaints(results, suite.kind, suite.memory)
    if found:
        parts.append("Not good enough:\n\n" + "\n".join(f"- {line}" for line in found))
    return "\n\n".join(parts) + "\n"


def write(
    args: argparse.Namespace, results: Sequence[Result], what: dict[str, object], suite: Suite
) -> None:
    """The markdown and the picture, where they are asked for."""
    if args.markdown:
        args.markdown.write_text(document(results, what, suite))
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
    known = list(dict.fromkeys(name for kind in KINDS.values() for name in kind.providers))
    add("--suite", choices=SUITES, help="default: cpu, or gpu where there is one")
    add("--heads", nargs="+", choices=HEADS, help="these heads of the suite, or others")
    add(
        "--programs", nargs="+", choices=PROGRAMS, metavar="PROGRAM", help="in place of the suite's"
    )
    add("--n", type=int, nargs="+", help="rows (tokens); also for a suite")
    add("--d", type=int, default=0, help="hidden size, in place of a head's")
    add("--v", type=int, default=0, help="classes, in place of a head's")
    add("--layers", type=int, default=0, help="transformer layers in front of the head")
    add("--dtype", nargs="+", choices=sorted(FLOOR), help="also for a suite")
    add("--forward", action="store_true", help="evaluation only, without gradients")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--providers", nargs="+", choices=known, metavar="PROVIDER", help=", ".join(known))
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
