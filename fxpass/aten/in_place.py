"""The fused loss in ATen, with the logits in the memory of the weight's gradient.

In: :class:`fxpass.spec.operands.Inputs` with N <= D, and a spec whose gradients name the weight.
Out: :class:`fxpass.spec.operands.Results`, as from :mod:`fxpass.aten.chunked`. It takes 6·N·D·V
operations and one tile of scratch. The first pass writes the logits ``[V, N]`` of all rows into the
gradient ``[V, D]`` and accumulates the sums of the softmax. The second pass turns a tile of logits
into its gradient, multiplies it, and overwrites the tile with the weight's gradient of its classes.
"""

from __future__ import annotations

import torch

from fxpass.aten import common
from fxpass.aten.gemm import add_product
from fxpass.aten.tiles import InGradient
from fxpass.spec import expression
from fxpass.spec.operands import Inputs, Results
from fxpass.spec.spec import Spec


def run(inputs: Inputs, spec: Spec, classes: int, multiplied: torch.dtype | None = None) -> Results:
    """Losses and gradients, in tiles of ``classes``. Deterministic; does not write to its inputs.

    ``multiplied`` is the dtype of the products; None for the fastest one."""
    logits = InGradient(inputs, classes, multiplied)
    x, weight, dtype = inputs.x, inputs.weight, logits.dtype
    n, every = x.shape[0], slice(0, x.shape[0])
    target = common.target_of(inputs, spec)
    sums = None
    for some in logits.tiles:
        z = expression.evaluate(spec.transform, logits.compute(some))
        sums = common.add_tile(sums, z, target, every, some)
    assert sums is not None, "there is at least one class"
    sums = common.of_all(sums, spec)
    loss, lse = common.losses(sums, target, every, spec)
    scale, share = common.coefficients(inputs, target, sums.mass, every)
    share = share * common.rest_of(lse, sums).neg().exp()
    x_grad = x.new_zeros((n, x.shape[1]), dtype=dtype) if "x" in spec.gradients else None
    bias_grad = x.new_empty(weight.shape[0], dtype=dtype) if "bias" in spec.gradients else None
    for some in logits.tiles:
        raw = logits.read(some)
        g = expression.evaluate(spec.transform, raw)
        g.sub_(lse.unsqueeze(1)).exp_().mul_(share.unsqueeze(1))
        target.subtract_from(g, scale, every, some)
        common.to_logits(spec.transform, g, raw)
        if bias_grad is not None:
            torch.sum(raw, 0, out=bias_grad[some])
        g = logits.multiplied(raw, some)
        if x_grad is not None:
            add_product(x_grad, g.t(), logits.weight[some], add=True)
        logits.finish(g, some)
    # two outputs of an operator must not share memory
    lse = lse.clone() if spec.lse else None
    return Results(loss, lse, x_grad, logits.gradient, bias_grad)
