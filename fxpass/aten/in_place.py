"""The fused loss in ATen, with the logits in the memory of the weight's gradient.

In: :class:`fxpass.spec.operands.Inputs` with N <= D, and a spec whose gradients name the weight.
Out: :class:`fxpass.spec.operands.Results`, as from :mod:`fxpass.aten.chunked`. It takes 6·N·D·V
operations and one tile of scratch. The first pass writes the logits ``[V, N]`` of all rows into the
gradient ``[V, D]`` and accumulates the sums of the softmax. The second pass turns a tile of logits
into its gradient, multiplies it, and overwrites the tile with the weight's gradient of its classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.aten import common
from fxpass.aten.common import slices
from fxpass.aten.gemm import Rows, add_product, split_bias
from fxpass.plan.devices import multiplied_in
from fxpass.spec import expression
from fxpass.spec.dtypes import compute_dtype, gradient_dtype
from fxpass.spec.operands import Inputs, Results
from fxpass.spec.spec import Spec


def run(inputs: Inputs, spec: Spec, classes: int, multiplied: torch.dtype | None = None) -> Results:
    """Losses and gradients, in tiles of ``classes``. Deterministic; does not write to its inputs.

    ``multiplied`` is the dtype of the products; None for the fastest one."""
    logits = _Logits(inputs, min(classes, inputs.weight.shape[0]), multiplied)
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


class _Logits:
    """The logits of all rows, in the memory of the weight's gradient.

    Attributes:
        gradient: ``[V, D]``; before :meth:`finish`, the first N columns of a class are its logits.
        tiles: the classes of each tile.
        x, weight: operands in the dtype of the products.
        dtype: the compute dtype.
    """

    def __init__(self, inputs: Inputs, classes: int, multiplied: torch.dtype | None) -> None:
        x, weight = inputs.x, inputs.weight
        n, v = x.shape[0], weight.shape[0]
        stored = gradient_dtype(x.dtype)
        multiplied = multiplied or multiplied_in(x.dtype, x.device)
        self.dtype = compute_dtype(x.dtype)
        self.gradient = x.new_empty(weight.shape, dtype=stored)
        self.tiles = slices(0, v, classes)
        self.x, self.weight = x.to(multiplied), Rows(weight, classes, multiplied)
        self._stored = self.gradient[:, :n]
        self._place = x.new_empty((classes, n), dtype=self.dtype)
        self._in_f32 = multiplied == self.dtype
        self._early, self._late = split_bias(inputs.bias, stored)

    def compute(self, classes: slice) -> Tensor:
        """Computes and stores the logits of some classes, rounded as in eager.

        Returns:
            the stored logits ``[N, classes]`` in the compute dtype; the caller may overwrite them.
        """
        stored, place = self._stored[classes], self._place[: classes.stop - classes.start]
        weight = self.weight[classes]
        bias = None if self._early is None else self._early[classes].unsqueeze(1)
        if self._in_f32:
            torch.mm(weight, self.x.t(), out=place)
            stored.copy_(place if bias is None else place.add_(bias))
        elif bias is None:
            stored.copy_(weight @ self.x.t())
        else:
            stored.copy_(torch.addmm(bias, weight, self.x.t()))
        return self.read(classes)

    def read(self, classes: slice) -> Tensor:
        """The stored logits ``[N, classes]`` of some classes, copied to the compute dtype; the
        caller may overwrite the copy."""
        place = self._place[: classes.stop - classes.start].copy_(self._stored[classes])
        return (place if self._late is None else place.add_(self._late[classes].unsqueeze(1))).t()

    def finish(self, gradient: Tensor, classes: slice) -> None:
        """Overwrites the logits of some classes, whose gradient is given, with the weight's
        gradient."""
        if self._in_f32:
            add_product(self.gradient[classes], gradient, self.x, add=False)
        else:  # the gradient is in the output's memory, so the product needs a new tensor
            self.gradient[classes] = gradient @ self.x

    def multiplied(self, gradient: Tensor, classes: slice) -> Tensor:
        """The gradient of some classes' logits, ``[classes, N]``, in the dtype of the products. A
        cast overwrites the stored logits."""
        if self._in_f32:
            return gradient.t()
        return self._stored[classes].copy_(gradient.t())
