"""Prints the measurements as markdown.

In: :class:`benchmarks.loss.rows.Result`. Out: a table per case, under a heading with device,
versions and date.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.about import heading
from benchmarks.loss.providers import PROVIDERS
from benchmarks.loss.rows import Result, Row

MIB = 2**20
COLUMNS = (
    "provider", "ms (median)", "min-max", "steps", "of bare GEMMs", "/ inductor", "extra peak MiB",
    "/ inductor", "scratch MiB", "error of loss, dX, dW",
)  # fmt: skip
SUMMARIES = ("fusedce", "fusedce_chunked", "fusedce_tiled")


def document(results: Sequence[Result], what: dict[str, Any]) -> str:
    """All tables."""
    return "\n\n".join([f"## Benchmarks: {heading(what)}", *map(section, results)]) + "\n"


def section(result: Result) -> str:
    """The table of one case, with its title, and a comparison of fusedce with the others."""
    title = f"### {result.head + ': ' if result.head else ''}{result.case}"
    rows = [row for name in SUMMARIES if (row := result.row(name))]
    summaries = [f"- {text}" for row in rows if (text := result.summary(row))]
    return "\n\n".join([title, table(result), *(["\n".join(summaries)] if summaries else [])])


def table(result: Result) -> str:
    """One row per provider; a failed provider has the reason."""
    lines = [_line(COLUMNS), "|" + "---|" * len(COLUMNS)]
    return "\n".join(lines + [_line(_cells(result, row)) for row in result.rows])


def _cells(result: Result, row: Row) -> list[str]:
    label = PROVIDERS[row.name].label if row.name in PROVIDERS else row.name
    if row.median is None:
        why = (row.failure or "no rounds").replace("|", "\\|").replace("\n", " ")
        size = "-" if row.extra_bytes is None else _mib(row.extra_bytes)
        return [label, "-", "-", "-", "-", "-", size, "-", "-", why]
    base = result.row("inductor")
    space = None
    if base and base.extra_bytes and row.extra_bytes is not None:
        space = row.extra_bytes / base.extra_bytes
    share = result.share(row)
    return [
        label,
        _ms(row.median),
        f"{_ms(min(row.seconds))}-{_ms(max(row.seconds))}",
        f"{len(row.seconds)}{' (not in turn)' if row.alone else ''}",
        "-" if share is None else f"{share:.0%}",
        _ratio(row.times(base)),
        _mib(row.extra_bytes),
        _ratio(space),
        _mib(result.scratch(row)),
        ", ".join(f"{row.errors[k]:.1e}" for k in ("loss", "dx", "dw") if k in row.errors) or "-",
    ]


def _ms(seconds: float) -> str:
    """Milliseconds with at least three digits."""
    return f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f}"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / MIB:.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
