"""The measurements of training: a :class:`Row` per provider, and a table of them.

In: the answers of the workers. Out: speed, memory and losses; and who is refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.loss.table import MIB, markdown, number, ratio
from fxpass.cli.demo import Trial, refuse

COLUMNS = (
    "program", "provider", "tokens/s", "min-max", "steps", "/ inductor", "extra MiB",
    "/ inductor", "loss, first to last", "losses differ", "fused",
)  # fmt: skip
# Distance of a program's losses from eager's, relative to the first: twenty steps carry rounding
# on. Some programs carry it further: then Inductor's losses differ, too, and fusedce's may by so
# many times.
TOLERANCE, OF_INDUCTOR = 1e-4, 1.5


@dataclass
class Row(Trial):
    """The measurements of one provider.

    Attributes:
        log: the end of a failed process's output.
        fused: whether logits never existed as a whole; None: not watched, or not fxpass.
        why: what computed logits.
    """

    log: str = ""
    fused: bool | None = None
    why: str = ""

    def add(self, answer: dict[str, Any]) -> None:
        """Adds a step, or all that a program did."""
        if "losses" in answer:
            vars(self).update(answer)
        else:
            super().add(answer)

    def distance(self, eager: Trial) -> float | None:
        """The largest difference of a loss to eager's; infinite if there are other losses, or one
        is not finite."""
        if not self.losses or not eager.losses:
            return None
        if len(self.losses) != len(eager.losses):
            return math.inf
        found = [abs(a - b) for a, b in zip(self.losses, eager.losses, strict=True)]
        return max(found) if all(map(math.isfinite, found)) else math.inf


def judge(rows: Sequence[Row], dtype: str, program: str) -> None:
    """Refuses the numbers of a provider whose losses, or norms, differ from those of eager, the
    first row, by more than rounding; of a program those of fusedce."""
    if not program:
        refuse(rows, dtype)
        return
    found = {row.name: row for row in rows}
    ours = found.get("fusedce")
    if ours is None or ours.failure:
        return
    eager = rows[0]
    allowed = TOLERANCE * max(1.0, abs(eager.losses[0])) if eager.losses else math.nan
    theirs = found["inductor"].distance(eager) if "inductor" in found else None
    if theirs is not None and math.isfinite(theirs):
        allowed = max(allowed, OF_INDUCTOR * theirs)
    distance = ours.distance(eager)
    if distance is None or not distance <= allowed:
        off = "nothing to compare" if distance is None else f"{distance:.1e}"
        ours.failure = f"refused: losses differ from eager's: {off} (bound {allowed:.1e})"


def table(results: Sequence[tuple[str, Sequence[Row]]], tokens: int) -> str:
    """The rows of each program; rates in tokens per second; a failed provider has the reason.

    Args:
        tokens: of a step.
    """
    lines = [COLUMNS]
    for program, rows in results:
        base = next((r for r in rows if r.name == "inductor" and not r.failure), None)
        lines += [[program, *_cells(row, rows[0], base, tokens)] for row in rows]
    return markdown(lines)


def _cells(row: Row, eager: Row, base: Row | None, tokens: int) -> Sequence[str]:
    if row.failure or not row.losses:
        return (row.name, *"-" * (len(COLUMNS) - 3), row.failure or "no rounds")
    rates = [tokens / s for s in row.timed]
    pairs = list(zip(base.timed, row.timed, strict=False)) if base else []
    fused = "-" if row.fused is None else "yes" if row.fused else f"no: {row.why}"
    return (
        row.name,
        number(statistics.median(rates) if rates else None, ",.0f"),
        f"{min(rates):,.0f}-{max(rates):,.0f}" if rates else "-",
        str(len(rates)) if rates else "-",
        number(statistics.median(a / b for a, b in pairs) if pairs else None, ".2f"),
        number(row.extra_bytes, ",.0f", MIB),
        ratio(row.extra_bytes, base.extra_bytes if base else None),
        f"{row.losses[0]:.4f} to {row.losses[-1]:.4f}",
        number(row.distance(eager), ".1e"),
        fused,
    )
