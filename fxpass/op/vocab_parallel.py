"""The fused loss where each rank of a process group holds some of the classes.

In: plain tensors, which classes are here, names of process groups. Out: the loss, the same on all
ranks of the group. Each rank runs ``fxpass::linear_cross_entropy`` over its own classes, where the
target's class may be in another shard; then the ranks exchange three numbers a row. With lse_r,
loss_r and Q_r of shard r (Q_r is its part of the sum Q of the target distribution), m = max(lse_r),

    lse  = m + log(sum_r exp(lse_r - m))
    loss = sum_r(loss_r + Q_r * (m - lse_r)) + Q * log(sum_r exp(lse_r - m))

so a maximum and a sum are reduced, by functional collectives that a compiler sees and can overlap.
Autograd takes these few ``[N]`` tensors back to the gradients of loss_r and lse_r, which is what
the operator's own backward wants. There nothing is exchanged but the gradient of x, by whoever gave
the same x to all ranks::

    loss, _ = linear_cross_entropy(x, w, None, t, None, None, "v6 reduction=mean shard_of=9", 0, g)
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from fxpass.aten.common import Inputs, is_valid
from fxpass.op.operator import counted
from fxpass.plan.devices import compute_dtype
from fxpass.spec.spec import ELSEWHERE, IGNORED, Spec


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None,
    class_weight: Tensor | None,
    logits: Tensor | None,
    spec: str,
    first: int,
    group: str | None,
    row_groups: tuple[str, ...] = (),
    save_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy over the classes of all ranks of ``group``.

    Args:
        x: ``[N, D]`` floating point, the same on all ranks of ``group``. Its gradient is this
            rank's part: the sum over ``group`` is the gradient.
        weight: ``[V_r, D]``, dtype of x, the classes from ``first`` on; V_r may be 0.
        bias: ``[V_r]``, dtype of x, or None.
        target: class indices ``[N]`` among all classes, or class probabilities ``[N, V]``; None
            where the spec says ``target=none``.
        class_weight: ``[V]`` floating point, of all classes, or None.
        logits: ``[N, V_r]`` where they exist anyway, else None; carries no gradient.
        spec: the text of a :class:`fxpass.spec.spec.Spec`; with a group, ``shard_of`` is V.
        first: this rank's first class.
        group: name of the process group that the classes are sharded over; None: all are here.
        row_groups: names of groups that the rows are sharded over: ``mean`` is over all of them.
        save_logits: whether ``[N, V_r]`` logits, in the dtype of x, are computed once and kept
            until backward, which computes them again otherwise.

    Returns:
        loss: f32 (f64 for f64 operands), ``[N]`` for ``none``, else this rank's part of a scalar:
            the sum over ``row_groups`` is the loss.
        lse: ``[N]`` where the spec says ``lse=true``, else None.

    Raises:
        IndexError: a class index that is not in ``[0, V)`` and not ``ignore_index`` (on CPU; on
            GPUs a device-side assertion).
    """
    s = Spec.parse(spec)
    if save_logits:
        logits = _logits(x, weight, bias)
    inputs = Inputs(x, weight, bias, target, class_weight, logits)
    if group is None:
        by_all = s.reduction == "mean" and bool(row_groups)
        local = dataclasses.replace(s, reduction="sum") if by_all else s
        loss, lse = _fused(inputs, local)
        loss = loss / _count(inputs, s, row_groups) if by_all else loss
        return loss, lse if s.lse else None
    loss, lse = _rows(inputs, s, first, group)
    if s.reduction != "none":
        loss = loss.sum()
    if s.reduction == "mean":
        loss = loss / _count(inputs, s, row_groups)
    return loss, lse if s.lse else None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear's output; gradients go through the operator's x, weight and bias."""
    # the operands' dtypes are final: an ambient autocast must not change them again
    with torch.no_grad(), torch.amp.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


def _fused(inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """The operator's loss and lse."""
    x, weight, bias, target, class_weight, logits, *_ = inputs
    loss, lse, *_ = torch.ops.fxpass.linear_cross_entropy(
        x, weight, bias, target, class_weight, logits, spec.text()
    )
    return loss, lse


