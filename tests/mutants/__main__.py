"""``python -m tests.mutants``: changes fxpass in one line, 100 times, and says which changes the
tests do not notice.

The tests of a mutant are those of the package's own folder (``tests/unit/<package>``) and the tables
of whole programs (``ROWS``). First all of them run once on the tree as it is, which tells the
processor seconds of each test and the mutants whose line it runs; tests that fail there are left out.
Then each mutant has a budget of such seconds: half of it for the package's own tests, and what is
left for the rows. It is spent on tests that run the changed line, cheapest first: on all of them or,
if they take longer, on every k-th by cost. Where fewer than ``FEW`` do (the module itself runs the
line, or its result is kept), tests that run any function of the module share the budget. A mutant is
killed by the first test that fails, hangs or crashes, and survives if none does. So the table says
what a suite kills in so many seconds a mutant, which is the same rule for every suite:

    python -m tests.mutants --results new.jsonl --old old.jsonl --markdown tests/mutants/results.md

A run may be stopped, and goes on where it was with the same ``--results``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants import run, table
from tests.mutants.draw import Mutant, draw

ROWS = (
    "tests/programs",
    "tests/unit/rewrite",
    "tests/unit/capture",
    "tests/unit/deferred/test_answers.py",
)
FEW = 20


@dataclass(frozen=True)
class Test:
    """What one test took on the tree as it is, and the numbers (see ``run.mark``) that it reached."""

    seconds: float
    reached: frozenset[int]


def is_under(test: str, names: Sequence[str]) -> bool:
    file = test.partition("::")[0]
    return any(file == name or file.startswith(f"{name}/") for name in names)


def spread(tests: dict[str, float], budget: float) -> dict[str, float]:
    """Cheapest first: all tests, or every k-th, so that they take about ``budget``."""
    ordered = sorted(tests, key=lambda name: (tests[name], name))
    every = max(1, math.ceil(sum(tests.values()) / max(budget, 1)))
    return {name: tests[name] for name in ordered[::every]}


def selected(
    tests: dict[str, Test], own: str, number: int, module: int, budget: float
) -> dict[str, float]:
    """The tests to run for one mutant in this order, with their seconds."""
    chosen: dict[str, float] = {}
    for names, most in (((own,), budget / 2), (ROWS, budget)):
        there = {n: t for n, t in tests.items() if is_under(n, names) and n not in chosen}
        near = {name: t.seconds for name, t in there.items() if number in t.reached}
        beside = {n: t.seconds for n, t in there.items() if module in t.reached and n not in near}
        for some in (near, beside if len(near) < FEW else {}):
            chosen |= spread(some, most - sum(chosen.values()))
    return chosen


def test_files(tree: Path, mutants: Sequence[Mutant]) -> list[str]:
    """Of the packages' own folders first, then of the rows, whose modules are test files."""
    own = [f"tests/unit/{package}" for package in dict.fromkeys(m.package for m in mutants)]
    found = []
    for place in [tree / name for name in (*sorted(own, key=ROWS.__contains__), *ROWS)]:
        inside = [*place.rglob("test_*.py"), *place.rglob("rows/[a-z]*.py")]
        found += [place] if place.is_file() else sorted(inside)
    return list(dict.fromkeys(path.relative_to(tree).as_posix() for path in found))


def recorded(tree: Path, path: Path, mutants: Sequence[Mutant]) -> dict[str, Test]:
    """All tests of the tree that pass there; ``path`` keeps them for the next time."""
    header = {"mutants": [list(mutant.key) for mutant in mutants]}
    if table.read(path)[:1] != [header]:
        path.write_text(json.dumps(header) + "\n")
    said = table.read(path)[1:]
    done = list(dict.fromkeys(s["test"].partition("::")[0] for s in said if "test" in s))
    if not said or "code" not in said[-1]:
        files = [name for name in test_files(tree, mutants) if name not in done[:-1]]
        print(f"running {len(files)} files of tests once", flush=True)
        with tempfile.TemporaryDirectory(prefix="fxpass-mutants-") as folder:
            there = run.copy(tree, Path(folder))
            run.record(there, files, mutants, path.resolve())
            said = table.read(path)[1:]
            if not said or said[-1].get("code") not in (0, 1):
                raise SystemExit(f"the tests stopped:\n{(there / 'log.txt').read_text()[-4000:]}")
    tests = {s["test"]: s for s in said if "test" in s}
    failed = [name for name, test in tests.items() if test["failed"]]
    print(f"{len(tests)} tests, of which {len(failed)} fail:", *failed, flush=True)
    return {
        name: Test(test["seconds"], frozenset(test["reached"]))
        for name, test in tests.items()
        if not test["failed"]
    }


def outcomes(
    args: argparse.Namespace, todo: dict[int, Mutant], tests: dict[str, Test]
) -> Iterator[table.Result]:
    """Runs the mutants, some at a time, each job in a copy of the tree of its own."""
    waiting = dict(todo)
    modules = run.modules(args.tree)
    running: dict[int, run.Fork] = {}
    with tempfile.TemporaryDirectory(prefix="fxpass-mutants-") as top, stopped(running):
        free = [run.copy(args.tree, Path(top) / str(i)) for i in range(args.jobs)]
        while waiting or running:
            while waiting and free:
                number = next(iter(waiting))
                mutant = waiting.pop(number)
                own, module = f"tests/unit/{mutant.package}", -1 - modules.index(mutant.file)
                order = selected(tests, own, number, module, args.budget)
                if not order:
                    found: dict[str, Any] = {"test": "", "begun": 0, "tests": 0, "seconds": 0}
                    yield table.result_of(number, mutant, outcome="not reached", **found)
                    continue
                tree = free.pop()
                write(tree, mutant.file, mutant.applied(args.tree))
                running[number] = run.Fork(tree, order, args.limit)
            time.sleep(run.POLL)
            for number, fork in list(running.items()):
                if (ended := fork.ended()) is None:
                    continue
                del running[number]
                write(fork.tree, todo[number].file, (args.tree / todo[number].file).read_text())
                free.append(fork.tree)
                found = dict(zip(("outcome", "test", "begun"), ended, strict=True))
                found |= {"tests": len(fork.order), "seconds": fork.seconds()}
                yield table.result_of(number, todo[number], **found)


@contextlib.contextmanager
def stopped(running: dict[int, run.Fork]) -> Iterator[None]:
    """However this ends, nothing goes on running."""
    try:
        yield
    finally:
        for fork in running.values():
            run.stop(fork.process)


def write(tree: Path, file: str, text: str) -> None:
    """Writes a module, and forgets what Python has compiled of it: its time may be the same."""
    path = tree / file
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--tree", type=Path, default=Path(__file__).parents[2], help="whose tests, whose fxpass")
    add("--seed", type=int, default=0)
    add("--count", type=int, default=100)
    add("--first", type=int, help="only so many of them")
    add("--only", help="only these numbers: 3,17")
    add("--jobs", type=int, default=1)
    add("--budget", type=float, default=60, help="seconds of tests for each mutant")
    add("--limit", type=float, default=900, help="seconds after which a mutant hangs")
    add("--results", type=Path, default=Path("mutants.jsonl"), help="appended to")
    add("--markdown", type=Path, help="writes the table here")
    add("--old", type=Path, help="results of another suite")
    add("--list", action="store_true", help="prints the mutants, and runs nothing")
    args = parser.parse_args()
    args.tree = args.tree.resolve()
    return args


def main() -> None:
    args = options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    mutants = draw(args.tree, args.count, args.seed)
    numbers = range(args.first or len(mutants))
    if args.only:
        numbers = [int(number) for number in args.only.split(",")]
    if args.list:
        print(*(f"{i:3} {table.diff(mutants[i])}" for i in numbers), sep="\n")
        return
    done = {table.key_of(result) for result in table.read(args.results)}
    todo = {i: mutants[i] for i in numbers if mutants[i].key not in done}
    if todo:
        run.prepare()
        tests = recorded(args.tree, args.results.with_suffix(".tests.jsonl"), mutants)
        for result in outcomes(args, todo, tests):
            with args.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(table.line(result), flush=True)
    wanted = {mutants[i].key for i in numbers}
    results = [r for r in table.read(args.results) if table.key_of(r) in wanted]
    old = table.read(args.old) if args.old else []
    print(*table.totals(results), *(table.compared(results, old) if old else ()), sep="\n")
    if args.markdown:
        text = table.markdown(results, args.count, args.seed, args.budget, old)
        args.markdown.write_text(text)


if __name__ == "__main__":
    main()
