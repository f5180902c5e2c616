"""A head: what a program reduces from a linear's output, and the operator calls that compute it.

In: a flow and its calls. Out: a :class:`Head`, which :mod:`fxpass.rewrite.reductions` rewrites, and
which is a match of a report.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxpass.graph.nodes import hint
from fxpass.graph.source import source_line
from fxpass.match.classes import Flow
from fxpass.match.join import Call
from fxpass.match.linears import shape_of
from fxpass.spec.words import words

# What becomes of logits that leave the graph, or that others read.
LEFT = {
    "keep": " (logits kept: another node reads them)",
    "defer": " (logits deferred: computed when they are first used)",
    "drop": " (logits dropped: their values cannot be used)",
}


@dataclass(frozen=True)
class Head:
    """A head whose reductions are fused.

    Attributes:
        flow: what the program computes of its logits.
        calls: the operator calls.
        logits_mode: ``never``: the logits are never materialised; ``keep``: the graph materialises
            them, and the operator reads them; ``defer`` or ``drop``: a deferred or dropped tensor
            takes their place among the graph's outputs.
    """

    flow: Flow
    calls: tuple[Call, ...]
    logits_mode: str

    @property
    def source(self) -> str:
        """The user's line of the first reduction."""
        return source_line(self.flow.reductions[0].node)

    @property
    def losses(self) -> int:
        """How many losses its reductions are; those without a name count as one."""
        return max(1, sum(r.loss is not None for r in self.flow.reductions))

    @property
    def shape(self) -> tuple[int | torch.SymInt, int | torch.SymInt]:
        """Rows and classes."""
        return shape_of(self.flow.linear)

    @property
    def of_rank(self) -> tuple[int, int]:
        """Rows and classes of a rank: of the one with most, so that all ranks decide alike."""
        (n, v), sharding = map(hint, self.shape), self.flow.sharding
        return (n, v) if sharding is None else (n // sharding.rows, sharding.most)

    @property
    def logits_bytes(self) -> int:
        """Bytes of one copy of a rank's logits in the linear's output dtype."""
        n, v = self.of_rank
        return n * v * self.flow.dtype.itemsize

    def __str__(self) -> str:
        n, v = self.shape
        computed = "; ".join(map(_words, self.calls))
        ranks = f" ({self.flow.sharding})" if str(self.flow.sharding or "") else ""
        kept = LEFT.get(self.logits_mode, "")
        return f"fused: {self.source}: logits [{n}, {v}]{ranks}, {computed}{kept}"


def _words(call: Call) -> str:
    what, computed = "cross-entropy", words(call.spec)
    if all(reduced.loss is None for reduced in call.reductions):
        return computed
    return f"{what} {computed}" if computed.startswith("of ") else f"{what}: {computed}"
