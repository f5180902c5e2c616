"""What a kind of suite measures, tells and asks of fusedce.

In: the results of a suite. Out: the columns of its tables, and a line for each number in which
fusedce is not good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.accuracy.schemes import ROUNDED, SCHEMES
from benchmarks.loss.providers import PROVIDERS, Provider
from benchmarks.loss.rows import Result, Row, wrong
from benchmarks.loss.table import ACCURACY, LOSS, PROGRAMS, Column

# fusedce's error may be FACTOR times the larger of eager's error and the error of rounding float64
# (which eager may undercut by chance), plus one unit in the last place of f32.
FACTOR = 1.05
LAST_DIGIT = 2.0**-23


class Kind(NamedTuple):
    """A kind of suite.

    Attributes:
        worker: the module of its processes.
        providers: who can be measured.
        columns: of a table.
        refuses: why a provider gets no numbers, from its errors, eager's, and the dtype; empty if
            it does.
        always: providers that the others are compared with.
        measures: whether time and memory are measured, not errors alone.
        twice: whether a second process compiles with the caches of the first, and measures memory:
            on a CPU that is the process's.
    """

    worker: str
    providers: dict[str, Provider]
    columns: Sequence[Column]
    refuses: Callable[..., str] = wrong
    always: tuple[str, ...] = ()
    measures: bool = True
    twice: bool = False


KINDS = {
    "loss": Kind("benchmarks.loss.worker", PROVIDERS, LOSS),
    "programs": Kind("benchmarks.loss.worker", PROVIDERS, PROGRAMS, twice=True),
    "accuracy": Kind(
        "benchmarks.accuracy.worker",
        SCHEMES,
        ACCURACY,
        lambda *_: "",
        always=(ROUNDED,),
        measures=False,
    ),
}


def complaints(results: Sequence[Result], kind: str, memory: float) -> list[str]:
    """A line for each case in which fusedce failed or is worse than it may be.

    Args:
        memory: what fusedce may add to the memory, in units of what Inductor adds.
    """
    found = []
    for result in results:
        title = f"{result.head + ': ' if result.head else ''}{result.case}"
        lines = worse(result) if kind == "accuracy" else _failed(result)
        ours, theirs = result.row("fusedce"), result.row("inductor")
        if ours and theirs and ours.extra_bytes is not None and theirs.extra_bytes is not None:
            times = max(1, ours.extra_bytes) / max(1, theirs.extra_bytes)
            if times > memory:
                lines.append(f"{times:.2f} of inductor's memory (at most {memory:g})")
        found += [f"{title}: {line}" for line in lines]
    return found


def _failed(result: Result) -> list[str]:
    """Who of fusedce has no numbers. Strategies may lack what a case needs, but not be wrong."""
    return [
        f"{row.name}: {row.failure}"
        for row in result.rows
        if (row.name == "fusedce" and row.failure)
        or ("fusedce" in row.name and row.failure.startswith("refused"))
    ]


def worse(result: Result) -> list[str]:
    """One line for each number in which fusedce is less accurate than eager, with their ratio.

    The share of zeros is compared too, because a zero is an element that underflowed. A setting in
    which fusedce or eager did not run has a line as well, since it was not checked.
    """
    rows = {row.name: row for row in result.rows}
    named = {who: rows.get(who) or Row(who, "not run") for who in ("eager", "fusedce", ROUNDED)}
    failed = [f"{who}: {row.failure}" for who, row in named.items() if row.failure]
    if failed:
        return [f"not checked, {'; '.join(failed)}"]
    ours, eager, least = named["fusedce"], named["eager"], named[ROUNDED]
    found = []
    for what, error in ours.errors.items():
        bound = FACTOR * max(eager.errors[what], least.errors[what]) + LAST_DIGIT
        if not error <= bound:
            found.append(f"{what} {_against(error, eager.errors[what])}")
    for what, share in ours.zeros.items():
        if not share <= FACTOR * max(eager.zeros[what], least.zeros[what]):
            found.append(f"share of zeros in {what} {_against(share, eager.zeros[what])}")
    return found


def _against(ours: float, eager: float) -> str:
    ratio = f"{ours / eager:.3g}" if eager else ("1" if ours == 0 else "inf")
    return f"{ours:.3g}, eager {eager:.3g}, {ratio} times"