def _rows(inputs: Inputs, spec: Spec, first: int, group: str) -> tuple[Tensor, Tensor]:
    """Each row's loss and lse over all classes, ``[N]``."""
    here, mass, whole_mass = _shard(inputs, spec, first)
    loss, lse = _fused(here, spec.of_shard())
    highest = all_reduce(lse.detach(), "max", group)
    total = (lse - highest).exp()
    if mass is None:
        lse = highest + _Sum.apply(total, group).log()
        return lse, lse
    # where() and not a product alone: in a shard of no classes, or none but impossible ones, the
    # lse is at the lowest, and 0 * inf would be nan
    part = loss + torch.where(mass == 0, 0, mass * (highest - lse))
    parts = [total, part] if whole_mass is not None else [total, part, mass]
    total, part, *rest = _Sum.apply(torch.stack(parts), group).unbind()
    mass = rest[0] if whole_mass is None else whole_mass
    log_total = total.log()
    return torch.where(mass == 0, 0, part + mass * log_total), highest + log_total


def _shard(inputs: Inputs, spec: Spec, first: int) -> tuple[Inputs, Tensor | None, Tensor | None]:
    """What this rank's operator call gets.

    Returns:
        inputs: of its own classes.
        mass: Q_r ``[N]``, the sum of the target distributions over this rank's classes; None
            without a target.
        whole_mass: Q ``[N]``, over all classes; None where no rank knows it alone.
    """
    count = inputs.weight.shape[0]
    here = slice(first, first + count)
    w, target = inputs.class_weight, inputs.target
    dtype = compute_dtype(inputs.x.dtype)
    w = None if w is None else w.to(dtype)
    s = spec.label_smoothing
    mass = whole_mass = None
    if target is not None and spec.target == "indices":
        index = target.long()
        valid = is_valid(index, spec)
        inside = (index >= first) & (index < here.stop)
        known = (index >= 0) & (index < spec.shard_of)
        sharp = torch.full_like(index, 1 - s, dtype=dtype)
        if w is not None:
            sharp = sharp * w[torch.where(valid & known, index, 0)]
        smooth, here_smooth = (
            s * n / spec.shard_of if w is None else s / spec.shard_of * w[part].sum()
            for n, part in ((spec.shard_of, slice(None)), (count, here))
        )
        whole_mass = torch.where(valid, sharp + smooth, 0)
        mass = torch.where(valid, sharp * inside + here_smooth, 0)
        # a class that there is not anywhere is refused by the operator
        local = torch.where(inside, index - first, torch.where(known, ELSEWHERE, _NOWHERE))
        target = torch.where(valid, local, ELSEWHERE if spec.lse else IGNORED)
    elif target is not None:
        target = target[:, here]
        q = target.to(dtype) * (1 - s) + s / spec.shard_of
        mass = (q if w is None else q * w[here]).sum(1)
    w = None if w is None else w[here]
    return inputs._replace(target=target, class_weight=w), mass, whole_mass


_NOWHERE = ELSEWHERE - 1


def _count(inputs: Inputs, spec: Spec, row_groups: tuple[str, ...]) -> Tensor:
    """What ``mean`` divides by: the (weighted) number of rows that count, on all ranks."""
    _, weights = counted(inputs, spec)
    count = weights.to(compute_dtype(inputs.x.dtype))
    for group in row_groups:
        count = all_reduce(count, "sum", group)
    return count


# ---------------------------------------------------------------- collectives


def all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    """``sum`` or ``max`` over the ranks of the group of that name; carries no gradient."""
    return waited(funcol.all_reduce(tensor, op, cast(Any, group)))


def waited(tensor: Tensor) -> Tensor:
    """What a functional collective returned, as a plain tensor."""
    if isinstance(tensor, funcol.AsyncCollectiveTensor):
        return cast(Tensor, tensor.wait())
    return tensor


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group. What each of them computes from it is the same, so the
    gradient that arrives is the whole one on every rank and is not summed again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Any:
        return all_reduce(tensor, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
