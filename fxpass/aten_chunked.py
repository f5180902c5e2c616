"""The fused loss in ATen, ``chunked``: some rows of logits at a time, gradients along with them.

In: :class:`fxpass.aten.Inputs` and a spec. Out: :class:`fxpass.aten.Outputs`: the per-row losses
and the gradients of ``sum(row_scale * row_loss + lse_scale * row_lse)``, unnormalised, in f32 (f64
for f64). 6·N·D·V operations; at most ``rows`` rows of logits exist at any time.

What a row's softmax and its gradient have in common, 1 / sum(exp(z - m)) and the row's scale, is
not multiplied into the ``[rows, V]`` of its gradient but into the ``[rows, D]`` beside it: into x
before the product that is the weight's gradient, and into x's gradient after its product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass import aten, cost, expression
from fxpass.aten import Inputs, Outputs, Target, slices
from fxpass.schedule import compute_dtype
from fxpass.spec import Spec

# Bytes of logits that are worked on at a time between two GEMMs: what stays in the cores' caches
# during the passes over it, and what the copies of a logit transform are limited to.
_CACHED_BYTES = cost.BLOCK_BYTES

# Classes that are up-cast at a time where the weight is narrower than the compute dtype.
CLASSES = 8192


def run(inputs: Inputs, spec: Spec, rows: int, classes: int = CLASSES) -> Outputs:
    """Losses and unnormalised gradients, ``rows`` rows at a time. Reads only, deterministic."""
    x, weight = inputs.x, inputs.weight
    dtype = compute_dtype(x.dtype)
    n, v = x.shape[0], weight.shape[0]
    loss, factor = (x.new_empty(n, dtype=dtype) for _ in range(2))
    lse = torch.empty_like(loss) if spec.lse else None
    shapes = {"x": x.shape, "weight": weight.shape, "bias": (v,)}
    # no rows, no first chunk that writes them
    new = x.new_empty if n else x.new_zeros
    grads = {name: new(shapes[name], dtype=dtype) for name in spec.gradients}
    buffer = x.new_empty((min(rows, n), v), dtype=dtype)
    target = aten.target_of(inputs, spec)
    for part in slices(0, n, rows):
        x_rows = x[part].to(dtype)
        g = _logits(inputs, x_rows, part, buffer[: part.stop - part.start], classes)
        for few in slices(part.start, part.stop, _CACHED_BYTES // (v * dtype.itemsize)):
            some = g[few.start - part.start : few.stop - part.start]
            loss[few], row_lse, factor[few] = _to_gradient(inputs, spec, target, few, some)
            if lse is not None:
                lse[few] = row_lse
        kept = float(part.start > 0)  # the first chunk overwrites what is not there yet
        each = factor[part]
        x_rows = x_rows * each.unsqueeze(1)
        if "bias" in grads:
            grads["bias"].addmv_(g.t(), each, beta=kept)
        for some_classes in tiles(weight, dtype, classes):
            some = g[:, some_classes]
            if "x" in grads:
                more = float(some_classes.start > 0)
                grads["x"][part].addmm_(some, weight[some_classes].to(dtype), beta=more)
            if "weight" in grads:
                grads["weight"][some_classes].addmm_(some.t(), x_rows, beta=kept)
        if "x" in grads:
            grads["x"][part].mul_(each.unsqueeze(1))
    return Outputs(loss, lse, grads.get("x"), grads.get("weight"), grads.get("bias"))


def tiles(weight: Tensor, dtype: torch.dtype, step: int) -> list[slice]:
    """Classes that are up-cast to the compute dtype at a time; all where no copy is needed.

    CPUs without bf16 or fp16 matrix instructions multiply those dtypes two to a hundred times
    slower than f32, and an f32 product is the more accurate one.
    """
    v = weight.shape[0]
    return slices(0, v, v if weight.dtype == dtype else step)


def _logits(inputs: Inputs, x_rows: Tensor, part: slice, out: Tensor, step: int) -> Tensor:
    """The linear's output for some rows, written to ``out`` ``[rows, V]``."""
    if inputs.logits is not None:
        return out.copy_(inputs.logits[part])
    for classes in tiles(inputs.weight, out.dtype, step):
        torch.mm(x_rows, inputs.weight[classes].to(out.dtype).t(), out=out[:, classes])
    return out if inputs.bias is None else out.add_(inputs.bias)


def _to_gradient(
    inputs: Inputs, spec: Spec, target: Target, rows: slice, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Turns ``logits`` ``[rows, V]`` into their gradient but for one factor a row.

    Returns:
        loss, lse and that factor, ``[rows]`` each.
    """
    z = expression.evaluate(spec.logits, logits)
    every = slice(0, logits.shape[1])
    sums = aten.of_all(aten.add_tile(None, z, target, rows, every), spec)
    loss, lse = aten.losses(sums, target, rows, spec)
    if not spec.gradients:
        return loss, lse, sums.total
    scale, share = aten.coefficients(inputs, target, sums.mass, rows)
    factor = share / sums.total
    if inputs.lse_scale is None:
        # 0 for rows that do not count
        target.subtract_from(z, torch.where(factor == 0, 0, scale / factor), rows, every)
    else:  # the gradient of the lse may leave nothing of the softmax, but all of q
        z.mul_(factor.unsqueeze(1))
        target.subtract_from(z, scale, rows, every)
        factor.fill_(1)
    aten.to_logits(spec, z, logits)
    return loss, lse, factor
