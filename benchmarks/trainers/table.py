"""Prints training loops as markdown.

In: what the worker of each backend answered. Out: a table: fused or not, memory, losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.loss.table import MIB

BACKENDS = ("eager", "inductor", "fusedce")
COLUMNS = (
    "trainer", "fused", "MiB: eager", "inductor", "fusedce", "/ inductor",
    "losses differ: inductor", "fusedce", "last loss / first",
)  # fmt: skip
# Distance of losses from eager's, relative to the first: twenty steps carry rounding on. Some
# programs carry it further: then Inductor's losses differ, too, and fusedce's may by so many times.
TOLERANCE, OF_INDUCTOR = 1e-4, 1.5


@dataclass
class Row:
    """One program.

    Attributes:
        answers: of the worker of each backend (:meth:`benchmarks.trainers.worker.Session.train`).
        failures: why a backend has no answer.
    """

    program: str
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        """Whether fusedce never computed logits as a whole."""
        return bool(self.answers.get("fusedce", {}).get("fused"))

    @property
    def memory(self) -> float | None:
        """The peak of fusedce, relative to Inductor's."""
        ours, theirs = (self.answers.get(b, {}).get("bytes") for b in ("fusedce", "inductor"))
        return ours / theirs if ours is not None and theirs else None

    def distance(self, backend: str) -> float | None:
        """The largest difference of a loss to eager's; infinite if there are other losses."""
        if not {"eager", backend} <= set(self.answers):
            return None
        theirs, ours = (self.answers[b]["losses"] for b in ("eager", backend))
        if len(theirs) != len(ours) or not ours:
            return float("inf")
        return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))

    @property
    def wrong(self) -> bool:
        """Whether fusedce has no losses, or others than eager."""
        distance = self.distance("fusedce")
        if distance is None:
            return True
        allowed = TOLERANCE * max(1.0, abs(self.answers["eager"]["losses"][0]))
        theirs = self.distance("inductor")
        if theirs is not None and math.isfinite(theirs):
            allowed = max(allowed, OF_INDUCTOR * theirs)
        return not distance <= allowed

    def cells(self) -> list[str]:
        """The cells of its line in the table."""
        why = self.answers.get("fusedce", {}).get("why") or self.failures.get("fusedce", "")
        fused = "yes" if self.fused else f"no: {why or 'not run'}"
        bytes_of = [self.answers.get(b, {}).get("bytes") for b in BACKENDS]
        distances = [self.distance(b) for b in BACKENDS[1:]]
        losses = self.answers.get("eager", {}).get("losses")
        return [
            self.program,
            fused.replace("|", "\\|"),
            *("-" if b is None else f"{b / MIB:.0f}" for b in bytes_of),
            "-" if self.memory is None else f"{self.memory:.2f}",
            *("-" if d is None else f"{d:.1e}" for d in distances),
            f"{losses[-1]:.4g} / {losses[0]:.4g}" if losses else "-",
        ]


def table(rows: Sequence[Row]) -> str:
    """The table, and below it the backends that failed."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(row.cells() for row in rows)]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    failed = [f"- {r.program}, {b}: {why}" for r in rows for b, why in r.failures.items()]
    return text + ("\n" + "\n".join(failed) + "\n" if failed else "")
