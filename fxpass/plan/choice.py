"""How a call with a formula runs, for a report.

In: sizes, dtype, device and spec of a call. Out: a line::

    >>> spec = Reductions((), gradients=("x", "weight"), total=("pick",))
    >>> cpu = torch.device("cpu")
    >>> Choice("it has a total", 2048, 512, 32000, torch.float32, cpu, spec).strategy
    'chunked'

:mod:`fxpass.plan.plan` plans the rows and classes when the call runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fxpass.formula.reductions import Reductions
from fxpass.plan.budget import scratch_budget, size_text
from fxpass.plan.plan import Plan, plan_head


@dataclass(frozen=True)
class Choice:
    """The strategy of one call, and the facts behind the choice."""

    reason: str  # for the strategy, in a few words
    n: int  # rows, hidden size and classes; hints where a size is symbolic
    d: int
    v: int
    dtype: torch.dtype  # of x and weight, as their device
    device: torch.device
    spec: Reductions  # with a total, forward computes the gradients
    symbolic: bool = False  # whether the number of rows is symbolic
    backward: bool = False  # whether the call runs in backward

    @property
    def strategy(self) -> str:
        """``chunked`` if forward computes the gradients, or if there are none, else ``tiled``."""
        waits = self.backward or not self.spec.total
        return "tiled" if self.spec.gradients and waits else "chunked"

    @property
    def allowed(self) -> int:
        """The operator's budget in bytes."""
        return scratch_budget(self.n, self.v, self.dtype, self.device, self.spec.memory_mb)

    @property
    def logits(self) -> int:
        """Bytes of all logits."""
        return self.n * self.v * self.dtype.itemsize

    def plan(self) -> Plan:
        """The plan of the run that computes the gradients, or of forward if there are none."""
        return plan_head(
            n=self.n,
            d=self.d,
            v=self.v,
            dtype=self.dtype,
            device=self.device,
            spec=self.spec,
            scaled=False,
            backward=bool(self.spec.gradients),
        )

    def __str__(self) -> str:
        """One line, as ``explain`` prints it."""
        plan = self.plan()
        at_a_time = f"{plan.rows} rows at a time"
        if plan.strategy == "tiled" or plan.in_place:
            at_a_time = f"{plan.rows} rows and {plan.classes} classes at a time"
        parts = [f"{size_text(plan.scratch)} of scratch"]
        parts += [f"{size_text(plan.sums)} of f32 sums"] * bool(plan.sums)
        parts += [f"{-(-self.n // plan.rows)} chunks are added up in bf16"] * plan.rounded
        place = ", the logits in the weight's gradient" * plan.in_place
        traced = f"; for {self.n} rows, as traced" if self.symbolic else ""
        return (
            f"strategy: {self.strategy}, {at_a_time}{place}: {', '.join(parts)}; "
            f"{self.reason}{traced}"
        )
