"""What a report says of a row region that is fused.

In: a :class:`fxpass.capture.capture.Captured` and its calls in a graph. Out: a
:class:`RegionMatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fxpass.capture.capture import Captured
from fxpass.capture.sharding import Sharding
from fxpass.graph.functions import LOSSES, function_of
from fxpass.graph.nodes import hint
from fxpass.plan.choice import Choice
from fxpass.spec.reductions import Reductions
from fxpass.spec.words import words

# What becomes of logits that leave the graph, or that others read.
LEFT = {
    "keep": " (logits kept: another node reads them)",
    "defer": " (logits deferred: computed when they are first used)",
    "drop": " (logits dropped: their values cannot be used)",
}


@dataclass(frozen=True)
class RegionMatch:
    """A row region that is fused.

    Attributes:
        source: the user's line of its first result.
        shapes: rows and classes of each head.
        itemsizes: bytes of a logit of each head.
        operations: the ATen calls on logits.
        choices: how its calls run.
        named: the losses among its nodes that have a name.
        words: what calls with a normal form compute.
        kernels: the names of the kernels that Inductor made for its row functions.
        logits_mode: ``never``: the logits are never materialised; ``keep``: the graph materialises
            them, and the operator reads them; ``defer`` or ``drop``: a deferred or dropped tensor
            takes their place among the graph's outputs.
        sharding: how a head is distributed over ranks; None on one rank.
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
    sharding: Sharding | None = None

    @property
    def losses(self) -> int:
        """How many losses it is; those without a name count as one. None if the graph reduces
        nothing of its logits."""
        return max(1, self.named) if self.choices else 0

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of a rank's logits of all heads."""
        shapes, of = zip(self.shapes, self.itemsizes, strict=True), self.sharding
        sizes = ((hint(n), hint(v) if of is None else of.most, size) for (n, v), size in shapes)
        return sum(n * v * size for n, v, size in sizes) // (1 if of is None else of.rows)

    @property
    def calls(self) -> tuple[_Choice, ...]:
        """What a report says of the operator calls, a line each."""
        kernels = [f"kernels: {', '.join(self.kernels)}"] if self.kernels else []
        return tuple(map(_Choice, (*self.choices, *kernels)))

    def __str__(self) -> str:
        logits = " and ".join(f"[{n}, {v}]" for n, v in self.shapes)
        logits += f" ({self.sharding})" if str(self.sharding or "") else ""
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
        """Of a call with a normal form."""
        return self.choice.spec


def match_of(captured: Captured) -> RegionMatch:
    shapes, sizes = [], []
    for head in captured.slice.recorder.heads:
        rows = head.x.shape[-1 if head.first else -2]
        shapes.append((rows, head.classes))
        sizes.append(head.x.fake.dtype.itemsize)
    named = sum(function_of(node) in LOSSES for node in captured.slice.ran)
    of_heads = captured.source, tuple(shapes), tuple(sizes), captured.operations
    mode, sharding = "keep" if captured.kept else "never", captured.slice.sharding
    return RegionMatch(*of_heads, named=named, logits_mode=mode, sharding=sharding)


def words_of(choices: Sequence[Choice], named: int) -> str:
    """What calls with a formula compute, in words. Those of backward alone have the gradients."""
    late = [words(c.spec, backward=True) for c in choices if c.backward and c.spec.gradients]
    of_forward = [words(c.spec) for c in choices if not c.backward]
    first, *more = of_forward or late or [words(c.spec) for c in choices]
    if late and first not in late:  # backward has the gradients of what forward returns
        outputs, _, none = first.rpartition("; ")
        first = f"{outputs}; {late[0].rpartition('; ')[2]}" if none == "no gradients" else first
    if named:
        first = f"cross-entropy {first}" if first.startswith("of ") else f"cross-entropy: {first}"
    return "; ".join((first, *more))
