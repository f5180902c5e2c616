"""The cross-entropy of a head that is sharded over ranks, of plain operations and collectives.

In: hidden states, this rank's classes of the head, targets. Out: the loss over all classes. Ranks
exchange a maximum and some sums of each row::

    z = x @ weightᵀ - all_reduce(max)    loss = log all_reduce(Σ exp z) - all_reduce(z[label])

The pass fuses it as any program: a rank that has fewer classes than others makes up for them, so
that all ranks have the same sizes.
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
    """The loss. It is one node of a Dynamo graph; AOTAutograd traces through it.

    Args:
        x, weight, bias, target, class_weight: as :func:`fxpass.distributed.linear_cross_entropy`
            has them; DTensors too.
        first: this rank's first class.
        classes: of all ranks.
        group, ranks: the ranks that shard them.
        reduction, ignore_index, label_smoothing, logits, sequence_dim: as there.
        summed: whether x has all rows, and the caller adds its gradients up.
    """
    x = x if summed else whole_rows(x, group, sequence_dim)
    weight = local(weight)
    bias = None if bias is None else local(bias)
    shape = x.shape[:-1]
    here = weight.shape[0]
    z = _logits(x.flatten(0, -2), weight, bias, -(-classes // ranks), logits)
    even = classes % ranks == 0
    most = z.shape[-1]
    exists = torch.arange(most, device=z.device) < here
    z = z if even else z.masked_fill(~exists, float("-inf"))  # all ranks have as many
    z = z - all_reduce(z.detach().amax(-1, keepdim=True), "max", group)

    def total(weights: Tensor) -> Tensor:
        """This rank's part of a weighted sum over the classes."""
        weights = weights[..., first : first + here].to(z.dtype)
        if not even:
            weights = F.pad(weights, (0, most - here))
            return (weights * z).masked_fill(~exists, 0).sum(-1)
        return (weights * z).sum(-1)

    ones = torch.ones((), dtype=z.dtype, device=z.device).expand(classes)
    every = ones if class_weight is None else class_weight.to(z.dtype)
    sums = [z.exp().sum(-1)]
    index = left_out = None
    if target.is_floating_point():
        soft = target.flatten(0, -2).to(z.dtype)
        soft = (soft * (1 - label_smoothing) + label_smoothing / classes) * every
        of_row = soft.sum(-1)
        sums.append(total(soft))
    else:
        index = target.flatten().long()  # uint8 cannot hold -100
        left_out = index == ignore_index
        index = index.masked_fill(left_out, 0)
        of_row = every[index]  # raises for a class that does not exist
        mine = (index >= first) & (index < first + here)
        picked = z.gather(-1, (index - first).masked_fill(~mine, 0).unsqueeze(-1)).squeeze(-1)
        sums.append(picked.masked_fill(~mine, 0))
        sums += [total(every)] * bool(label_smoothing)
    sums = _Summed.apply(torch.stack(sums, -1), group).unbind(-1)  # type: ignore[union-attr]
    norm = sums[0].log()
    if index is None:
        losses = norm * of_row - sums[1]
        count = torch.full_like(norm.sum(), losses.shape[0])
    else:
        losses = (1 - label_smoothing) * of_row * (norm - sums[1])
        if label_smoothing:
            losses = losses + label_smoothing / classes * (norm * every.sum() - sums[2])
        losses = losses.masked_fill(cast(Tensor, left_out), 0)
        count = of_row.masked_fill(cast(Tensor, left_out), 0).sum()
    if reduction == "none":
        return losses.view(shape)
    return losses.sum() / count if reduction == "mean" else losses.sum()


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, most: int, transform: str) -> Tensor:
    """This rank's logits, of as many classes as any rank has, at least in f32."""
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if missing := most - weight.shape[0]:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    with marked_alike():
        z = F.linear(x, weight, bias)
    z = z.to(compute_dtype(z.dtype))
    return z if transform == "z" else _Transformed.apply(z, transform)  # type: ignore[return-value]


class _Summed(torch.autograd.Function):
    """The sum over the ranks, of a loss that all of them differentiate: each part has the gradient
    of the sum."""

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


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor
