"""Results of mutants as text: one line each, a table in Markdown, two suites compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutants.draw import PACKAGES, Mutant

Result = dict[str, Any]  # a line of the results' file
SURVIVES = ("survives", "not reached")


def key_of(result: Result) -> tuple[str, str, str, str]:
    """As ``Mutant.key``."""
    return result["file"], result["function"], result["old"], result["new"]


def result_of(number: int, mutant: Mutant, **found: Any) -> Result:
    file, function, old, new = mutant.key
    where = {"number": number, "file": file, "line": mutant.line, "function": function}
    return {**where, "kind": mutant.kind, "old": old, "new": new, **found}


def read(path: Path) -> list[Result]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def survives(result: Result) -> bool:
    return result["outcome"] in SURVIVES


def diff(mutant: Mutant) -> str:
    place = f"{mutant.file}:{mutant.line} {mutant.function}".rstrip()
    return f"{place}\n  - {mutant.old.strip()}\n  + {mutant.new.strip()}"


def line(result: Result) -> str:
    by = f" by {result['test']}" if result["test"] else ""
    seconds, tests = result["seconds"], f"{result['begun']} of {result['tests']} tests"
    place = f"{result['file']}:{result['line']}"
    return f"{result['number']:3} {place}: {result['outcome']}{by} ({tests}, {seconds:.0f} s)"


def totals(results: Sequence[Result]) -> list[str]:
    lines = ["| package | mutants | killed | survive |", "|---|--:|--:|--:|"]
    for package in (*PACKAGES, "all"):
        of = [r for r in results if package in (r["file"].split("/")[1], "all")]
        left = sum(map(survives, of))
        lines.append(f"| {package} | {len(of)} | {len(of) - left} | {left} |")
    return lines


def code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def row(result: Result) -> str:
    place = f"{result['file'].removeprefix('fxpass/')}:{result['line']}"
    change = f"{code(result['old'])} → {code(result['new'])}"
    test = result["test"].removeprefix("tests/").replace("|", "\\|")
    outcome = test if result["outcome"] == "killed" else f"**{result['outcome']}** {test}".strip()
    return f"| {place} | {change} | {outcome} | {result['begun']} | {result['seconds']:.0f} |"


def compared(new: Sequence[Result], old: Sequence[Result]) -> list[str]:
    """What only one of two suites kills, of the mutants that were run on both."""
    before = {key_of(result): result for result in old}
    pairs = [(r, before[key_of(r)]) for r in new if key_of(r) in before]
    kills = sum(not survives(a) for a, _ in pairs), sum(not survives(b) for _, b in pairs)
    lines = [f"Of {len(pairs)} mutants that both suites ran, this one kills {kills[0]}, the other "]
    lines[0] += f"one {kills[1]}."
    for title, mine in (("Only this suite kills", True), ("Only the other suite kills", False)):
        only = [(a, b) for a, b in pairs if survives(a) != survives(b) and survives(b) == mine]
        lines += ["", f"{title} {len(only)}:", ""] if only else []
        for a, b in only:
            change = f"{code(a['old'])} → {code(a['new'])}"
            lines.append(f"- {a['file']}:{a['line']} {change}: {(a if mine else b)['test']}")
    return lines


def markdown(
    results: Sequence[Result], count: int, seed: int, budget: float, old: Sequence[Result]
) -> str:
    ordered = sorted(results, key=lambda r: (PACKAGES.index(r["file"].split("/")[1]), r["line"]))
    ordered.sort(key=lambda r: (PACKAGES.index(r["file"].split("/")[1]), r["file"], r["line"]))
    said = f"{len(results)} of {count} mutants of seed {seed}, {budget:g} s of tests for each"
    lines = ["# Mutants", "", f"`python -m tests.mutants`: {said}.", "", *totals(results), ""]
    if old:
        lines += [*compared(results, old), ""]
    lines += ["| line | change | killed by | tests | s |", "|---|---|---|--:|--:|"]
    return "\n".join([*lines, *map(row, ordered)]) + "\n"
