"""The table of programs as markdown, and the statuses of a table that was written.

In: the results. Out: one text with the totals of every kind and a line for each program.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.about import about, heading
from tests.programs.catalog import missing
from tests.programs.operands import SIZES
from tests.programs.row import NOTHING, Row
from tests.support.oracle import FIRST, Outcome

STATUSES = ("fused", "part", "no")
COLUMNS = ("program", "of", "status", "as", "calls", "left", "why not", "equal")
WRONG = "WRONG"
LONG = 160  # characters of a reason
PLACE = re.compile(r"( at )?<[^<>]*: (program|head) \d+>(:\d+)? ?")  # of a program, in a reason

TEXT = f"""\
# Programs

Programs that reduce the logits of one head or of several, and what `fusedce` does with each of
them. *its own* is a library's function, imported; *restated* is the same computation, written anew.
N={SIZES.n} rows ({SIZES.b} x {SIZES.t}), hidden size {SIZES.d}, {SIZES.v} classes; every program is
compiled with `fusedce.min_logits_mb=0` and run forward and backward (evaluations: forward).

| status | meaning |
|---|---|
| fused | no tensor of the logits' size is left in the graph |
| part | something is fused, but such a tensor is left |
| no | nothing is fused; *why not* is the first reason that fxpass or Dynamo gives |

*calls*: of the fused operator. *left* names the functions that make a tensor of the logits' size,
outside the operator, in the forward graph that fxpass hands on. Given values (soft targets) are not
counted, but tensors made of them are. *equal*: outputs and gradients are within twice eager's own
error against float64, plus a few units in the last place, and have eager's dtypes and shapes;
otherwise {WRONG}, and where.
"""


@dataclass(frozen=True)
class Result:
    """What became of a row in one way."""

    row: Row
    way: str
    outcome: Outcome

    @property
    def name(self) -> str:
        """That of the row, and the way if it is not the first."""
        return self.row.name + f", {self.way}" * (self.way != FIRST)

    @property
    def status(self) -> str:
        """One of ``STATUSES``."""
        if self.outcome.becomes == NOTHING:
            return "no"
        if self.outcome.left:
            return "part"
        return "fused"


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
    for kind, group in groupby(results, lambda result: result.row.kind):
        lines += [f"\n## {kind[0].upper()}{kind[1:]}\n", table(list(group))]
    return "\n".join(lines) + "\n"


def totals(results: Sequence[Result]) -> str:
    """One line for each kind, and one for all."""
    kinds = list(dict.fromkeys(result.row.kind for result in results))
    rows = [[kind, *_counts([r for r in results if r.row.kind == kind])] for kind in kinds]
    rows.append(["all", *_counts(results)])
    return _table(("kind", "programs", *STATUSES, WRONG), rows)


def _counts(results: Sequence[Result]) -> list[str]:
    found = Counter(result.status for result in results)
    wrong = sum(bool(result.outcome.wrong) for result in results)
    return [str(n) for n in (len(results), *(found[status] for status in STATUSES), wrong)]


def table(results: Sequence[Result]) -> str:
    """One line for each program."""
    return _table(COLUMNS, [cells(result) for result in results])


def cells(result: Result) -> list[str]:
    """The cells of a program's line."""
    outcome = result.outcome
    reason = outcome.reasons[0] if outcome.reasons and result.status != "fused" else ""
    return [
        *(result.name, result.row.of, result.status, outcome.becomes, str(outcome.calls)),
        outcome.left,
        textwrap.shorten(PLACE.sub(" ", reason), LONG, placeholder=" …"),
        f"{WRONG}: {outcome.wrong}" if outcome.wrong else "yes",
    ]


def statuses(text: str) -> dict[str, str]:
    """The status of every program in a document."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        row = line.replace("\\|", "\0").removeprefix("| ").removesuffix(" |").split(" | ")
        if len(row) == len(COLUMNS) and row[2] in STATUSES:
            found[row[0].replace("\0", "|")] = row[2]
    return found


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
