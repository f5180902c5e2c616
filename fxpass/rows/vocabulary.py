"""The cross-entropy of a head that is sharded over ranks, in plain operations and collectives.

In: hidden states, this rank's classes of the head, targets. Out: the loss over all classes. Ranks
exchange a maximum and some sums of each row::

    z = x @ weightᵀ - all_reduce(max)    loss = log all_reduce(Σ exp z) - all_reduce(z[label])

The pass fuses the loss like any program. A rank with fewer classes than others pads them, so that
all ranks have the same sizes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from fxpass.formula import expression
from fxpass.formula.dtypes import compute_dtype
from fxpass.graph.placements import is_dtensor
from fxpass.op.collectives import all_reduce, waited, with_summed_gradient
from fxpass.rows.alike import marked_alike


@torch.compiler.allow_in_graph
def vocabulary_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    classes: int,
    group: str,
    ranks: int,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    logits: str,
    sequence_dim: int | None,
    summed: bool = False,
) -> Tensor:
    """The loss, as one node of a Dynamo graph, through which AOTAutograd traces.

    Args:
        x, weight, bias, target, class_weight: as in
            :func:`fxpass.distributed.linear_cross_entropy`; or DTensors.
        first: this rank's first class.
        classes: the number of all ranks' classes.
        group, ranks: the name and the size of the group that shards the classes.
        reduction, ignore_index, label_smoothing, logits, sequence_dim: as there.
        summed: x has all rows, and the caller sums its gradient over the ranks.
    """
    x = x if summed else whole_rows(x, group, sequence_dim)
    weight = local_shard(weight)
    bias = None if bias is None else local_shard(bias)
    shape = x.shape[:-1]
    own = weight.shape[0]
    z = _logits(x.flatten(0, -2), weight, bias, -(-classes // ranks), logits)
    even = classes % ranks == 0
    padded = z.shape[-1]
    exists = torch.arange(padded, device=z.device) < own
    z = z if even else z.masked_fill(~exists, float("-inf"))  # as many on all ranks
    z = z - all_reduce(z.detach().amax(-1, keepdim=True), "max", group)

    def weighted_sum(weights: Tensor) -> Tensor:
        """This rank's part of a weighted sum of the logits over the classes."""
        weights = weights[..., first : first + own].to(z.dtype)
        if not even:
            weights = F.pad(weights, (0, padded - own))
            return (weights * z).masked_fill(~exists, 0).sum(-1)
        return (weights * z).sum(-1)

    ones = torch.ones((), dtype=z.dtype, device=z.device).expand(classes)
    class_weights = ones if class_weight is None else class_weight.to(z.dtype)
    sums = [z.exp().sum(-1)]
    index = ignored = None
    if target.is_floating_point():
        soft = target.flatten(0, -2).to(z.dtype)
        soft = (soft * (1 - label_smoothing) + label_smoothing / classes) * class_weights
        row_weights = soft.sum(-1)
        sums.append(weighted_sum(soft))
    else:
        index = target.flatten().long()  # uint8 cannot hold -100
        ignored = index == ignore_index
        index = index.masked_fill(ignored, 0)
        row_weights = class_weights[index]  # raises for a class that does not exist
        is_own = (index >= first) & (index < first + own)
        picked = z.gather(-1, (index - first).masked_fill(~is_own, 0).unsqueeze(-1)).squeeze(-1)
        sums.append(picked.masked_fill(~is_own, 0))
        sums += [weighted_sum(class_weights)] * bool(label_smoothing)
    sums = _Summed.apply(torch.stack(sums, -1), group).unbind(-1)  # type: ignore[union-attr]
    norm = sums[0].log()
    if index is None:
        losses = norm * row_weights - sums[1]
        count = torch.full_like(norm.sum(), losses.shape[0])
    else:
        losses = (1 - label_smoothing) * row_weights * (norm - sums[1])
        if label_smoothing:
            losses = losses + label_smoothing / classes * (norm * class_weights.sum() - sums[2])
        losses = losses.masked_fill(cast(Tensor, ignored), 0)
        count = row_weights.masked_fill(cast(Tensor, ignored), 0).sum()
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() / count if reduction == "mean" else losses.sum()


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, classes: int, transform: str) -> Tensor:
    """This rank's logits, padded to the largest number of classes of a rank, at least in f32."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if missing := classes - weight.shape[0]:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    with marked_alike():
        z = F.linear(x, weight, bias)
    z = z.to(compute_dtype(z.dtype))
    return z if transform == "z" else _Transformed.apply(z, transform)  # type: ignore[return-value]


class _Summed(torch.autograd.Function):
    """The sum over the ranks. All ranks differentiate the same loss, so the gradient of each part
    is that of the sum."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: str) -> Any:
        return all_reduce(parts, "sum", group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _Transformed(torch.autograd.Function):
    """An expression of the logits, with its exact slope."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, transform: str) -> Any:
        ctx.save_for_backward(z)
        ctx.transform = transform
        return expression.evaluate(expression.parse(transform), z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        slope = expression.derivative(expression.parse(ctx.transform))
        return grad * expression.evaluate(slope, ctx.saved_tensors[0]), None


def whole_rows(x: Tensor, group: str, sequence_dim: int | None) -> Tensor:
    """All rows, on all ranks; their gradient is the sum of the ranks' gradients."""
    if is_dtensor(x):
        return with_summed_gradient(cast(Any, x).full_tensor(), group)
    if sequence_dim is None:
        return with_summed_gradient(x, group)
    gathered = funcol.all_gather_tensor_autograd(x, sequence_dim, cast(Any, group))
    return waited(gathered)


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor
