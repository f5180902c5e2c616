"""The fused loss over a sharded vocabulary: each rank of a process group has some of the classes.

In: plain tensors, the rank's first class, names of process groups. Out: the loss, the same on all
ranks of the group. Each rank runs ``fxpass::linear_cross_entropy`` over its classes; a row's target
may be in another shard. Then the ranks exchange three numbers per row. With lse_r, loss_r and Q_r
of shard r (Q_r is its part of the sum Q of the target distribution) and m = max(lse_r),

    lse  = m + log(sum_r exp(lse_r - m))
    loss = sum_r(loss_r + Q_r * (m - lse_r)) + Q * log(sum_r exp(lse_r - m))

so the ranks reduce a maximum and a sum, with functional collectives that a compiler can overlap
with other work. Autograd differentiates these formulas of ``[N]`` tensors and calls the operator's
backward with the incoming gradients of loss_r and lse_r. Backward exchanges only the gradient of x,
which the caller sums over the ranks::

    loss, _ = linear_cross_entropy(x, w, None, t, None, None, "v6 reduction=mean shard_of=9", 0, g)
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from fxpass.op import runs
from fxpass.op.operator import counted
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.operands import Inputs, is_valid
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
        x: ``[N, D]`` floating point, the same on all ranks of ``group``. Backward returns this
            rank's part of its gradient; the caller sums over ``group``.
        weight: ``[V_r, D]``, dtype of x, the classes from ``first`` on; V_r may be 0.
        bias: ``[V_r]``, dtype of x, or None.
        target: class indices ``[N]`` among all classes, or class probabilities ``[N, V]``; None if
            the spec says ``target=none``.
        class_weight: ``[V]`` floating point, of all classes, or None.
        logits: ``[N, V_r]`` if the graph needs them anyway, else None; has no gradient.
        spec: the text of a :class:`fxpass.spec.spec.Spec`; with a group, ``shard_of`` is V.
        first: this rank's first class.
        group: name of the process group that shards the classes; None if this rank has all classes.
        row_groups: names of groups that shard the rows; ``mean`` is over the rows of all ranks.
        save_logits: whether logits ``[N, V_r]``, in the dtype of x, are computed once and saved for
            backward; otherwise backward recomputes them.

    Returns:
        loss: f32 (f64 for f64 operands), ``[N]`` for ``none``, else this rank's part of a scalar:
            the sum over ``row_groups`` is the loss.
        lse: ``[N]`` if the spec says ``lse=true``, else None.

    Raises:
        IndexError: a class index is outside ``[0, V)`` and not ``ignore_index`` (on CPU; on GPUs a
            device-side assertion fails).
    """
    s = Spec.parse(spec)
    if save_logits:
        logits = _logits(x, weight, bias)
    inputs = Inputs(x, weight, bias, target, class_weight, logits)
    of_rank = runs.of_rank(s, group, row_groups)
    if group is None:
        loss, lse = _fused(inputs, of_rank)
        loss = loss if of_rank == s else loss / _count(inputs, s, row_groups)
        return loss, lse if s.lse else None
    loss, lse = _rows(inputs, s, of_rank, first, group)
    if s.reduction != "none":
        loss = loss.sum()
    if s.reduction == "mean":
        loss = loss / _count(inputs, s, row_groups)
    return loss, lse if s.lse else None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear's output without autograd; the operator differentiates x, weight and bias."""
    # the graph's casts are explicit: an ambient autocast must not cast again
    with torch.no_grad(), torch.amp.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


def _fused(inputs: Inputs, spec: Spec) -> tuple[Tensor, Tensor]:
    """The operator's loss and lse."""
    x, weight, bias, target, class_weight, logits, *_ = inputs
    loss, lse, *_ = torch.ops.fxpass.linear_cross_entropy(
        x, weight, bias, target, class_weight, logits, spec.text()
    )
    return loss, lse


def _rows(
    inputs: Inputs, spec: Spec, of_rank: Spec, first: int, group: str
) -> tuple[Tensor, Tensor]:
    """Each row's loss and lse over all classes, ``[N]``."""
    here, mass, whole_mass, counts = _shard(inputs, spec, first)
    loss, lse = _fused(here, of_rank)
    highest = all_reduce(lse.detach(), "max", group)
    total = (lse - highest).exp()
    if mass is None:
        lse = highest + _Sum.apply(total, group).log()
        return lse, lse
    # where(): in a shard without classes, or with -inf logits only, the lse is the lowest finite
    # number, and 0 * inf would be nan
    part = loss + torch.where(mass == 0, 0, mass * (highest - lse))
    parts = [total, part] if whole_mass is not None else [total, part, mass]
    total, part, *rest = _Sum.apply(torch.stack(parts), group).unbind()
    mass = rest[0] if whole_mass is None else whole_mass
    log_total = total.log()
    loss = part + mass * log_total
    loss = loss if counts is None else torch.where(counts, loss, 0)
    return loss, highest + log_total


class _Shard(NamedTuple):
    """One rank's part of the loss.

    Attributes:
        inputs: of this rank's operator call.
        mass: Q_r ``[N]``, the sum of the target distributions over this rank's classes; None
            without a target.
        whole_mass: Q ``[N]``, over all classes; None if a rank cannot compute it alone.
        counts: ``[N]``, False for ignored rows; None if no row can be ignored.
    """

    inputs: Inputs
    mass: Tensor | None = None
    whole_mass: Tensor | None = None
    counts: Tensor | None = None


def _shard(inputs: Inputs, spec: Spec, first: int) -> _Shard:
    count = inputs.weight.shape[0]
    here = slice(first, first + count)
    w, target = inputs.class_weight, inputs.target
    dtype = compute_dtype(inputs.x.dtype)
    w = None if w is None else w.to(dtype)
    s = spec.label_smoothing
    mass = whole_mass = valid = None
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
        # the operator raises for an index that is no class of any shard
        local = torch.where(inside, index - first, torch.where(known, ELSEWHERE, _NOWHERE))
        target = torch.where(valid, local, ELSEWHERE if spec.lse else IGNORED)
    elif target is not None:
        target = target[:, here]
        q = target.to(dtype) * (1 - s) + s / spec.shard_of
        mass = (q if w is None else q * w[here]).sum(1)
    w = None if w is None else w[here]
    return _Shard(inputs._replace(target=target, class_weight=w), mass, whole_mass, valid)


_NOWHERE = ELSEWHERE - 1


def _count(inputs: Inputs, spec: Spec, row_groups: tuple[str, ...]) -> Tensor:
    """The divisor of ``mean``: the (weighted) number of rows that are not ignored, on all ranks."""
    _, weights = counted(inputs, spec)
    count = weights.to(compute_dtype(inputs.x.dtype))
    for group in row_groups:
        count = all_reduce(count, "sum", group)
    return count


# ---------------------------------------------------------------- collectives


def all_reduce(tensor: Tensor, op: str, group: str) -> Tensor:
    """``sum`` or ``max`` over the ranks of the group with this name; not differentiable."""
    return waited(funcol.all_reduce(tensor, op, cast(Any, group)))


def waited(tensor: Tensor) -> Tensor:
    """The result of a functional collective as a plain tensor, after it has finished."""
    if isinstance(tensor, funcol.AsyncCollectiveTensor):
        return cast(Tensor, tensor.wait())
    return tensor


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group. Every rank computes the same loss from it, so the incoming
    gradient is complete on every rank and is not summed again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: str) -> Any:
        return all_reduce(tensor, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
