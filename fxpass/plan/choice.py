"""Which strategy computes one fused loss, chosen when its graph is rewritten.

In: sizes, dtype, device, what is computed and the user's setting. Out: a :class:`Choice`, which
says why::

    >>> spec = Spec(gradients=("x", "weight"))
    >>> choose(2048, 512, 32000, torch.float32, torch.device("cpu"), spec, "auto").strategy
    'chunked'

A compiled graph cannot choose any more: the strategy decides whether the gradients are computed in
forward or in backward. Rows and classes at a time are :mod:`fxpass.plan.plan`'s, when it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fxpass.plan.devices import gradient_dtype, implementation_for, multiplied_in
from fxpass.plan.plan import MIB, Plan, budget, plan, size
from fxpass.spec.spec import Spec


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

    def plan(self) -> Plan:
        """How its last run goes: the one that computes the gradients, if there are any."""
        spec = replace(self.spec, strategy=self.strategy)
        sizes = self.n, self.d, self.v, self.dtype, self.device
        return plan(*sizes, spec, self.kept or self.saved)

    def __str__(self) -> str:
        """One line, as ``explain`` prints it."""
        found = self.plan()
        at_a_time = f"{found.rows} rows at a time"
        if self.strategy == "tiled" or found.in_place:
            at_a_time = f"{found.rows} rows and {found.classes} classes at a time"
        parts = [f"{size(found.scratch + self.logits * self.saved)} of scratch"]
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
    kept: bool = False,
    others: tuple[int | torch.SymInt, ...] = (),
) -> Choice:
    """The strategy for x ``[n, d]`` and weight ``[v, d]``, when a graph is rewritten.

    Args:
        n: rows; the hint decides where a size is symbolic.
        d, v: hidden size and classes.
        dtype: of x and weight, as they are multiplied.
        device: where they are.
        spec: what is computed; its ``strategy`` is not read.
        setting: ``auto``, ``chunked`` or ``tiled``.
        kept: whether the logits exist in the graph anyway.
        others: rows of each of the other losses over the same weight in this graph, which keep
            gradients of their own from forward to backward.

    ``chunked`` computes the gradients in forward and keeps them; it is taken where it can, if what
    it keeps beyond the gradients that backward returns in any case is no more than the logits,
    which a program without it would keep. Else nothing is kept and backward computes the logits
    again (``tiled``). In a shard of the classes the logits are saved for backward where they are
    small enough, and the choice's spec has the operator take no more than they leave of the budget.
    """
    symbolic = isinstance(n, torch.SymInt)
    rows, hidden, classes = (_hint(number) for number in (n, d, v))
    one = Choice("chunked", "", rows, hidden, classes, dtype, device, spec, symbolic, kept)
    if kept and not _too_wide(one, others):
        return replace(one, reason="the logits exist anyway")
    if setting != "auto":
        return replace(one, strategy=setting, reason="as set")
    if spec.shard_of and spec.gradients and _can_save(one):
        return _saving(one)
    tiled = replace(one, strategy="tiled")
    if not spec.gradients:
        return replace(tiled, reason="without gradients nothing else is needed")
    if replace(spec, strategy="chunked").gradients_in_backward:
        return replace(tiled, reason="only backward knows what each row is multiplied by")
    if _too_wide(one, others):
        beside = f" of {1 + len(others)} losses over one weight" if others else ""
        return replace(tiled, reason=f"gradients kept{beside} would take more than the logits")
    found = one.plan()
    if spec.memory_mb and found.scratch + found.sums > one.allowed:
        return replace(tiled, reason="chunks and their sums are not within the budget")
    return replace(one, reason="the gradients are computed with the loss")


def _hint(number: int | torch.SymInt) -> int:
    return (number.node.hint or 1) if isinstance(number, torch.SymInt) else number


def _too_wide(choice: Choice, others: tuple[int | torch.SymInt, ...]) -> bool:
    """Whether ``chunked`` keeps more until backward than the logits of all losses take, beyond one
    gradient of the weight in its own dtype: one for each loss, and fp16's in f32."""
    if "weight" not in choice.spec.gradients:
        return False
    kept = (1 + len(others)) * gradient_dtype(choice.dtype).itemsize
    total = choice.n + sum(map(_hint, others))
    return choice.d * (kept - choice.dtype.itemsize) > total * choice.dtype.itemsize


def _can_save(choice: Choice) -> bool:
    """Whether the logits may stay from forward to backward, which then has a product less to do:
    within half of the budget, so that the other half holds what is worked on. Not where the
    implementation multiplies in a wider dtype than theirs."""
    implementation, _ = implementation_for(choice.device, choice.dtype)
    wider = implementation == "aten" and multiplied_in(choice.dtype, choice.device) != choice.dtype
    return not wider and 2 * choice.logits <= choice.allowed


def _saving(choice: Choice) -> Choice:
    """With the logits saved, within the same budget: the operator gets what they leave of it."""
    saving = replace(choice, reason="a shard's logits are saved for backward", saved=True)
    left = max(1, (choice.allowed - choice.logits) // MIB)
    if saving.plan().scratch + choice.logits <= choice.allowed:
        return saving
    return replace(saving, spec=replace(choice.spec, memory_mb=left))
