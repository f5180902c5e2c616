"""The table of programs as markdown, and the statuses of a table that was written.

In: the results. Out: one text with the totals of every kind and a line for each program.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from benchmarks.about import about, heading
from benchmarks.programs.catalog import missing
from benchmarks.programs.measure import STATUSES, Result
from benchmarks.programs.operands import SIZES

COLUMNS = ("program", "of", "returns", "status", "matches", "left", "why not", "equal")
WRONG = "WRONG"
LONG = 160  # characters of a reason
# of a program, in a reason: it changes with every program that is added before
PLACE = re.compile(r"( at )?benchmarks/programs/\S+\.py:\d+ ?")

TEXT = f"""\
# Programs

Programs that reduce the logits of one head or of several, and what `fusedce` does with each of
them. *its own* is a library's function, imported; *restated* is the same computation, written anew.
N={SIZES.n} rows ({SIZES.b} x {SIZES.t}), hidden size {SIZES.d}, {SIZES.v} classes; every program is
compiled with `fusedce.min_logits_mb=0`, with `aot_eager` inside, and run forward and backward
(evaluations: forward).

| status | meaning |
|---|---|
| fused | no tensor of the logits' size is left in the graph |
| part | something is fused, but such a tensor is left |
| kept | the fused operator reads logits that the graph materialises for something else |
| no | nothing is fused; *why not* is the first reason that fxpass gives |
| silent | nothing is fused, and fxpass says nothing |
| break | nothing is fused: Dynamo breaks the graph, or no head is in it |

*matches*: calls of the fused operator. *left* names the functions that make a tensor of the logits'
size, outside the operator, in the forward graph that fxpass hands on. Given values (soft targets)
are not counted, but tensors made of them are. *equal*: outputs and gradients are within twice
eager's own error against float64, plus a few units in the last place, and have eager's dtypes and
shapes; otherwise {WRONG}, and where.
"""


def document(results: Sequence[Result]) -> str:
    """The whole file."""
    absent = ", ".join(sorted(missing()))
    without = f" Not installed: {absent}." * bool(absent)
    lines = [
        TEXT,
        f"Written by `python -m benchmarks.programs`: {heading(about('cpu'))}.{without}",
        "\n## Totals\n",
        totals(results),
    ]
    for kind, group in groupby(results, lambda result: result.program.kind):
        lines += [f"\n## {kind[0].upper()}{kind[1:]}\n", table(list(group))]
    return "\n".join(lines) + "\n"


def totals(results: Sequence[Result]) -> str:
    """One line for each kind, and one for all."""
    kinds = list(dict.fromkeys(result.program.kind for result in results))
    rows = [[kind, *_counts([r for r in results if r.program.kind == kind])] for kind in kinds]
    rows.append(["all", *_counts(results)])
    return _table(("kind", "programs", *STATUSES, WRONG), rows)


def _counts(results: Sequence[Result]) -> list[str]:
    found = Counter(result.status for result in results)
    wrong = sum(bool(result.wrong) for result in results)
    return [str(n) for n in (len(results), *(found[status] for status in STATUSES), wrong)]


def table(results: Sequence[Result]) -> str:
    """One line for each program."""
    return _table(COLUMNS, [cells(result) for result in results])


def cells(result: Result) -> list[str]:
    """The cells of a program's line."""
    left = [name if n == 1 else f"{n} {name}" for name, n in Counter(result.left).items()]
    return [
        *(result.program.name, result.program.origin, result.program.returns, result.status),
        str(result.matches),
        ", ".join(left),
        textwrap.shorten(PLACE.sub("", result.reason), LONG, placeholder=" …"),
        f"{WRONG}: {result.wrong}" if result.wrong else "yes",
    ]


def statuses(text: str) -> dict[str, str]:
    """The status of every program in a document."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        row = line.replace("\\|", "\0").removeprefix("| ").removesuffix(" |").split(" | ")
        if len(row) == len(COLUMNS) and row[3] in STATUSES:
            found[row[0].replace("\0", "|")] = row[3]
    return found


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
