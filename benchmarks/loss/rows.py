"""The measurements: a :class:`Row` per provider, a :class:`Result` per case; to and from JSON.

In: the answers of the workers. Out: the numbers of a table. All derived numbers are computed here,
from the stored seconds and bytes::

    >>> row = Row("fusedce", seconds=[0.5, 0.4, 0.6])
    >>> row.median
    0.5
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.loss.case import FLOOR, Case
from benchmarks.loss.providers import BARE


@dataclass
class Row:
    """The measurements of one provider in one case.

    Attributes:
        name: the provider.
        failure: why it has no numbers; empty if it has.
        errors: "loss", "dx", "dw", ... → ``|got - exact| / |exact|`` in float64.
        zeros: "dx", "dw" → the share of elements that are exactly zero, where that is compared.
        seconds: one per round in which it stepped.
        alone: whether the seconds are of one long step outside the rounds.
        first_seconds: seconds of its first step, compilation included.
        compile_seconds: of this without those of the second step.
        second_seconds: the same in a second process, which finds the caches of the first.
        extra_bytes: a step's peak memory beyond the memory in use before, gradients included.
        matched, rejected: losses that fusedce fused, and did not.
        log: the end of a failed provider's output.
    """

    name: str
    failure: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    zeros: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    alone: bool = False
    first_seconds: float | None = None
    compile_seconds: float | None = None
    second_seconds: float | None = None
    extra_bytes: int | None = None
    matched: int = 0
    rejected: int = 0
    log: str = ""

    @property
    def median(self) -> float | None:
        """Seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else None

    def times(self, other: Row | None) -> float | None:
        """The median over rounds of the time of a step, in units of another provider's time."""
        if other is None or not self.seconds or not other.seconds:
            return None
        if self.alone or other.alone:  # they have no common round
            return statistics.median(self.seconds) / statistics.median(other.seconds)
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=False))


@dataclass
class Result:
    """All rows of a case.

    Attributes:
        head: what stands before the case in a title: a head of :data:`benchmarks.loss.heads.HEADS`,
            the title of a program, or nothing.
        case: the case; its provider is empty.
        eager: eager's errors, which give the bounds for the others.
    """

    head: str
    case: Case
    rows: list[Row] = field(default_factory=list)
    eager: dict[str, float] = field(default_factory=dict)

    def row(self, name: str) -> Row | None:
        """The row of a provider, if it has numbers."""
        return next((r for r in self.rows if r.name == name and r.seconds), None)

    def share(self, row: Row) -> float | None:
        """The provider's speed in units of the bare GEMMs' speed."""
        slower = row.times(self.row(BARE))
        return None if slower is None else 1 / slower

    def rate(self, row: Row) -> float | None:
        """Operations of the bare GEMMs per second."""
        return None if row.median is None else self.case.flops / row.median

    def scratch(self, row: Row) -> int | None:
        """Extra bytes beyond the gradients that every provider has to return.

        An f32 gradient that is made for a narrower operand is scratch as a whole.
        """
        return None if row.extra_bytes is None else row.extra_bytes - self.case.gradient_bytes

    def summary(self, row: Row) -> str:
        """One line that compares the provider with the fastest other, Inductor and core."""
        ours = {"fusedce", "fusedce_chunked", "fusedce_tiled", BARE}
        others = [r for r in self.rows if r.seconds and r.name not in ours]
        parts = []
        if others:
            fastest = min(others, key=lambda r: r.median or math.inf)
            parts.append(f"{row.times(fastest):.2f} x {fastest.name}'s time, the fastest other")
        for name in ("inductor", "core"):
            other = self.row(name)
            if other and other.extra_bytes and row.extra_bytes is not None:
                parts.append(f"{row.extra_bytes / other.extra_bytes:.2f} x {name}'s extra peak")
        return f"{row.name}: {', '.join(parts)}" if parts else ""

    def as_json(self) -> dict[str, Any]:
        """All measurements and derived numbers."""
        case = dataclasses.asdict(self.case)
        del case["provider"]
        rows = []
        for row in self.rows:
            derived = {
                "median": row.median,
                "share_of_bare": self.share(row),
                "flops_per_second": self.rate(row),
                "scratch_bytes": self.scratch(row),
            }
            rows.append({**dataclasses.asdict(row), **derived})
        return {
            "head": self.head,
            "case": case,
            "gradient_bytes": self.case.gradient_bytes,
            "flops": self.case.flops,
            "eager_errors": self.eager,
            "rows": rows,
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Result:
        """The inverse of :meth:`as_json`."""
        names = {f.name for f in dataclasses.fields(Row)}
        rows = [Row(**{k: v for k, v in row.items() if k in names}) for row in value["rows"]]
        return Result(value["head"], Case("", **value["case"]), rows, value["eager_errors"])


def wrong(errors: dict[str, float], eager: dict[str, float], dtype: str) -> str:
    """Why a provider is refused; empty if its errors are within twice eager's."""
    for name in errors:
        bound = 2 * eager[name] + FLOOR[dtype]
        if not errors[name] <= bound:
            return f"refused: {name} is off by {errors[name]:.1e} (bound {bound:.1e})"
    return ""


def find(results: Iterable[Result], head: str, case: Case) -> Result | None:
    """The result of a case, if there is one."""
    return next((r for r in results if (r.head, r.case) == (head, case)), None)
