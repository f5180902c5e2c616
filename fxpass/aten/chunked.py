"""The fused loss in ATen, ``chunked``: some rows of logits at a time, gradients along with them.

In: :class:`fxpass.aten.common.Inputs` and a spec. Out: :class:`fxpass.aten.common.Results`: the
per-row losses and the gradients of ``sum(row_scale * row_loss + lse_scale * row_lse)``. 6·N·D·V
operations; at most ``rows`` rows of logits exist at any time, in the operands' dtype as eager has
them (fp16's in f32: their gradient may leave fp16's range). Softmax and sums are taken in f32 (f64
for f64), a block at a time that stays in the caches.

What a row's softmax and its gradient have in common, 1 / sum(exp(z - m)) and the row's scale, is
not multiplied into the ``[rows, V]`` of its gradient but into the ``[rows, D]`` beside it: into x
before the product that is the weight's gradient, and into x's gradient after its product. bf16,
which has f32's range, is rounded from f32 in any case, and both are multiplied in before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxpass.aten import common as aten
from fxpass.aten.common import Inputs, Results, Target, slices
from fxpass.aten.gemm import Rows, add_product, linear, split_bias
from fxpass.plan.devices import compute_dtype, gradient_dtype, multiplied_in
from fxpass.spec import expression
from fxpass.spec.spec import Spec

# Classes that are multiplied at a time where they or their gradient have to be copied; rows that
# are worked on between two products.
CLASSES, BLOCK = 8192, 64


def run(
    inputs: Inputs,
    spec: Spec,
    rows: int,
    classes: int = CLASSES,
    block: int = BLOCK,
    multiplied: torch.dtype | None = None,
) -> Results:
    """Losses and gradients, ``rows`` rows at a time, ``block`` of them between two products. Reads
    only, deterministic.

    Gradients are in their operand's dtype; those of the weight that several chunks are added up in,
    the bias's, and fp16's always are f32 (f64 for f64). ``multiplied`` is the dtype of the
    products, by default the one that is fastest.
    """
    x, weight = inputs.x, inputs.weight
    dtype = compute_dtype(x.dtype)
    multiplied = multiplied or multiplied_in(x.dtype, x.device)
    n, v = x.shape[0], weight.shape[0]
    rows = min(rows, n)
    loss, factor = (x.new_empty(n, dtype=dtype) for _ in range(2))
    lse = torch.empty_like(loss) if spec.lse else None
    # no rows, no first chunk that writes them
    new = x.new_empty if n else x.new_zeros
    own = gradient_dtype(x.dtype)
    final = own if rows == n else dtype
    shapes = {"x": (x.shape, own), "weight": (weight.shape, final), "bias": ((v,), dtype)}
    grads = {k: new(shapes[k][0], dtype=shapes[k][1]) for k in spec.gradients}
    whole = x.dtype == multiplied and ("weight" not in grads or final == multiplied)
    tiles = slices(0, v, v if whole else classes)
    chunks = _Chunks(inputs, rows, tiles, min(block, rows), multiplied)
    x_rows, weight_rows = Rows(x, rows, multiplied), chunks.weight
    copied = x.dtype != multiplied
    x_sums = None
    if "x" in grads and own != multiplied:
        x_sums = x.new_empty((rows, x.shape[1]), dtype=multiplied)
    target = aten.target_of(inputs, spec)
    for part in slices(0, n, rows):
        chunk = chunks.logits(part, x_rows[part])
        for few in chunks.blocks(part):
            some = chunks.block(few, part)
            loss[few], row_lse, factor[few] = _to_gradient(
                inputs, spec, target, few, some, scaled=chunks.narrow
            )
            if lse is not None:
                lse[few] = row_lse
            if "bias" in grads:
                # the first block overwrites what is not there yet
                grads["bias"].addmv_(some.t(), factor[few], beta=float(few.start > 0))
            if grads:
                chunks.keep(few, part, some)
        each = None if chunks.narrow else factor[part].unsqueeze(1)
        scaled = x_rows[part] if each is None else (x[part] * each).to(multiplied)
        x_grad = grads.get("x", x)[part]
        sums = x_grad if x_sums is None else x_sums[: x_grad.shape[0]]
        if "x" in grads and not copied:
            torch.mm(chunk, weight, out=sums)
        for place in tiles:
            g = chunks.multiplied(chunk[:, place])
            if "x" in grads and copied:
                add_product(sums, g, weight_rows[place], add=place.start > 0)
            if "weight" in grads:
                add_product(grads["weight"][place], g.t(), scaled, add=part.start > 0)
        if "x" in grads:
            x_grad.copy_(sums if each is None else sums.mul_(each))
    return Results(loss, lse, grads.get("x"), grads.get("weight"), grads.get("bias"))


class _Chunks:
    """One chunk of logits, in the operands' dtype, and its blocks in the compute dtype."""

    def __init__(
        self,
        inputs: Inputs,
        rows: int,
        tiles: list[slice],
        block: int,
        multiplied: torch.dtype,
    ) -> None:
        self.inputs, self.tiles = inputs, tiles
        x, v = inputs.x, inputs.weight.shape[0]
        self.dtype = compute_dtype(x.dtype)
        stored = gradient_dtype(x.dtype)
        self.buffer = x.new_empty((rows, v), dtype=stored)
        widest = max((t.stop - t.start for t in tiles), default=0)
        self.weight = Rows(inputs.weight, widest, multiplied)
        self.tile = None if stored == multiplied else x.new_empty(rows * widest, dtype=multiplied)
        self.few = block
        self.narrow = stored != self.dtype
        self.room = None
        if self.narrow:
            self.room = x.new_empty((block, v), dtype=self.dtype)
        self.early, self.late = split_bias(inputs.bias, stored)
        if inputs.logits is not None:
            self.late = None  # given logits hold it

    def logits(self, part: slice, x_rows: Tensor) -> Tensor:
        """The chunk ``[rows, V]``: the linear's output for some rows, unless it is given."""
        out = self.buffer[: part.stop - part.start]
        if self.inputs.logits is not None:
            return out
        for place in self.tiles:
            bias = None if self.early is None else self.early[place]
            tile, weight = out[:, place], self.weight[place]
            if self.tile is None:
                linear(x_rows, weight, bias, tile)
                continue
            wide = torch.mm(x_rows, weight.t(), out=self.tile[: tile.numel()].view(tile.shape))
            tile.copy_(wide if bias is None else wide.add_(bias))
        return out

    def multiplied(self, gradient: Tensor) -> Tensor:
        """The gradient of a tile of logits in the dtype of the products."""
        if self.tile is None:
            return gradient
        return self.tile[: gradient.numel()].view(gradient.shape).copy_(gradient)

    def blocks(self, part: slice) -> list[slice]:
        """Rows that are worked on at a time between two products."""
        return slices(part.start, part.stop, self.few)

    def block(self, few: slice, part: slice) -> Tensor:
        """Some rows of logits in the compute dtype ``[few, V]``, to be overwritten."""
        given = self.inputs.logits
        place = self.buffer[few.start - part.start : few.stop - part.start]
        source = place if given is None else given[few]
        out = place if self.room is None else self.room[: few.stop - few.start]
        if source is not out:
            out.copy_(source)
        return out if self.late is None else out.add_(self.late)

    def keep(self, few: slice, part: slice, gradient: Tensor) -> None:
        """Puts the gradient of some rows in the place of their logits."""
        if self.narrow:
            self.buffer[few.start - part.start : few.stop - part.start] = gradient


def _to_gradient(
    inputs: Inputs, spec: Spec, target: Target, rows: slice, logits: Tensor, scaled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Turns ``logits`` ``[rows, V]`` into their gradient, but for one factor a row unless they are
    to be ``scaled``.

    Returns:
        loss, lse and that factor, ``[rows]`` each.
    """
    z = expression.evaluate(spec.transform, logits)
    every = slice(0, logits.shape[1])
    sums = aten.of_all(aten.add_tile(None, z, target, rows, every), spec)
    loss, lse = aten.losses(sums, target, rows, spec)
    if not spec.gradients:
        return loss, lse, sums.total
    scale, share = aten.coefficients(inputs, target, sums.mass, rows)
    factor = share / sums.total
    # the gradient of the lse may leave nothing of the softmax, but all of q
    if scaled or inputs.lse_scale is not None:
        z.mul_(factor.unsqueeze(1))
        target.subtract_from(z, scale, rows, every)
        factor.fill_(1)
    else:  # 0 for rows that do not count
        target.subtract_from(z, torch.where(factor == 0, 0, scale / factor), rows, every)
    aten.to_logits(spec, z, logits)
    return loss, lse, factor
