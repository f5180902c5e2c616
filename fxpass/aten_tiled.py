"""The fused loss in ATen, ``tiled``: some classes of logits at a time, gradients in backward.

In: :class:`fxpass.aten.Inputs` and a spec. Out: :class:`fxpass.aten.Outputs`. Forward
(2·N·D·V operations, no gradients in the spec) returns loss and lse; its scratch is one tile of
logits. Backward (6·N·D·V, given that lse) computes the logits again, tile by tile, and returns the
gradients of ``sum(row_scale * row_loss + lse_scale * row_lse)``, each rounded once to the dtype of
its operand: nothing of the weight's size exists beside the weight's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass import aten, expression
from fxpass.aten import Inputs, Outputs, slices
from fxpass.schedule import compute_dtype
from fxpass.spec import Spec


def run(inputs: Inputs, spec: Spec, rows: int, classes: int) -> Outputs:
    """Forward where the spec names no gradients, else backward; tiles are ``[rows, classes]``."""
    pass_ = _backward if spec.gradients else _forward
    return pass_(inputs, spec, min(rows, inputs.x.shape[0]), min(classes, inputs.weight.shape[0]))


def _forward(inputs: Inputs, spec: Spec, rows: int, classes: int) -> Outputs:
    x, weight = inputs.x, inputs.weight
    dtype = compute_dtype(x.dtype)
    loss, lse, rest = (x.new_empty(x.shape[0], dtype=dtype) for _ in range(3))
    buffer = x.new_empty(rows * classes, dtype=dtype)
    # written again and again: new copies would leave holes of unlike sizes between them
    x_copy, weight_copy = _room(x, rows, dtype), _room(weight, classes, dtype)
    target = aten.target_of(inputs, spec)
    for part in slices(0, x.shape[0], rows):
        x_rows = _up_cast(x[part], x_copy)
        sums = None
        for some in slices(0, weight.shape[0], classes):
            tile = _up_cast(weight[some], weight_copy)
            logits = _logits(inputs, x_rows, part, tile, some, buffer)
            z = expression.evaluate(spec.logits, logits)
            sums = aten.add_tile(sums, z, target, part, some)
        assert sums is not None, "there is at least one class"
        sums = aten.of_all(sums, spec)
        loss[part], lse[part] = aten.losses(sums, target, part, spec)
        rest[part] = aten.rest_of(lse[part], sums)
    return Outputs(loss, lse, lse_rest=rest)


def _backward(inputs: Inputs, spec: Spec, rows: int, classes: int) -> Outputs:
    x, weight, lse, rest = inputs.x, inputs.weight, inputs.lse, inputs.lse_rest
    assert lse is not None, "backward of a tiled loss gets the lse that forward returned"
    assert rest is not None
    dtype = compute_dtype(x.dtype)
    shapes = {"x": x.shape, "weight": weight.shape, "bias": weight.shape[:1]}
    # the weight's gradient is written tile by tile, the others are added up over them
    dtypes = {"x": dtype, "weight": weight.dtype, "bias": dtype}
    grads = {name: x.new_zeros(shapes[name], dtype=dtypes[name]) for name in spec.gradients}
    buffer = x.new_empty(rows * classes, dtype=dtype)
    sums = None
    if "weight" in grads and weight.dtype != dtype:
        sums = x.new_empty((classes, x.shape[1]), dtype=dtype)
    target = aten.target_of(inputs, spec)
    parts = slices(0, x.shape[0], rows)
    scales = [aten.coefficients(inputs, target, target.mass(part, classes), part) for part in parts]
    # exp(z - lse) lacks the factor exp(-rest)
    scales = [
        (scale, share * rest[part].neg().exp())
        for part, (scale, share) in zip(parts, scales, strict=True)
    ]
    for some in slices(0, weight.shape[0], classes):
        tile = weight[some].to(dtype)
        for part, (scale, share) in zip(parts, scales, strict=True):
            x_rows = x[part].to(dtype)
            logits = _logits(inputs, x_rows, part, tile, some, buffer)
            g = expression.evaluate(spec.logits, logits)
            g.sub_(lse[part].unsqueeze(1)).exp_().mul_(share.unsqueeze(1))
            target.subtract_from(g, scale, part, some)
            aten.to_logits(spec, g, logits)
            if "x" in grads:
                grads["x"][part].addmm_(logits, tile)
            if "bias" in grads:
                grads["bias"][some] += logits.sum(0)
            if "weight" in grads:
                out = grads["weight"][some] if sums is None else sums[: len(tile)]
                out.addmm_(logits.t(), x_rows, beta=float(part.start > 0))
        if sums is not None and parts:
            grads["weight"][some] = sums[: len(tile)]
    x_grad, weight_grad, bias_grad = (
        grads[name].to(x.dtype) if name in grads else None for name in ("x", "weight", "bias")
    )
    return Outputs(None, None, x_grad, weight_grad, bias_grad)


def _room(operand: Tensor, rows: int, dtype: torch.dtype) -> Tensor | None:
    """Where some rows of an operand are up-cast to: ``[rows, D]``; None if they need not be."""
    if operand.dtype == dtype:
        return None
    return operand.new_empty((rows, operand.shape[1]), dtype=dtype)


def _up_cast(rows: Tensor, room: Tensor | None) -> Tensor:
    """Some rows of an operand in the compute dtype: themselves, or their copy in the room."""
    return rows if room is None else room[: rows.shape[0]].copy_(rows)


def _logits(
    inputs: Inputs, x_rows: Tensor, rows: slice, tile: Tensor, classes: slice, buffer: Tensor
) -> Tensor:
    """The linear's output for some rows and classes, in the buffer."""
    shape = (x_rows.shape[0], tile.shape[0])
    out = buffer[: shape[0] * shape[1]].view(shape)
    if inputs.logits is not None:
        return out.copy_(inputs.logits[rows, classes])
    torch.mm(x_rows, tile.t(), out=out)
    return out if inputs.bias is None else out.add_(inputs.bias[classes])
