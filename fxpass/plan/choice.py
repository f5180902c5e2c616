"""Chooses the strategy of one fused loss when its graph is rewritten.

In: sizes, dtype, device, spec and the user's setting. Out: a :class:`Choice` with its reason::

    >>> spec = Spec(gradients=("x", "weight"))
    >>> choose(2048, 512, 32000, torch.float32, torch.device("cpu"), spec, "auto").strategy
    'chunked'

A compiled graph cannot change the strategy, because it fixes whether forward or backward computes
the gradients. :mod:`fxpass.plan.plan` plans the rows and classes when the operator runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fxpass.plan.devices import implementation_for, multiplied_in
from fxpass.plan.plan import MIB, Plan, budget, plan, size
from fxpass.spec.dtypes import gradient_dtype
from fxpass.spec.spec import Spec


@dataclass(frozen=True)
class Choice:
    """The strategy of one fused loss, and the facts behind the choice.

    Attributes:
        strategy: ``chunked`` or ``tiled``.
        reason: the reason for the strategy, in a few words.
        n, d, v: rows, hidden size and classes; hints where a size is symbolic.
        dtype, device: of x and weight.
        spec: the computation.
        symbolic: whether the number of rows is symbolic.
        logits_exist: whether the graph computes the logits anyway.
        save_logits: whether forward saves the logits for backward.
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
    logits_exist: bool = False
    save_logits: bool = False

    @property
    def allowed(self) -> int:
        """The operator's budget in bytes."""
        return budget(self.v, self.dtype, self.device, self.spec.memory_mb)

    @property
    def logits(self) -> int:
        """Bytes of all logits."""
        return self.n * self.v * self.dtype.itemsize

    def plan(self) -> Plan:
        """The plan of the run that computes the gradients, or of forward if there are none."""
        spec = replace(self.spec, strategy=self.strategy)
        sizes = self.n, self.d, self.v, self.dtype, self.device
        exist = self.logits_exist or self.save_logits
        return plan(*sizes, spec.reductions(), False, bool(spec.gradients), exist)

    def __str__(self) -> str:
        """One line, as ``explain`` prints it."""
        found = self.plan()
        at_a_time = f"{found.rows} rows at a time"
        if found.strategy == "tiled" or found.in_place:
            at_a_time = f"{found.rows} rows and {found.classes} classes at a time"
        parts = [f"{size(found.scratch + self.logits * self.save_logits)} of scratch"]
        parts += [f"{size(found.sums)} of f32 sums"] * bool(found.sums)
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
    spec: Spec,
    setting: str,
    logits_exist: bool = False,
    others: tuple[int | torch.SymInt, ...] = (),
) -> Choice:
    """Chooses the strategy for x ``[n, d]`` and weight ``[v, d]``.

    Args:
        n, d, v: rows, hidden size and classes; the hint decides where a size is symbolic.
        dtype: of x and weight, after casts.
        device: of x and weight.
        spec: the computation; its ``strategy`` is not read.
        setting: ``auto``, ``chunked`` or ``tiled``.
        logits_exist: whether the graph computes the logits anyway.
        others: the number of rows of each other loss over the same weight in this graph; each of
            these losses saves its gradients for backward.

    ``chunked`` computes the gradients in forward and saves them for backward. Backward returns one
    gradient of the weight in any case; ``chunked`` is chosen if the saved gradients exceed this one
    by no more than the logits take. Otherwise ``tiled`` saves no gradients and backward recomputes
    the logits. A vocabulary shard saves small logits for backward; the choice's spec then reduces
    the operator's budget by the bytes of the logits.
    """
    symbolic = isinstance(n, torch.SymInt)
    rows, hidden, classes = (_hint(number) for number in (n, d, v))
    one = Choice("chunked", "", rows, hidden, classes, dtype, device, spec, symbolic, logits_exist)
    if logits_exist and not _too_wide(one, others):
        return replace(one, reason="the logits exist anyway")
    if setting != "auto":
        return replace(one, strategy=setting, reason="as set")
    if spec.shard_of and spec.gradients and _can_save(one):
        return _saving(one)
    found = one.plan()
    fits = not spec.memory_mb or found.scratch + found.sums <= one.allowed
    if not spec.gradients:
        return replace(one, reason="there are no gradients")
    if not replace(spec, strategy="chunked").totals:
        why = "the rows' incoming gradients are known only in backward"
    elif _too_wide(one, others):
        beside = f" of {1 + len(others)} losses over one weight" if others else ""
        why = f"saved gradients{beside} would take more than the logits"
    elif not fits:
        why = "a chunk and the f32 sums exceed the budget"
    else:
        return replace(one, reason="the gradients are computed with the loss")
    return replace(one, strategy="tiled", reason=why)


def _hint(number: int | torch.SymInt) -> int:
    return (number.node.hint or 1) if isinstance(number, torch.SymInt) else number


def _too_wide(choice: Choice, others: tuple[int | torch.SymInt, ...]) -> bool:
    """Whether the weight gradients that ``chunked`` saves (one per loss, in f32 for fp16) exceed
    one gradient in the weight's dtype by more than the logits of all losses take."""
    if "weight" not in choice.spec.gradients:
        return False
    saved = (1 + len(others)) * gradient_dtype(choice.dtype).itemsize
    total = choice.n + sum(map(_hint, others))
    return choice.d * (saved - choice.dtype.itemsize) > total * choice.dtype.itemsize


def _can_save(choice: Choice) -> bool:
    """Whether forward may save the logits, so that backward does not recompute them.

    They may take half of the budget; the other half is scratch. An implementation that multiplies
    in a wider dtype cannot save them."""
    implementation, _ = implementation_for(choice.device, choice.dtype)
    wider = implementation == "aten" and multiplied_in(choice.dtype, choice.device) != choice.dtype
    return not wider and 2 * choice.logits <= choice.allowed


def _saving(choice: Choice) -> Choice:
    """The choice with saved logits; the operator's budget is reduced by their bytes."""
    saving = replace(choice, reason="a shard's logits are saved for backward", save_logits=True)
    left = max(1, (choice.allowed - choice.logits) // MIB)
    if saving.plan().scratch + choice.logits <= choice.allowed:
        return saving
    return replace(saving, spec=replace(choice.spec, memory_mb=left))
