"""``python -m benchmarks.regions``: regions of rows beside Inductor: memory, time, compilation.

Measures losses that no formula of the algebra covers (Jensen-Shannon of two heads, KL plus
cross-entropy, a low-rank adapter, the entropy of the top-p classes) with eager, Inductor and
fusedce, which hands the rest of the graph to Inductor::

    python -m benchmarks.regions --markdown regions.md
    python -m benchmarks.regions --programs jsd top_p --n 4096 --v 128256 --dtype bfloat16

Every provider runs in a separate process, one step in turn. A compilation is the first step, less
the second: cold with an empty cache, and again in a second process, which finds it. Before, each
process compiles a tiny function. With ``--layers``, what is compiled is a small model: transformer
layers make the head's hidden states. A provider whose error against float64 exceeds twice eager's
is refused; the exit status is 1 if fusedce fails or is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.about import about, heading
from benchmarks.loss import rows
from benchmarks.loss.case import FLOOR
from benchmarks.loss.measure import say
from benchmarks.process import Worker, WorkerError
from benchmarks.regions.programs import EXACT_ROWS, PROGRAMS, Case

WORKER = "benchmarks.regions.worker"
PROVIDERS = ("eager", "inductor", "fusedce")
MIB = 2**20
COLUMNS = (
    "provider", "ms (median)", "min-max", "steps", "/ inductor", "extra peak MiB", "/ inductor",
    "compiles, s", "/ inductor", "second process, s", "/ inductor", "largest error",
)  # fmt: skip


@dataclass
class Row(rows.Row):
    """The measurements of one provider.

    Attributes:
        cold_seconds: seconds of compilation with an empty cache; None for eager.
        second_seconds: the same in a second process, which finds this cache.
    """

    cold_seconds: float | None = None
    second_seconds: float | None = None


def measure(case: Case, names: Sequence[str], rounds: int, timeout: float) -> list[Row]:
    """The rows of a program, eager first.

    Args:
        case: the program; its provider and files are replaced.
        names: the providers beside eager, whose errors bound theirs.
    """
    found = [Row(name) for name in dict.fromkeys(["eager", *names])]
    workers: dict[str, Worker] = {}

    def attempt(row: Row, function: Callable[[], None]) -> None:
        try:
            function()
        except WorkerError as error:
            row.failure = str(error)
            if row.name in workers:
                row.log = workers.pop(row.name).log

    def start(row: Row) -> None:
        """Starts a process and runs its first step."""
        workers[row.name] = Worker(WORKER, cases[row.name], timeout)
        workers[row.name].answer()
        seconds = workers[row.name].ask("first")["seconds"]
        if row.name == "eager":
            return
        if row.cold_seconds is None:
            row.cold_seconds = seconds
        else:
            row.second_seconds = seconds

    def check(row: Row) -> None:
        row.errors = workers[row.name].ask("check")["errors"]
        if not found[0].errors:
            row.failure = "refused: eager's own errors are unknown"
        row.failure = row.failure or rows.wrong(row.errors, found[0].errors, case.dtype)
        if row.failure:
            workers.pop(row.name).close()
            return
        row.extra_bytes = workers[row.name].ask("measure")["bytes"]

    def step(row: Row) -> None:
        row.seconds.append(workers[row.name].ask("step")["seconds"])

    with tempfile.TemporaryDirectory(prefix="fxpass-regions-") as folder:
        exact = str(Path(folder, "exact.pt"))
        case = dataclasses.replace(case, exact=exact)
        cases = {row.name: case.to(row.name, str(Path(folder, row.name))) for row in found}
        try:
            for act in (start, check, *[step] * rounds):
                for row in found:
                    if not row.failure:
                        attempt(row, lambda act=act, row=row: act(row))
            for worker in workers.values():
                worker.close()
            workers.clear()
            for row in found[1:]:
                if not row.failure:
                    attempt(row, lambda row=row: start(row))
            for worker in workers.values():
                worker.close()
        finally:  # the processes also end if this one is told to
            for worker in workers.values():
                worker.kill()
    for row in found:
        if row.failure:
            row.seconds.clear()
            say(f"  {row.name}: {row.failure}")
    return found


def table(found: Sequence[Row]) -> str:
    """One line for each provider."""
    base = next((row for row in found if row.name == "inductor" and row.seconds), None)
    lines = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1)]
    lines += [_cells(row, base) for row in found]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Row, base: Row | None) -> list[str]:
    name = f"**{row.name}**" if row.name == "fusedce" else row.name
    if row.failure or row.median is None:
        return [name, row.failure or "interrupted", *[""] * (len(COLUMNS) - 2)]
    base = base or Row("")
    return [
        name,
        f"{1e3 * row.median:.1f}",
        f"{1e3 * min(row.seconds):.1f}-{1e3 * max(row.seconds):.1f}",
        str(len(row.seconds)),
        _number(row.times(base)),
        _number(row.extra_bytes, MIB, 0),
        _ratio(row.extra_bytes, base.extra_bytes),
        *(_number(row.cold_seconds), _ratio(row.cold_seconds, base.cold_seconds)),
        *(_number(row.second_seconds), _ratio(row.second_seconds, base.second_seconds)),
        f"{max(row.errors.values()):.1e}",
    ]


def _number(value: float | None, unit: float = 1, digits: int = 2) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def _ratio(value: float | None, other: float | None) -> str:
    return "" if value is None or not other else f"{value / other:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, measures, prints and writes; returns the exit status."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS), metavar="PROGRAM")
    add("--n", type=int, default=8192 if on_gpu else 1024, help="rows")
    add("--d", type=int, default=2048 if on_gpu else 256, help="hidden size")
    add("--v", type=int, default=128256 if on_gpu else 32000, help="classes")
    add("--layers", type=int, default=0, help="transformer layers in front of the head")
    add("--dtype", choices=sorted(FLOOR), default="bfloat16" if on_gpu else "float32")
    add("--device", default="cuda" if on_gpu else "cpu")
    add("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    add("--rounds", type=int, default=7, help="timed steps of each provider")
    add("--timeout", type=float, default=1800.0, help="seconds that a step may take")
    add("--json", type=Path)
    add("--markdown", type=Path)
    args = parser.parse_args(argv)
    if args.layers and args.n % EXACT_ROWS:
        parser.error(f"--layers takes sequences: --n must be a multiple of {EXACT_ROWS}")
    what = about(args.device)
    results: dict[str, list[Row]] = {}
    lines = [f"## Regions: {heading(what)}"]
    for name in args.programs:
        sizes = args.n, args.d, args.v, args.dtype, args.device
        case = Case(name, "", *sizes, layers=args.layers)
        say(f"{PROGRAMS[name].title}: {case}")
        results[name] = measure(case, args.providers, args.rounds, args.timeout)
        lines += [f"### {PROGRAMS[name].title}: {case}", table(results[name])]
        print("\n\n".join(lines[-2:]), end="\n\n", flush=True)
    if args.markdown:
        args.markdown.write_text("\n\n".join(lines) + "\n")
    if args.json:
        found = {name: list(map(vars, some)) for name, some in results.items()}
        args.json.write_text(json.dumps({"about": what, "results": found}, indent=1) + "\n")
    ours = [row for some in results.values() for row in some if row.name == "fusedce"]
    return int(any(row.failure for row in ours))


if __name__ == "__main__":
    sys.exit(main())
