"""Which strategy computes one fused loss, chosen when its graph is rewritten.

In: sizes, dtype, device, what is computed and the user's setting. Out: a :class:`Choice`, which
says why and what it is expected to cost::

    >>> choose(2048, 512, 32000, torch.float32, torch.device("cpu"), spec, "auto").strategy
    'chunked'

A compiled graph cannot choose any more: the strategy decides whether the gradients are computed in
forward or in backward. Rows and classes at a time are :mod:`fxpass.schedule`'s, when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fxpass import cost, rates
from fxpass.cost import MIB
from fxpass.fit import fit
from fxpass.schedule import budget, compute_dtype, duration, lowering_for, size, work_of
from fxpass.spec import Spec

STRATEGIES = ("chunked", "tiled")

# Time that saving memory is worth, by kind of device: where the fastest strategy needs more than
# its budget beside the outputs (the f32 gradients that ``chunked`` keeps for operands of half the
# width), the strategy that needs the least is taken as long as it is no slower than this. On GPUs
# the f32 gradients are the price of the speed; a smaller budget asks for less.
MEMORY_IS_WORTH = {"cpu": 1.5}
# The model is not more exact than this: what is as fast is judged by its memory.
AS_FAST = 1.05


class Prediction(NamedTuple):
    """What a strategy is expected to cost: seconds of forward and backward, the larger scratch of
    the two, bytes of gradients that are kept in a wider dtype than their operand's; and the rows
    and classes at a time of its last run."""

    strategy: str
    seconds: float
    scratch: int
    wider: int
    rows: int
    classes: int

    @property
    def extra(self) -> int:
        """Bytes beside the outputs."""
        return self.scratch + self.wider

    def __str__(self) -> str:
        wider = f", {size(self.wider)} of f32 gradients" if self.wider else ""
        return f"{duration(self.seconds)}, {size(self.scratch)} of scratch{wider}"


@dataclass(frozen=True)
class Choice:
    """The strategy of one fused loss, and what it was chosen by.

    Attributes:
        strategy: ``chunked`` or ``tiled``.
        reason: why, in a few words.
        n, d, v, dtype, device, spec: what it was chosen for; ``n`` is the hint where the number of
            rows is symbolic.
        symbolic: whether it is.
        kept: whether the logits exist anyway.
        saved: whether forward computes the logits for backward too, and keeps them.
    """

    strategy: str
    reason: str
    n: int
    d: int
    v: int
    dtype: torch.dtype
    device: torch.device
    spec: Spec
    symbolic: bool = False
    kept: bool = False
    saved: bool = False

    @property
    def allowed(self) -> int:
        """The operator's budget in bytes."""
        return budget(self.v, self.dtype, self.device, self.spec.memory_mb)

    @property
    def logits(self) -> int:
        """Bytes of all logits."""
        return self.n * self.v * self.dtype.itemsize

    def predictions(self) -> tuple[Prediction, ...]:
        """What each strategy that is possible would cost, the chosen one first; on a CPU this
        measures its rates if nobody has yet."""
        rated = rates.device_rates(self.device, self.dtype)
        names = ("chunked",) if self.kept or self.saved else STRATEGIES
        ordered = sorted(names, key=lambda name: name != self.strategy)
        return tuple(self.predict(name, rated) for name in ordered)

    def predict(self, strategy: str, rated: cost.Rates) -> Prediction:
        """Time and memory of all runs of ``strategy`` on a device of some rates."""
        lowering, _ = lowering_for(self.device, self.dtype)
        sizes = self.n, self.d, self.v, self.dtype, self.device
        seconds, scratch, shape = 0.0, 0, (0, 0)
        kept = self.kept or self.saved
        for gradients in runs(strategy, self.spec):
            work = work_of(*sizes, lowering, self.spec, gradients, kept)
            shape = fit(lowering, strategy, work, self.allowed, self.device.type)
            scratch = max(scratch, cost.scratch(lowering, strategy, work, *shape))
            seconds += cost.seconds(lowering, strategy, work, *shape, rated)
        if self.saved:  # the linear, of all rows at once
            work = work_of(*sizes, lowering, self.spec, ())
            computed, given = (
                cost.seconds(lowering, "chunked", work._replace(kept=k), self.n, self.v, rated)
                for k in (0, 1)
            )
            seconds += computed - given
            scratch += self.logits
        wider = 0
        compute = compute_dtype(self.dtype)
        if strategy == "chunked":
            elements = {"x": self.n * self.d, "weight": self.v * self.d, "bias": self.v}
            total = sum(elements[name] for name in self.spec.gradients)
            if compute != self.dtype:
                wider = compute.itemsize * total
            if wider or lowering == "triton":
                # the last thing that backward does: they are scaled, in the dtype that is wanted
                seconds += (compute.itemsize + self.dtype.itemsize) * total / rated.bandwidth
        return Prediction(strategy, seconds, scratch, wider, *shape)

    def __str__(self) -> str:
        """One line, as ``explain`` prints it."""
        best, *others = self.predictions()
        at_a_time = f"{best.rows} rows" if best.strategy == "chunked" else f"{best.classes} classes"
        text = f"strategy: {best.strategy}, {at_a_time} at a time: {best}"
        if others:
            text += f" ({'; '.join(f'{other.strategy}: {other}' for other in others)})"
        traced = f"; for {self.n} rows, as traced" if self.symbolic else ""
        return f"{text}; {self.reason}{traced}"


