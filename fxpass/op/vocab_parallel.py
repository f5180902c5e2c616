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

    loss, _ = linear_cross_entropy(x, w, None, t, None, None, "v5 reduction=mean shard_of=9", 0, g)
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, cast

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from fxpass.aten.common import is_valid
from fxpass.op import operator as _operator  # noqa: F401, registers the operator
from fxpass.plan.devices import compute_dtype
from fxpass.spec.spec import ELSEWHERE, IGNORED, Spec


class Operands(NamedTuple):
    """The operator's tensors, in its order; target and class_weight over all classes."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    class_weight: Tensor | None
    logits: Tensor | None


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
    operands = Operands(x, weight, bias, target, class_weight, logits)
    if group is None:
        by_all = s.reduction == "mean" and bool(row_groups)
        local = dataclasses.replace(s, reduction="sum") if by_all else s
        loss, lse, *_ = torch.ops.fxpass.linear_cross_entropy(*operands, local.text())
        loss = loss / _count(operands, s, row_groups) if by_all else loss
        return loss, lse if s.lse else None
    loss, lse = _rows(operands, s, first, group)
    if s.reduction != "none":
        loss = loss.sum()
    if s.reduction == "mean":
        loss = loss / _count(operands, s, row_groups)
    return loss, lse if s.lse else None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear's output; gradients go through the operator's x, weight and bias."""
    # the operands' dtypes are final: an ambient autocast must not change them again
    with torch.no_grad(), torch.amp.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


def _rows(operands: Operands, spec: Spec, first: int, group: str) -> tuple[Tensor, Tensor]:
    """Each row's loss and lse over all classes, ``[N]``."""
    shard = _Shard(operands, spec, first)
    loss, lse, *_ = torch.ops.fxpass.linear_cross_entropy(*shard.operands, shard.spec.text())
    highest = all_reduce(lse.detach(), "max", group)
    total = (lse - highest).exp()
    if spec.target == "none":
        lse = highest + _Sum.apply(total, group).log()
        return lse, lse
    # where() and not a product alone: in a shard of no classes, or none but impossible ones, the
    # lse is at the lowest, and 0 * inf would be nan
    part = loss + torch.where(shard.mass == 0, 0, shard.mass * (highest - lse))
    parts = [total, part] if shard.whole_mass is not None else [total, part, shard.mass]
    total, part, *rest = _Sum.apply(torch.stack(parts), group).unbind()
    mass = rest[0] if shard.whole_mass is None else shard.whole_mass
    log_total = total.log()
    return torch.where(mass == 0, 0, part + mass * log_total), highest + log_total


class _Shard:
    """What this rank's operator call gets.

    Attributes:
        operands, spec: of its own classes.
        mass: Q_r ``[N]``, the sum of the target distributions over this rank's classes.
        whole_mass: Q ``[N]``, over all classes; None where no rank knows it alone.
    """

    def __init__(self, operands: Operands, spec: Spec, first: int) -> None:
        count = operands.weight.shape[0]
        here = slice(first, first + count)
        w, target = operands.class_weight, operands.target
        dtype = compute_dtype(operands.x.dtype)
        w = None if w is None else w.to(dtype)
        s = spec.label_smoothing
        self.whole_mass: Tensor | None = None
        if spec.target == "indices":
            assert target is not None
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
            self.whole_mass = torch.where(valid, sharp + smooth, 0)
            self.mass = torch.where(valid, sharp * inside + here_smooth, 0)
            # a class that there is not anywhere is refused by the operator
            local = torch.where(inside, index - first, torch.where(known, ELSEWHERE, _NOWHERE))
            target = torch.where(valid, local, ELSEWHERE if spec.lse else IGNORED)
        elif spec.target == "probabilities":
            assert target is not None
            target = target[:, here]
            q = target.to(dtype) * (1 - s) + s / spec.shard_of
            self.mass = (q if w is None else q * w[here]).sum(1)
        w = None if w is None else w[here]
        self.operands = operands._replace(target=target, class_weight=w)
        self.spec = spec.of_shard()


_NOWHERE = ELSEWHERE - 1


def _count(operands: Operands, spec: Spec, row_groups: tuple[str, ...]) -> Tensor:
    """What ``mean`` divides by: the (weighted) number of rows that count, on all ranks."""
    x, target, w = operands.x, operands.target, operands.class_weight
    dtype = compute_dtype(x.dtype)
    if target is None or spec.target == "probabilities":
        count = x.new_full((), x.shape[0], dtype=dtype)
    else:
        index = target.long()
        valid = is_valid(index, spec)
        rows = torch.where(
            valid, 1.0 if w is None else w.to(dtype)[torch.where(valid, index, 0)], 0
        )
        count = rows.to(dtype).sum()
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
