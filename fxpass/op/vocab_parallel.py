"""The fused loss over a sharded vocabulary: each rank of a process group has some of the classes.

In: plain tensors, the rank's first class, names of process groups. Out: the loss, the same on all
ranks of the group. Each rank runs ``fxpass::class_reductions`` over its classes; a row's target
may be in another shard. Then the ranks exchange three numbers per row, and Q where a rank does not
know it alone (class probabilities). With lse_r, loss_r and Q_r of shard r (Q_r is its part of the
sum Q of the target distribution) and m = max(lse_r),

    lse  = m + log(sum_r exp(lse_r - m))
    loss = sum_r(loss_r + Q_r * (m - lse_r)) + Q * log(sum_r exp(lse_r - m))

so the ranks reduce a maximum and a sum, with functional collectives that a compiler can overlap
with other work. Autograd differentiates these formulas of ``[N]`` tensors and calls the operator's
backward with the incoming gradients of loss_r and lse_r. Backward exchanges only the gradient of x,
which the caller sums over the ranks::

    loss, _ = linear_cross_entropy(x, w, target=t, spec="v7 shard_of=9", first=0, group=g)
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from fxpass.op import losses
from fxpass.op.losses import Inputs
from fxpass.spec.reductions import Moment
from fxpass.spec.spec import Spec


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    target: Tensor | None = None,
    class_weight: Tensor | None = None,
    logits: Tensor | None = None,
    *,
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
    factor = None
    if s.reduction == "mean":
        count = losses.counted(inputs, s)
        for rows in row_groups:
            count = all_reduce(count, "sum", rows)
        factor = losses.of_mean(count, inputs)
    if group is not None:
        loss, lse = _rows(inputs, s, factor, (first, weight.shape[0]), group)
        return losses.added(loss, s, factor), lse if s.lse else None
    found = losses.terms(inputs, s, factor)
    if s.totals:
        return losses.total(inputs, s, found, factor), None
    loss, lse = losses.rows(inputs, s, found)
    return losses.added(loss, s, factor), lse if s.lse else None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear's output without autograd; the operator differentiates x, weight and bias."""
    # the graph's casts are explicit: an ambient autocast must not cast again
    with torch.no_grad(), torch.amp.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)


def _rows(
    inputs: Inputs, spec: Spec, factor: Tensor | None, shard: tuple[int, int], group: str
) -> tuple[Tensor, Tensor]:
    """Each row's loss, times ``factor``, and lse over all classes, ``[N]``."""
    found = losses.terms(inputs, spec, factor, shard)
    loss, lse = losses.rows(inputs, spec.of_shard(), found)
    assert lse is not None
    highest = all_reduce(lse.detach(), "max", group)
    total = (lse - highest).exp()
    if inputs.target is None:
        lse = highest + _Sum.apply(total, group).log()
        return found.coefficients["lse"] * lse, lse
    mass = _mass(found, shard[1])
    # where(): without classes, or with -inf logits only, the lse is -inf, and 0 * inf would be nan
    part = loss + torch.where(mass == 0, 0, mass * (highest - lse))
    if spec.target == "probabilities":
        total, part, mass = _Sum.apply(torch.stack([total, part, mass]), group).unbind()
    else:
        total, part = _Sum.apply(torch.stack([total, part]), group).unbind()
        whole = 0, spec.shard_of
        mass = _mass(losses.terms(inputs, spec, factor, whole), spec.shard_of)
    log_total = total.log()
    return part + torch.where(mass == 0, 0, mass * log_total), highest + log_total


def _mass(found: losses.Terms, count: int) -> Tensor:
    """Q_r ``[N]``, the sum of the target distribution over ``count`` classes, from their terms."""
    mass = torch.zeros_like(next(iter(found.coefficients.values())))
    for output, coefficient in found.coefficients.items():
        of_one: Tensor | int = 1
        if isinstance(output, Moment):
            of_one = count
            if output.weight is not None:
                of_one = found.given[output.weight].to(mass.dtype).sum(-1)
        mass = mass - coefficient * of_one
    return mass


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
