"""A report's lines of a fused region.

In: the pass's records of a region's heads and calls, or logits that are deferred alone. Out: a
:class:`RegionMatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxpass.formula.reductions import Reductions
from fxpass.formula.words import words
from fxpass.graph.nodes import hint
from fxpass.plan.choice import Choice

# Of logits that leave the graph.
LEFT = {
    "defer": " (logits deferred: computed when they are first used)",
    "drop": " (logits dropped: their values cannot be used)",
}


@dataclass(frozen=True)
class RegionMatch:
    """A row region that is fused.

    Attributes:
        source: the user's line of its loss, or of the first operation that reduces its classes.
        shapes: rows and classes of each head.
        itemsizes: bytes of a logit of each head.
        operations: the ATen calls on logits.
        choices: how its calls run.
        named: the number of its losses that have a name.
        words: its formulas in words.
        kernels: the names of Inductor's kernels for its row functions.
        logits_mode: ``never``: the logits are never materialised; ``defer`` or ``drop``: a deferred
            or dropped tensor takes their place among the graph's outputs.
    """

    source: str
    shapes: tuple[tuple[Any, Any], ...]
    itemsizes: tuple[int, ...]
    operations: tuple[str, ...]
    choices: tuple[str | Choice, ...] = ()
    kernels: tuple[str, ...] = ()
    logits_mode: str = "never"
    named: int = 0
    words: str = ""

    @property
    def losses(self) -> int:
        """The number of its losses; those without a name count as one. 0 if the graph does not
        reduce its logits."""
        return max(1, self.named) if self.choices else 0

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of a rank's logits of all heads."""
        shapes = zip(self.shapes, self.itemsizes, strict=True)
        return sum(hint(n) * hint(v) * itemsize for (n, v), itemsize in shapes)

    @property
    def calls(self) -> tuple[_Choice, ...]:
        """A report's lines of the operator calls, one each."""
        kernels = [f"kernels: {', '.join(self.kernels)}"] if self.kernels else []
        return tuple(map(_Choice, (*self.choices, *kernels)))

    def __str__(self) -> str:
        logits = " and ".join(f"[{n}, {v}]" for n, v in self.shapes)
        heads = "1 head" if len(self.shapes) == 1 else f"{len(self.shapes)} heads"
        operations = ", ".join(self.operations)
        left = LEFT.get(self.logits_mode, "")
        if not self.choices:
            return f"deferred: {self.source}: logits {logits}{left}"
        if self.words:
            return f"fused: {self.source}: logits {logits}, {self.words}{left}"
        return f"fused: {self.source}: region of {heads}, logits {logits}: {operations}{left}"


@dataclass(frozen=True)
class _Choice:
    choice: Any

    @property
    def spec(self) -> Reductions:
        """The formula of a call that has one."""
        return self.choice.spec


def words_of(choices: Sequence[Choice], named: int) -> str:
    """Calls with a formula in words. If backward has calls, only these have gradients."""
    backward = [words(c.spec, backward=True) for c in choices if c.backward and c.spec.gradients]
    forward = [words(c.spec) for c in choices if not c.backward]
    first, *more = forward or backward or [words(c.spec) for c in choices]
    if backward and first not in backward:  # it has the gradients of forward's outputs
        outputs, _, gradients = first.rpartition("; ")
        if gradients == "no gradients":
            first = f"{outputs}; {backward[0].rpartition('; ')[2]}"
    if named:
        first = f"cross-entropy {first}" if first.startswith("of ") else f"cross-entropy: {first}"
    return "; ".join((first, *more))
