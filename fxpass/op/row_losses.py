"""Losses of rows whose log-probabilities are known.

In: log-probabilities at the targets. Out: what ``F.cross_entropy`` returns for the logits. A
rewritten graph calls these functions, and the compiler traces them::

    >>> z, t = torch.randn(4, 9), torch.tensor([1, 2, -100, 3])
    >>> picked = z.log_softmax(1)[torch.arange(4), t.clamp(min=0)]
    >>> loss = cross_entropy_of(picked, None, t, None, "mean", -100, 0.0, 9)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(z, t))
    True
"""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy_of(
    picked: Tensor,
    mean_log: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    smoothing: float,
    classes: int,
) -> Tensor:
    """The cross-entropy of class indices.

    Args:
        picked: ``[N]``, the log-probabilities at the targets; any number in ignored rows.
        mean_log: ``[N]``, the (weighted) sums of all log-probabilities, with ``smoothing``.
        target: class indices of any shape with N elements.
        weight: ``[V]`` or None.
        reduction, ignore_index, smoothing: as in ``F.cross_entropy``.
        classes: V.

    Returns:
        a scalar, or the shape of ``target`` for ``none``, in the dtype of ``picked``.
    """
    index = target.flatten().long()
    left_out = torch.zeros_like(index, dtype=torch.bool)
    if ignore_index is not None:
        left_out = index == ignore_index
    losses, total = -picked, (~left_out).to(picked.dtype)
    if weight is not None:
        factor = weight.to(picked.dtype)[index.masked_fill(left_out, 0)]
        losses, total = losses * factor, factor.masked_fill(left_out, 0)
    if mean_log is not None:
        losses = (1 - smoothing) * losses - smoothing / classes * mean_log
    losses = losses.masked_fill(left_out, 0)
    if reduction == "none":
        return losses.view_as(target)
    return losses.sum() if reduction == "sum" else losses.sum() / total.sum()
