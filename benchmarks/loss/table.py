"""The columns of tables, and the writer of markdown.

In: :class:`benchmarks.loss.rows.Result`. Out: a table, a line for each provider; a number that is
not known is ``-``, and a failed provider has the reason in the last column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.loss.rows import Result, Row

MIB = 2**20
Column = tuple[str, Callable[[Result, Row], str]]  # its title, and a cell


def markdown(lines: Iterable[Sequence[str]]) -> str:
    """A table of cells, the first line above; any text may stand in a cell."""
    first, *rest = [[_escaped(cell) for cell in line] for line in lines]
    lines = [first, ["---"] * len(first), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def number(value: float | None, form: str, unit: float = 1) -> str:
    """A number in a unit, if it is known."""
    return "-" if value is None else format(value / unit, form)


def ratio(value: float | None, other: float | None) -> str:
    """Of two numbers, if both are known."""
    return "-" if value is None or not other else f"{value / other:.2f}"


def milliseconds(seconds: float | None) -> str:
    """With at least three digits."""
    if seconds is None:
        return "-"
    return f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f}"


def _between(row: Row) -> str:
    if not row.seconds:
        return "-"
    return f"{milliseconds(min(row.seconds))}-{milliseconds(max(row.seconds))}"


def _steps(row: Row) -> str:
    return f"{len(row.seconds)}{' (not in turn)' if row.alone else ''}" if row.seconds else "-"


def _base(result: Result) -> Row:
    return result.row("inductor") or Row("")


def _errors(row: Row) -> str:
    return ", ".join(f"{row.errors[k]:.1e}" for k in ("loss", "dx", "dw") if k in row.errors) or "-"


def _largest(row: Row) -> str:
    return f"{max(row.errors.values()):.1e}" if row.errors else "-"


def _fused(row: Row) -> str:
    count = row.matched + row.rejected
    return f"{row.matched} of {count}" if count else "-"


def _error(what: str) -> Column:
    title = {"loss": "loss", "dx": "dX", "dw": "dW"}[what]
    return title, lambda _, row: number(row.errors.get(what), ".1e")


def _zeros(what: str) -> Column:
    def cell(_: Result, row: Row) -> str:
        share = row.zeros.get(what)
        return "-" if share is None else "0" if share == 0 else f"{100 * share:.2g} %"

    return f"zeros in {what[0]}{what[1].upper()}", cell


def _beside_eager(result: Result, row: Row) -> str:
    eager = next((r for r in result.rows if r.name == "eager"), Row(""))
    theirs = eager.errors.get("dw")
    return number(row.errors.get("dw"), ".3g", theirs) if theirs else "-"


_TIME: list[Column] = [
    ("ms (median)", lambda _, row: milliseconds(row.median)),
    ("min-max", lambda _, row: _between(row)),
    ("steps", lambda _, row: _steps(row)),
]
_SPEED: Column = ("/ inductor", lambda result, row: number(row.times(_base(result)), ".2f"))
_MEMORY: list[Column] = [
    ("extra peak MiB", lambda _, row: number(row.extra_bytes, ".0f", MIB)),
    ("/ inductor", lambda result, row: ratio(row.extra_bytes, _base(result).extra_bytes)),
]
LOSS: list[Column] = [
    *_TIME,
    ("of bare GEMMs", lambda result, row: number(result.share(row), ".0%")),
    _SPEED,
    *_MEMORY,
    ("scratch MiB", lambda result, row: number(result.scratch(row), ".0f", MIB)),
    ("error of loss, dX, dW", lambda _, row: _errors(row)),
]
PROGRAMS: list[Column] = [
    *_TIME,
    _SPEED,
    *_MEMORY,
    ("compiles, s", lambda _, row: number(row.compile_seconds, ".2f")),
    ("/ inductor", lambda result, row: ratio(row.compile_seconds, _base(result).compile_seconds)),
    ("second process, s", lambda _, row: number(row.second_seconds, ".2f")),
    ("/ inductor", lambda result, row: ratio(row.second_seconds, _base(result).second_seconds)),
    ("fused", lambda _, row: _fused(row)),
    ("largest error", lambda _, row: _largest(row)),
]
ACCURACY: list[Column] = [
    *(_error(what) for what in ("loss", "dx", "dw")),
    ("dW / eager", _beside_eager),
    *(_zeros(what) for what in ("dx", "dw")),
]


def table(result: Result, columns: Sequence[Column], labels: dict[str, str]) -> str:
    """One line per provider.

    Args:
        labels: provider → its name in the table.
    """
    lines = [["provider", *(title for title, _ in columns)]]
    for row in result.rows:
        cells = [labels.get(row.name, row.name), *(cell(result, row) for _, cell in columns)]
        if row.failure:
            cells[-1] = row.failure
        lines.append(cells)
    return markdown(lines)
