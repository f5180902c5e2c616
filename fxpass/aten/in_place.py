"""The fused loss in ATen with its logits in the memory of the weight's gradient.

In: :class:`fxpass.aten.common.Inputs` with no more rows than the hidden size, and a spec whose
gradients name the weight. Out: :class:`fxpass.aten.common.Results`, losses and gradients as of
:mod:`fxpass.aten.chunked`. 6·N·D·V operations and one tile of scratch: the logits ``[V, N]`` of all
rows are written into the gradient ``[V, D]`` while the softmax's sums are taken. Then, a tile of
classes at a time, they become their own gradient and are multiplied, and what they leave room for,
the weight's gradient of these classes, overwrites them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.aten import common as aten
from fxpass.aten.common import Inputs, Results, slices
from fxpass.aten.gemm import Rows, add_product, split_bias
from fxpass.plan.devices import compute_dtype, gradient_dtype, multiplied_in
from fxpass.spec import expression
from fxpass.spec.spec import Spec


def run(inputs: Inputs, spec: Spec, classes: int, multiplied: torch.dtype | None = None) -> Results:
    """Losses and gradients, ``classes`` at a time. Reads only, deterministic."""
    logits = _Logits(inputs, min(classes, inputs.weight.shape[0]), multiplied)
    x, weight, dtype = inputs.x, inputs.weight, logits.dtype
    n, every = x.shape[0], slice(0, x.shape[0])
    target = aten.target_of(inputs, spec)
    sums = None
    for some in logits.tiles:
        z = expression.evaluate(spec.transform, logits.compute(some))
        sums = aten.add_tile(sums, z, target, every, some)
    assert sums is not None, "there is at least one class"
    sums = aten.of_all(sums, spec)
    loss, lse = aten.losses(sums, target, every, spec)
    scale, share = aten.coefficients(inputs, target, sums.mass, every)
    share = share * aten.rest_of(lse, sums).neg().exp()
    x_grad = x.new_zeros((n, x.shape[1]), dtype=dtype) if "x" in spec.gradients else None
    bias_grad = x.new_empty(weight.shape[0], dtype=dtype) if "bias" in spec.gradients else None
    for some in logits.tiles:
        raw = logits.read(some)
        g = expression.evaluate(spec.transform, raw)
        g.sub_(lse.unsqueeze(1)).exp_().mul_(share.unsqueeze(1))
        target.subtract_from(g, scale, every, some)
        aten.to_logits(spec, g, raw)
        if bias_grad is not None:
            torch.sum(raw, 0, out=bias_grad[some])
        g = logits.multiplied(raw, some)
        if x_grad is not None:
            add_product(x_grad, g.t(), logits.weight[some], add=True)
        logits.finish(g, some)
    # no two outputs of an operator may be one tensor
    lse = lse.clone() if spec.lse else None
    return Results(loss, lse, x_grad, logits.gradient, bias_grad)


class _Logits:
    """Logits of all rows, class by class, in the memory that is the weight's gradient at the end.

    Attributes:
        gradient: ``[V, D]``; of the classes that are not done the first N columns are logits.
        tiles: the classes of each tile.
        x, weight: operands in the dtype of the products.
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
        """Some classes' logits ``[N, classes]`` in the compute dtype, to be overwritten; they are
        kept as well, rounded as eager's, and what is returned are these."""
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
        """Some classes' logits ``[N, classes]`` in the compute dtype, to be overwritten."""
        place = self._place[: classes.stop - classes.start].copy_(self._stored[classes])
        return (place if self._late is None else place.add_(self._late[classes].unsqueeze(1))).t()

    def finish(self, gradient: Tensor, classes: slice) -> None:
        """Overwrites some classes' logits, of that gradient, with the weight's gradient."""
        if self._in_f32:
            add_product(self.gradient[classes], gradient, self.x, add=False)
        else:  # it stands where the product goes
            self.gradient[classes] = gradient @ self.x

    def multiplied(self, gradient: Tensor, classes: slice) -> Tensor:
        """The gradient of some classes' logits, ``[classes, N]``, in the dtype of the products; in
        the logits' own place where that is not the compute dtype."""
        if self._in_f32:
            return gradient.t()
        return self._stored[classes].copy_(gradient.t())
