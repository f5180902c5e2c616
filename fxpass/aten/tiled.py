"""The fused loss in ATen, ``tiled``: tiles of rows and classes, gradients in backward.

In: :class:`fxpass.spec.operands.Inputs` and a spec. Out: :class:`fxpass.spec.operands.Results`.
Forward (2·N·D·V operations, a spec without gradients) returns loss and lse; its scratch is one tile
of logits. Backward (6·N·D·V operations) takes this lse, recomputes the logits tile by tile, and
returns the gradients of ``sum(row_scale * row_loss + lse_scale * row_lse)``. Each gradient is
rounded once, to the dtype of its operand. The weight's gradient is the only tensor of its size.
"""

from __future__ import annotations

import torch

from fxpass.aten import common
from fxpass.aten.gemm import add_product
from fxpass.aten.tiles import Tiles
from fxpass.spec import expression
from fxpass.spec.operands import Inputs, Results
from fxpass.spec.spec import Spec


def run(
    inputs: Inputs,
    spec: Spec,
    rows: int,
    classes: int,
    multiplied: torch.dtype | None = None,
) -> Results:
    """Runs forward if the spec names no gradients, else backward, in tiles ``[rows, classes]``.

    ``multiplied`` is the dtype of the products; None for the fastest one."""
    tiles = Tiles(inputs, rows, classes, multiplied)
    return _backward(inputs, spec, tiles) if spec.gradients else _forward(inputs, spec, tiles)


def _forward(inputs: Inputs, spec: Spec, tiles: Tiles) -> Results:
    x = inputs.x
    loss, lse, rest = (x.new_empty(x.shape[0], dtype=tiles.dtype) for _ in range(3))
    target = common.target_of(inputs, spec)
    for part in tiles.parts:
        x_rows = tiles.x[part]
        sums = None
        for some in tiles.classes:
            logits = tiles.logits(x_rows, tiles.weight[some], part, some)
            z = expression.evaluate(spec.transform, logits)
            sums = common.add_tile(sums, z, target, part, some)
        assert sums is not None, "there is at least one class"
        sums = common.of_all(sums, spec)
        loss[part], lse[part] = common.losses(sums, target, part, spec)
        rest[part] = common.rest_of(lse[part], sums)
    return Results(loss, lse, lse_rest=rest)


def _backward(inputs: Inputs, spec: Spec, tiles: Tiles) -> Results:
    x, weight, lse, rest = inputs.x, inputs.weight, inputs.lse, inputs.lse_rest
    assert lse is not None, "backward of a tiled loss gets the lse that forward returned"
    assert rest is not None
    dtype, parts = tiles.dtype, tiles.parts
    shapes = {"x": x.shape, "weight": weight.shape, "bias": weight.shape[:1]}
    # a tile's part of the weight's gradient is final; those of x and bias accumulate over tiles
    dtypes = {"x": dtype, "weight": weight.dtype, "bias": dtype}
    grads = {name: x.new_zeros(shapes[name], dtype=dtypes[name]) for name in spec.gradients}
    sums = None
    if "weight" in grads and weight.dtype != dtype and len(parts) > 1:
        sums = x.new_empty((tiles.widest, x.shape[1]), dtype=dtype)
    target = common.target_of(inputs, spec)
    scales = [
        common.coefficients(inputs, target, target.mass(part, tiles.widest), part) for part in parts
    ]
    # exp(z - lse) needs the factor exp(-rest), because lse is rounded
    scales = [
        (scale, share * rest[part].neg().exp())
        for part, (scale, share) in zip(parts, scales, strict=True)
    ]
    for some in tiles.classes:
        w = tiles.weight[some]
        for part, (scale, share) in zip(parts, scales, strict=True):
            x_rows = tiles.x[part]
            logits = tiles.logits(x_rows, w, part, some)
            g = expression.evaluate(spec.transform, logits)
            g.sub_(lse[part].unsqueeze(1)).exp_().mul_(share.unsqueeze(1))
            target.subtract_from(g, scale, part, some)
            common.to_logits(spec.transform, g, logits)
            if "bias" in grads:
                grads["bias"][some] += logits.sum(0)
            g = tiles.multiplied(logits)
            if "x" in grads:
                add_product(grads["x"][part], g, w, add=True)
            if "weight" in grads:
                out = grads["weight"][some] if sums is None else sums[: len(w)]
                add_product(out, g.t(), x_rows, add=part.start > 0)
        if sums is not None and parts:
            grads["weight"][some] = sums[: some.stop - some.start]
    operands = {"x": x, "weight": weight, "bias": x if inputs.bias is None else inputs.bias}
    x_grad, weight_grad, bias_grad = (
        grads[name].to(operand.dtype) if name in grads else None
        for name, operand in operands.items()
    )
    return Results(None, None, x_grad, weight_grad, bias_grad)
