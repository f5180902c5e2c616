"""Scales incoming gradients of fp16 reductions, so that those of the logits fit into fp16.

In: the operands of a call and the incoming gradients of its outputs. Out: the incoming gradients
divided by a power of two, by which the gradients of the operands are multiplied afterwards::

    >>> x, weight = torch.ones(2, 8).half(), torch.ones(10, 8).half()
    >>> operands = Operands(x, weight, None, None, torch.arange(2), ())
    >>> incoming, power = scale_incoming(operands, ["pick"], torch.tensor([[2.0**20, 2.0**18]]))
    >>> incoming.tolist(), power.item()
    ([[1.0, 0.25]], 1048576.0)

The gradients of logits are stored in fp16, whose largest number is 65504 and whose precision falls
below 6e-5. The range of bf16 and f32 is large enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.formula.expression import Z, evaluate, given_in
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import Output, line_count
from fxpass.kernels.expression import unit_slope, upper_bound

# About twice the largest -log(p) of a class: the slope of a square of log(p).
_LARGEST_LOG = 64.0
_LEAST_SLOPE = 2.0**-14


def scale_incoming(
    operands: Operands, outputs: Sequence[Output], incoming: Tensor, transform: Any = Z
) -> tuple[Tensor, Tensor | None]:
    """Incoming gradients ``[R, N]`` of some outputs, K rows for picks of K classes, divided by a
    power of two for fp16: ``[R, N]`` f32, contiguous; and this power, 0-dim f32, None for 1.

    ``transform``: the transform of the logits. The results make the gradients of the logits a few
    units at most, if the slopes have bounds; ``render.GAIN`` leaves room for 64.
    """
    incoming = incoming.float().contiguous()
    if operands.x.dtype != torch.float16:
        return incoming, None
    bound = incoming.new_zeros(incoming.shape[1])
    row = 0
    for output in outputs:
        count = line_count(output, operands.pick_count)
        bound += _largest_slope(operands, output) * incoming[row : row + count].abs().sum(0)
        row += count
    bound *= _upper_bound(operands, unit_slope(transform)[1])
    if operands.scale is not None:
        bound *= operands.scale.abs()
    # a row whose incoming gradient is infinite or nan stays so, whatever the power
    bound = bound.where(bound.isfinite(), 0)
    # weights of 0 have no slope, but their incoming gradients have to stay finite when divided
    sizes = incoming.abs().sum(0)
    bound = torch.maximum(bound, sizes.where(sizes.isfinite(), 0) * _LEAST_SLOPE)
    # f32's smallest normal number is appended, so that zeros and empty tensors have an exponent
    largest = F.pad(bound, (0, 1), value=2.0**-126).amax()
    power = (largest.view(torch.int32) & 0x7F800000).clamp(max=253 << 23).view(torch.float32)
    return incoming / power, power


def _largest_slope(operands: Operands, output: Output) -> Tensor | float:
    """About the largest gradient of a logit, ``[]`` or ``[N]``, for an incoming gradient of 1."""
    if isinstance(output, str):
        return 1.0
    size = _LARGEST_LOG if output.b > 1 else 1.0
    w = None if output.weight is None else operands.given[output.weight].float().abs()
    if output.a:
        return size if w is None else size * w.amax(-1)
    # the softmax is multiplied by the sum of the weights
    return size * (operands.weight.shape[0] if w is None else w.sum(-1))


def _upper_bound(operands: Operands, slope: Any) -> Tensor:
    """An upper bound ``[N]`` of a slope's absolute value; factors without a bound count as 1."""
    bound = upper_bound(slope)
    ones = operands.x.new_ones(operands.x.shape[0], dtype=torch.float32)
    given = {f"given{i}": operands.given[i].float().abs().amax(-1) for i in given_in(bound)}
    return evaluate(bound, ones, given)
