"""Prints a model's training as markdown.

In: a :class:`Row` per provider. Out: a table of speed, memory and losses.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.loss.table import MIB
from fxpass.cli.demo import Run

COLUMNS = (
    "provider", "tokens/s", "min-max", "steps", "/ inductor", "extra MiB", "/ inductor",
    "loss, first to last",
)  # fmt: skip


@dataclass
class Row(Run):
    """The measurements of one provider, and the end of a failed process's output."""

    log: str = ""


def table(rows: Sequence[Row], tokens: int) -> str:
    """Rates in tokens per second; a failed provider has the reason."""
    base = next((row for row in rows if row.name == "inductor" and row.timed), None)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_cells(row, base, tokens) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Row, base: Row | None, tokens: int) -> Sequence[str]:
    if not row.timed:
        return (row.name, *"-" * (len(COLUMNS) - 2), row.failure or "no rounds")
    rates = [tokens / s for s in row.timed]
    speed = space = "-"
    if base:
        pairs = zip(base.timed, row.timed, strict=False)
        speed = f"{statistics.median(a / b for a, b in pairs):.2f}"
        if row.extra_bytes is not None and base.extra_bytes:
            space = f"{row.extra_bytes / base.extra_bytes:.2f}"
    return (
        row.name,
        f"{statistics.median(rates):,.0f}",
        f"{min(rates):,.0f}-{max(rates):,.0f}",
        f"{len(rates)}",
        speed,
        "-" if row.extra_bytes is None else f"{row.extra_bytes / MIB:,.0f}",
        space,
        f"{row.losses[0]:.4f} to {row.losses[-1]:.4f}",
    )