def choose(
    n: int | torch.SymInt,
    d: int,
    v: int,
    dtype: torch.dtype,
    device: torch.device,
    spec: Spec,
    setting: str,
    kept: bool = False,
) -> Choice:
    """The strategy for x ``[n, d]`` and weight ``[v, d]``, when a graph is rewritten.

    Args:
        n: rows; the hint decides where they are symbolic.
        d, v: hidden size and classes.
        dtype: of x and weight, as they are multiplied.
        device: where they are.
        spec: what is computed; its ``strategy`` is not read.
        setting: ``auto``, ``chunked`` or ``tiled``.
        kept: whether the logits exist in the graph anyway.

    The fastest is chosen, by the model at the device's rates, of those that keep the budget. What
    is nearly as fast is judged by its memory (``AS_FAST``), and so is what is slower by no more
    than saving the f32 gradients is worth (``MEMORY_IS_WORTH``). In a shard of the classes forward
    cannot compute gradients, so that both strategies multiply four times: there the logits are
    saved for backward where they are small enough, and the choice's spec has the operator take no
    more than what they leave of the budget.
    """
    symbolic = isinstance(n, torch.SymInt)
    rows = (n.node.hint or 1) if isinstance(n, torch.SymInt) else n
    chunked = Choice(
        "chunked", "the logits exist anyway", rows, d, v, dtype, device, spec, symbolic, kept
    )
    if kept:
        return chunked
    if setting != "auto":
        return replace(chunked, strategy=setting, reason="as set")
    if spec.shard_of and spec.gradients and _can_save(chunked):
        return _saving(chunked)
    plain = chunked.predict("chunked", rates.nominal(device.type))
    if plain.rows >= rows and plain.extra <= chunked.allowed:
        # nothing is repeated, and no rate has to be known
        return replace(chunked, reason="one chunk is within the budget")
    possible = chunked.predictions()
    inside = [p for p in possible if p.scratch <= chunked.allowed]
    if not inside:
        least = min(possible, key=lambda p: p.scratch)
        return replace(chunked, strategy=least.strategy, reason="nothing is within the budget")
    fastest = min(inside, key=lambda p: p.seconds)
    over = fastest.extra > chunked.allowed
    worth = MEMORY_IS_WORTH.get(device.type, AS_FAST) if over else AS_FAST
    near = [p for p in inside if p.seconds <= worth * fastest.seconds]
    best = min(near, key=lambda p: p.extra)
    if best != fastest:
        reason = f"the least memory within {worth:g} times the fastest"
    else:
        reason = "the fastest" + ("" if inside == [*possible] else " within the budget")
    return replace(chunked, strategy=best.strategy, reason=reason)


def _can_save(choice: Choice) -> bool:
    """Whether the logits may stay from forward to backward, which then has a product less to do:
    within half of the budget, so that the other half holds what is worked on. Not where the
    lowering multiplies in a wider dtype than theirs."""
    lowering, _ = lowering_for(choice.device, choice.dtype)
    wider = lowering == "aten" and compute_dtype(choice.dtype) != choice.dtype
    return not wider and 2 * choice.logits <= choice.allowed


def _saving(choice: Choice) -> Choice:
    """With the logits saved, within the same budget: the operator gets what they leave of it."""
    saving = replace(choice, reason="a shard's logits are saved for backward", saved=True)
    if saving.predict("chunked", rates.nominal(choice.device.type)).scratch <= choice.allowed:
        return saving
    left = max(1, (choice.allowed - choice.logits) // MIB)
    return replace(saving, spec=replace(choice.spec, memory_mb=left))


def runs(strategy: str, spec: Spec) -> tuple[tuple[str, ...], ...]:
    """The gradients that forward computes and, where they have to wait, those of backward."""
    waits = strategy == "tiled" or spec.reduction == "none" or spec.lse
    return ((), spec.gradients) if waits and spec.gradients else (spec.gradients,)
