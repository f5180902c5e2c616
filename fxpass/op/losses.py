"""Losses from the log-probabilities of the rows.

In: log-probabilities, picked at the targets or weighted with them. Out: what ``F.cross_entropy``
returns for the logits::

    >>> z, t = torch.randn(4, 9), torch.tensor([1, 2, -100, 3])
    >>> picked = z.log_softmax(1)[torch.arange(4), t.clamp(min=0)]
    >>> loss = cross_entropy_of(picked, None, t, None, "mean", -100, 0.0, 9)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(z, t))
    True
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpass.spec.outputs import Moment, Output


def cross_entropy_of(picked: Tensor, mean_log: Tensor | None, *arguments: Any) -> Tensor:
    """The cross-entropy: the sum of the log-probabilities times :func:`loss_coefficients`.

    Args:
        picked: the log-probabilities at the targets, of any shape with N elements; any number in
            ignored rows. For class probabilities, the sums of the log-probabilities times the
            (weighted) probabilities.
        mean_log: the (weighted) sums of all log-probabilities, with label smoothing.
        arguments: those of :func:`loss_coefficients` from ``target`` on.

    Returns:
        a scalar, or the shape of ``picked`` for
        ``none``, in the dtype of ``picked``.
    """
    target, _, reduction, ignore_index, *_ = arguments
    logs = (picked,) if mean_log is None else (picked, mean_log)
    *coefficients, constant = loss_coefficients(picked, len(logs) == 2, *arguments)
    losses = sum(c * log for c, log in zip(coefficients, logs, strict=True))
    assert isinstance(losses, Tensor)
    if target is not None and ignore_index is not None:
        losses = losses.masked_fill(target.reshape(picked.shape) == ignore_index, 0)
    return losses if reduction == "none" else losses.sum() + constant


def loss_coefficients(
    like: Tensor,
    smoothed: bool,
    target: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    smoothing: float,
    classes: int,
) -> list[Tensor]:
    """What the log-probabilities of each row are multiplied by in a cross-entropy.

    Args:
        like: a tensor with N elements, in the dtype of the coefficients.
        smoothed: whether there is a sum of all log-probabilities, with label smoothing.
        target: class indices with N elements; None for class probabilities.
        weight: class weights ``[V]`` or None; not read for class probabilities.
        reduction, ignore_index, smoothing: as in ``F.cross_entropy``.
        classes: V.

    Returns:
        those of the target's log-probabilities and, if ``smoothed``, of their sums, in the shape of
        ``like``; and what is added to the loss: 0, or nan for the mean over no rows.
    """
    of_row, left_out = torch.ones_like(like), None
    if target is not None:
        index = target.reshape(like.shape).long()  # uint8 cannot hold -100
        if weight is not None:  # the operator raises for an index that is no class
            of_row = weight.to(like.dtype)[index.clamp(0, weight.shape[0] - 1)]
        if ignore_index is not None:
            left_out = index == ignore_index
            of_row = of_row.masked_fill(left_out, 0)
    factor = torch.ones_like(like.sum())
    if reduction == "mean":
        factor = of_row.sum().reciprocal()
    found = [(smoothing - 1) * factor * of_row]
    if smoothed:
        found.append((-smoothing / classes * factor).expand_as(like))
    if left_out is not None:
        found = [coefficients.masked_fill(left_out, 0) for coefficients in found]
    # not 0 * factor, which Inductor simplifies to 0
    nothing = torch.full_like(factor, float("nan")).masked_fill(factor.isfinite(), 0)
    return [*found, nothing]


def reductions_of_loss(
    target: Tensor, class_weight: Tensor | None, smoothing: float, dtype: torch.dtype
) -> tuple[list[Output], list[Tensor]]:
    """The outputs of the operator for :func:`cross_entropy_of`, the picked log-probabilities first,
    and the weights of moments in ``dtype``."""
    given: list[Tensor] = []
    outputs: list[Output] = ["pick"]
    if target.is_floating_point():
        outputs = [Moment(0, 1, 0)]
        given.append(target if class_weight is None else target.to(dtype) * class_weight)
    if smoothing:
        outputs.append(Moment(0, 1, None if class_weight is None else len(given)))
        given += [] if class_weight is None else [class_weight.to(dtype)]
    return outputs, given
