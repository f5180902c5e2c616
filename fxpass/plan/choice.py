"""Chooses whether forward or backward computes the gradients of one operator call.

In: sizes, dtype, device, the call's spec and the user's setting. Out: a :class:`Choice` with its
reason::

    >>> total = Reductions((), gradients=("x", "weight"), total=("pick",))
    >>> waiting = Reductions(("pick",), gradients=("x", "weight"))
    >>> of_call = 2048, 512, 32000, torch.float32, torch.device("cpu"), total, waiting
    >>> choose(*of_call, "auto").strategy
    'chunked'

A compiled graph cannot change the strategy. :mod:`fxpass.plan.plan` plans the rows and classes when
the operator runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fxpass.plan.devices import implementation_for, multiplied_in
from fxpass.plan.plan import MIB, Plan, budget, plan, size
from fxpass.spec.dtypes import gradient_dtype
from fxpass.spec.reductions import Reductions


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
    logits_exist: bool = False  # whether the graph computes the logits anyway
    save_logits: bool = False  # whether forward saves the logits for backward

    @property
    def strategy(self) -> str:
        """``chunked`` if forward computes the gradients, or if there are none, else ``tiled``."""
        waits = self.backward or not self.spec.total
        return "tiled" if self.spec.gradients and waits else "chunked"

    @property
    def allowed(self) -> int:
        """The operator's budget in bytes."""
        return budget(self.n, self.v, self.dtype, self.device, self.spec.memory_mb)

    @property
    def logits(self) -> int:
        """Bytes of all logits."""
        return self.n * self.v * self.dtype.itemsize

    def plan(self) -> Plan:
        """The plan of the run that computes the gradients, or of forward if there are none."""
        sizes = self.n, self.d, self.v, self.dtype, self.device
        exist = self.logits_exist or self.save_logits
        return plan(*sizes, self.spec, False, bool(self.spec.gradients), exist)

    def __str__(self) -> str:
        """One line, as ``explain`` prints it."""
        found = self.plan()
        at_a_time = f"{found.rows} rows at a time"
        if found.strategy == "tiled" or found.in_place:
            at_a_time = f"{found.rows} rows and {found.classes} classes at a time"
        parts = [f"{size(found.scratch + self.logits * self.save_logits)} of scratch"]
        parts += [f"{size(found.sums)} of f32 sums"] * bool(found.sums)
        parts += [f"{-(-self.n // found.rows)} chunks are added up in bf16"] * found.rounded
        place = ", the logits in the weight's gradient" * found.in_place
        traced = f"; for {self.n} rows, as traced" if self.symbolic else ""
        return (
            f"strategy: {self.strategy}, {at_a_time}{place}: {', '.join(parts)}; "
            f"{self.reason}{traced}"
        )


def choose(
    n: int | torch.SymInt,
    d: int | torch.SymInt,
    v: int | torch.SymInt,
    dtype: torch.dtype,
    device: torch.device,
    total: Reductions | None,
    waiting: Reductions,
    setting: str,
    logits_exist: bool = False,
    others: tuple[int | torch.SymInt, ...] = (),
    sharded: bool = False,
) -> Choice:
    """Chooses the strategy for x ``[n, d]`` and weight ``[v, d]`` of ``dtype`` after casts; for the
    hint where a size is symbolic.

    ``chunked`` saves the gradients that forward computes. Backward returns one gradient of the
    weight in any case; ``chunked`` is chosen if the saved gradients exceed this one by no more than
    the logits take. Otherwise ``tiled`` saves none, and backward recomputes the logits.

    Args:
        total: the call whose forward computes the gradients; None if they are known only in
            backward.
        waiting: the call whose backward computes the gradients.
        setting: ``auto``, ``chunked`` or ``tiled``.
        logits_exist: whether the graph computes the logits anyway.
        others: the rows of each other call over the same weight in this graph; each of them saves
            its gradients for backward.
        sharded: whether it is a call of a vocabulary shard, which saves small logits for backward.
    """
    symbolic = isinstance(n, torch.SymInt)
    rows, hidden, classes = (_hint(number) for number in (n, d, v))
    facts = rows, hidden, classes, dtype, device
    later = Choice("", *facts, waiting, symbolic, logits_exist)
    now = later if total is None else replace(later, spec=total)
    too_wide = total is not None and _too_wide(now, others)
    if logits_exist and not too_wide:
        return replace(now, reason="the logits exist anyway")
    if setting != "auto":
        return replace(later if setting == "tiled" else now, reason="as set")
    if sharded and waiting.gradients and (saving := _saving(later)):
        return saving
    if not waiting.gradients:
        return replace(now, reason="there are no gradients")
    if total is None:
        return replace(later, reason="the rows' incoming gradients are known only in backward")
    if too_wide:
        beside = f" of {1 + len(others)} losses over one weight" if others else ""
        why = f"saved gradients{beside} would take more than the logits"
        return replace(later, reason=why)
    found = now.plan()
    if total.memory_mb and found.scratch + found.sums > now.allowed:
        return replace(later, reason="a chunk and the f32 sums exceed the budget")
    return replace(now, reason="the gradients are computed with the loss")


def _hint(number: int | torch.SymInt) -> int:
    return (number.node.hint or 1) if isinstance(number, torch.SymInt) else number


def _too_wide(choice: Choice, others: tuple[int | torch.SymInt, ...]) -> bool:
    """Whether the weight gradients that ``chunked`` saves (one per loss, in f32 for fp16) exceed
    the one that backward returns by more than the logits of all losses take."""
    if "weight" not in choice.spec.gradients:
        return False
    unrounded, narrow = "weight" in choice.spec.unrounded, choice.dtype.itemsize
    saved = gradient_dtype(choice.dtype, unrounded).itemsize
    returned = saved if unrounded else narrow
    total = choice.n + sum(map(_hint, others))
    return choice.d * ((1 + len(others)) * saved - returned) > total * narrow


def _saving(choice: Choice) -> Choice | None:
    """The choice with logits that forward saves for backward, and a budget that is reduced by their
    bytes. None if they take more than half of the budget, whose other half is scratch, or if the
    implementation multiplies in a wider dtype."""
    implementation, _ = implementation_for(choice.device, choice.dtype)
    wider = implementation == "aten" and multiplied_in(choice.dtype, choice.device) != choice.dtype
    if wider or 2 * choice.logits > choice.allowed:
        return None
    saving = replace(choice, reason="a shard's logits are saved for backward", save_logits=True)
    if saving.plan().scratch + choice.logits <= choice.allowed:
        return saving
    left = max(1, (choice.allowed - choice.logits) // MIB)
    return replace(saving, spec=replace(choice.spec, memory_mb=left))
