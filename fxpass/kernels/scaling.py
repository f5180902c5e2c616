"""Scales class weights and row scales of fp16 losses, so that the gradients fit into fp16.

In: the inputs of a fused loss. Out: the inputs with coefficients below 2, and the powers of two
by which losses and gradients are multiplied afterwards::

    >>> x, weight = torch.ones(2, 8).half(), torch.ones(10, 8).half()
    >>> row_scale = torch.tensor([2.0**20, 2.0**18])
    >>> inputs = Inputs(x, weight, None, torch.arange(2), row_scale=row_scale)
    >>> inputs, unscale = scale_coefficients(inputs, Spec(gradients=("x",)))
    >>> inputs.row_scale.tolist(), unscale.gradients.item()
    ([1.0, 0.25], 1048576.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.spec.operands import Inputs, is_valid
from fxpass.spec.reduction_operands import Operands
from fxpass.spec.reductions import OF_PICKS, LogitSum, Moment, Output
from fxpass.spec.spec import Spec

# About twice the largest -log(p) of a class: the slope of a square of log(p).
_LARGEST_LOG = 64.0


class Unscale(NamedTuple):
    """Factors for the kernel's losses and gradients, 0-dim f32; None is 1."""

    loss: Tensor | None = None
    gradients: Tensor | None = None


def scale_coefficients(inputs: Inputs, spec: Spec) -> tuple[Inputs, Unscale]:
    """The inputs with coefficients below 2 for fp16, and the factors that undo the scaling.

    Class weights and row scales multiply gradients that are stored in fp16, whose largest number is
    65504 and whose precision falls below 6e-5. The kernel therefore gets them as f32 numbers below
    2, and losses and gradients are multiplied by a power of two afterwards. The kernel stores the
    sum of the gradients of loss and lse, so both have the larger of their two powers; the smaller
    gradient loses only bits that the sum would lose too. The range of bf16 and f32 is large enough,
    so their coefficients are only cast to f32.
    """
    row_scale = lse_scale = None
    if spec.gradients:
        row_scale, lse_scale = inputs.row_scale, inputs.lse_scale
    if lse_scale is not None:
        row_scale = _of_counted_rows(inputs, spec, row_scale)
    if inputs.x.dtype != torch.float16:
        scales = {"row_scale": row_scale, "lse_scale": lse_scale}
        given = scales | {"class_weight": inputs.class_weight}
        plain = {k: None if t is None else t.float().contiguous() for k, t in given.items()}
        return inputs._replace(**plain), Unscale()
    class_weight, of_classes = _scaled(inputs.class_weight)
    row_scale, of_rows = _scaled(row_scale)
    lse_scale, of_lse = _scaled(lse_scale)
    exponent = _sum(of_classes, of_rows)
    if row_scale is not None and lse_scale is not None:
        assert exponent is not None
        assert of_lse is not None
        larger = torch.maximum(exponent, of_lse)
        row_scale = row_scale * _power_of_two(exponent - larger)
        lse_scale = lse_scale * _power_of_two(of_lse - larger)
        exponent = larger
    inputs = inputs._replace(class_weight=class_weight, row_scale=row_scale, lse_scale=lse_scale)
    powers = (None if e is None else _power_of_two(e) for e in (of_classes, exponent))
    return inputs, Unscale(*powers)


def scale_incoming(
    operands: Operands, outputs: Sequence[Output], incoming: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Incoming gradients of reductions, divided by a power of two for fp16, and this power.

    With the results the gradients of the logits are a few units at most; ``render.GAIN`` leaves
    room for 64.

    Args:
        outputs: what the gradients are of.
        incoming: ``[R, N]`` in the order of the outputs, K rows for picks of K classes.

    Returns:
        ``[R, N]`` f32, contiguous, and a 0-dim f32 tensor; None is 1.
    """
    incoming = incoming.float().contiguous()
    if operands.x.dtype != torch.float16:
        return incoming, None
    bound = incoming.new_zeros(incoming.shape[1])
    row = 0
    for output in outputs:
        count = operands.classes().shape[1] if output in OF_PICKS else 1
        bound += _largest_slope(operands, output) * incoming[row : row + count].abs().sum(0)
        row += count
    if operands.scale is not None:
        bound *= operands.scale.abs()
    _, exponent = _scaled(bound)
    assert exponent is not None
    power = _power_of_two(exponent)
    return incoming / power, power


def _largest_slope(operands: Operands, output: Output) -> Tensor | float:
    """About the largest gradient of a logit, ``[]`` or ``[N]``, for an incoming gradient of 1."""
    if isinstance(output, str):
        return 1.0
    power = output.b if isinstance(output, Moment) else 0
    size = _LARGEST_LOG if power > 1 else 1.0
    w = None if output.weight is None else operands.given[output.weight].float().abs()
    if isinstance(output, LogitSum) or output.a:
        return size if w is None else size * w.amax(-1)
    # of the softmax, there is as much as the weights add up to
    return size * (operands.weight.shape[0] if w is None else w.sum(-1))


def _of_counted_rows(inputs: Inputs, spec: Spec, row_scale: Tensor | None) -> Tensor:
    """The row scales, 0 for ignored rows, which must not influence the power of two."""
    if row_scale is None:
        row_scale = inputs.x.new_ones(inputs.x.shape[0], dtype=torch.float32)
    if spec.target != "indices" or inputs.target is None:
        return row_scale
    return torch.where(is_valid(inputs.target.long(), spec), row_scale, 0)


def _scaled(coefficients: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Coefficients divided by a power of two to be f32 numbers below 2, and its exponent."""
    if coefficients is None:
        return None, None
    coefficients = coefficients.float().contiguous()
    # f32's smallest normal number is appended, so that zeros and empty tensors have an exponent
    largest = F.pad(coefficients.abs(), (0, 1), value=2.0**-126).amax()
    # clamped to f32's normal powers: frexp's exponent of inf and nan is unspecified
    exponent = torch.frexp(largest).exponent.clamp(-125, 127) - 1
    return coefficients / _power_of_two(exponent), exponent


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 to the power of int32 exponents, as f32; inf or 0 outside the range of normal numbers.

    It sets the bits, because pow() rounds on some devices and depends on torch's default dtype.
    """
    return ((exponent + 127).clamp(0, 255) << 23).view(torch.float32)
