"""Losses of rows whose log-probabilities are known.

In: log-probabilities, picked at the targets or weighted with them. Out: what ``F.cross_entropy``
returns for the logits. A rewritten graph calls these functions, and the compiler traces them::

    >>> z, t = torch.randn(4, 9), torch.tensor([1, 2, -100, 3])
    >>> picked = z.log_softmax(1)[torch.arange(4), t.clamp(min=0)]
    >>> loss = cross_entropy_of(picked, None, t, None, "mean", -100, 0.0, 9)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(z, t))
    True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def cross_entropy_of(
    picked: Tensor,
    mean_log: Tensor | None,
    target: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    smoothing: float,
    classes: int,
    row_groups: Sequence[str] = (),
) -> Tensor:
    """The cross-entropy.

    Args:
        picked: the log-probabilities at the targets, of any shape with N elements; any number in
            ignored rows. For class probabilities, the sums of the log-probabilities times the
            (weighted) probabilities.
        mean_log: the (weighted) sums of all log-probabilities, with ``smoothing``.
        target: class indices with N elements; None for class probabilities.
        weight: ``[V]`` or None; not read for class probabilities.
        reduction, ignore_index, smoothing: as in ``F.cross_entropy``.
        classes: V.
        row_groups: names of process groups that shard the rows; ``mean`` is over all rows.

    Returns:
        a scalar (with ``row_groups`` this rank's part of it), or the shape of ``picked`` for
        ``none``, in the dtype of ``picked``.
    """
    losses, left_out, total = -picked, None, torch.ones_like(picked)
    if target is not None:
        index = target.reshape(picked.shape).long()  # uint8 cannot hold -100
        if ignore_index is not None:
            left_out = index == ignore_index
            index, total = index.masked_fill(left_out, 0), (~left_out).to(picked.dtype)
        if weight is not None:
            factor = weight.to(picked.dtype)[index]
            losses, total = losses * factor, total * factor
    if mean_log is not None:
        losses = (1 - smoothing) * losses - smoothing / classes * mean_log
    if left_out is not None:
        losses = losses.masked_fill(left_out, 0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = total.sum()
    for group in row_groups:
        from fxpass.op.collectives import all_reduce  # not every PyTorch has torch.distributed

        count = all_reduce(count, "sum", group)
    return losses.sum() / count


def loss_coefficients(zeros: Tensor, smoothed: bool, *arguments: Any) -> tuple[Tensor, ...]:
    """The derivatives of the mean or sum of a loss by the log-probabilities that it adds up.

    Args:
        zeros: of the shape and dtype of ``picked``.
        smoothed: whether there is a ``mean_log`` too.
        arguments: those of :func:`cross_entropy_of` after the two.

    Returns:
        the derivatives by ``picked`` and, if ``smoothed``, ``mean_log``, and the loss of ``zeros``:
        0, or nan for the mean over no rows.
    """
    leaves = (zeros, zeros) if smoothed else (zeros,)
    rest = () if smoothed else (None,)
    return derivatives(lambda *logs: cross_entropy_of(*logs, *rest, *arguments), leaves)


def derivatives(total: Callable[..., Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradients of a scalar function at ``leaves``, and its value there."""
    with torch.enable_grad():
        given = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        out = total(*given)
        # zeros for a leaf that the total does not read: an entropy that is detached later
        return *torch.autograd.grad(out, given, materialize_grads=True), out.detach()
