"""Chunks of rows of logits, and the gradients of the operands, in one pass.

In: operands, and a function that turns some rows of logits into their gradient. Out: the gradients.
It takes 6·N·D·V operations, and one chunk of ``rows`` rows of logits exists at a time. A chunk has
the operands' dtype, as in eager, but f32 for fp16, whose range is too small for the gradient of the
logits. Softmax and sums are computed in f32 (f64 for f64), in blocks that stay in the caches.

The gradient of a row of logits may have a factor left, such as 1 / sum(exp(z - m)). It is not
multiplied into the gradient ``[rows, V]`` but into smaller tensors ``[rows, D]``: x before the
product for the weight's gradient, and x's gradient after its product. Not for bf16, because
rounding the gradient from f32 is a pass over it in any case.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxpass.aten.gemm import Rows, add_product, joined, linear, part_of, slices, split_bias
from fxpass.plan.devices import multiplied_in
from fxpass.spec.dtypes import compute_dtype, gradient_dtype
from fxpass.spec.operands import Operands

# Overwrites some rows of logits ``[few, V]`` with their gradient, and returns the factor by which
# the gradient has still to be multiplied, ``[few]``; it has to be 1 if the last argument is True.
ToGradient = Callable[[slice, Tensor, bool], Tensor]


def over_chunks(
    inputs: Operands,
    gradients: tuple[str, ...],
    to_gradient: ToGradient,
    rows: int,
    classes: int,
    block: int,
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, from a function of some rows of logits.

    Deterministic; does not write to its inputs. A gradient has its operand's dtype, with three
    exceptions in f32 (f64 for f64): the weight's gradient if there are several chunks, the bias's,
    and those of fp16 operands.

    Args:
        inputs: x, weight, bias, and the logits if they exist.
        gradients: the operands whose gradients are returned; if empty, the logits are only read.
        to_gradient: called once for each block of ``block`` rows, in the compute dtype.
        rows: of a chunk.
        classes: of one product, if the weight or its gradient needs a cast.
    """
    x, weight = inputs.x, inputs.weight
    dtype, multiplied = compute_dtype(x.dtype), multiplied_in(x.dtype, x.device)
    n, v = x.shape[0], weight.shape[0]
    rows = min(rows, n)
    # the first chunk overwrites the gradients, if there is one
    new = x.new_empty if n else x.new_zeros
    returned = gradient_dtype(x.dtype)
    final = returned if rows == n else dtype
    shapes = {"x": (x.shape, returned), "weight": (weight.shape, final), "bias": ((v,), dtype)}
    grads = {k: new(shapes[k][0], dtype=shapes[k][1]) for k in gradients}
    whole = x.dtype == multiplied and ("weight" not in grads or final == multiplied)
    tiles = slices(0, v, v if whole else classes)
    chunks = _Chunks(inputs, rows, tiles, min(block, rows), multiplied)
    x_rows, weight_rows = Rows(x, rows, multiplied), chunks.weight
    copied = x.dtype != multiplied
    x_sums = None
    if "x" in grads and returned != multiplied:
        x_sums = x.new_empty((rows, x.shape[1]), dtype=multiplied)
    for part in slices(0, n, rows):
        chunk, factors = chunks.logits(part, x_rows[part]), []
        for few in chunks.blocks(part):
            some = chunks.block(few, part)
            factor = to_gradient(few, some, chunks.narrow)
            factors.append(factor)
            if "bias" in grads:
                # beta 0: the first block overwrites uninitialised memory
                grads["bias"].addmv_(some.t(), factor, beta=float(few.start > 0))
            if grads:
                chunks.keep(few, part, some)
        if not grads:
            continue
        each = None if chunks.narrow else joined(factors).unsqueeze(1)
        scaled = x_rows[part] if each is None else part_of(x, part) * each
        x_grad = part_of(grads.get("x", x), part)
        sums = x_grad if x_sums is None else x_sums[: x_grad.shape[0]]
        if "x" in grads and not copied:
            torch.mm(chunk, weight, out=sums)
        for place in tiles:
            g = chunks.multiplied(part_of(chunk, place, 1))
            if "x" in grads and copied:
                add_product(sums, g, weight_rows[place], add=place.start > 0)
            if "weight" in grads:
                of_classes = part_of(grads["weight"], place)
                add_product(of_classes, g.t(), scaled, add=part.start > 0)
        if "x" in grads:
            if each is not None:
                sums.mul_(each)
            if x_sums is not None:
                x_grad.copy_(sums)
    return grads


class _Chunks:
    """One chunk of logits, in the operands' dtype, and its blocks in the compute dtype.

    Attributes:
        weight: the weight in the dtype of the products.
        narrow: whether blocks are copies of the chunk's rows, in a wider dtype.
    """

    def __init__(
        self, inputs: Operands, rows: int, tiles: list[slice], block: int, multiplied: torch.dtype
    ) -> None:
        x, v = inputs.x, inputs.weight.shape[0]
        dtype, stored = compute_dtype(x.dtype), gradient_dtype(x.dtype)
        widest = max((t.stop - t.start for t in tiles), default=0)
        self._given, self._tiles, self._few = inputs.logits, tiles, block
        self._buffer = x.new_empty((rows, v), dtype=stored)
        self.weight = Rows(inputs.weight, widest, multiplied)
        self._tile = None if stored == multiplied else x.new_empty(rows * widest, dtype=multiplied)
        self.narrow = stored != dtype
        self._room = x.new_empty((block, v), dtype=dtype) if self.narrow else None
        self._early, self._late = split_bias(inputs.bias, stored)
        if inputs.logits is not None:
            self._late = None  # given logits include the bias

    def logits(self, part: slice, x_rows: Tensor) -> Tensor:
        """The chunk ``[rows, V]`` with the linear's output; uninitialised if the inputs have
        logits, which :meth:`block` reads."""
        out = part_of(self._buffer, slice(0, part.stop - part.start))
        if self._given is not None:
            return out
        for place in self._tiles:
            bias = None if self._early is None else self._early[place]
            tile, weight = part_of(out, place, 1), self.weight[place]
            if self._tile is None:
                linear(x_rows, weight, bias, tile)
                continue
            wide = torch.mm(x_rows, weight.t(), out=self._tile[: tile.numel()].view(tile.shape))
            tile.copy_(wide if bias is None else wide.add_(bias))
        return out

    def multiplied(self, gradient: Tensor) -> Tensor:
        """The gradient of a tile of logits in the dtype of the products."""
        if self._tile is None:
            return gradient
        return self._tile[: gradient.numel()].view(gradient.shape).copy_(gradient)

    def blocks(self, part: slice) -> list[slice]:
        """The blocks of rows of a chunk."""
        return slices(part.start, part.stop, self._few)

    def block(self, few: slice, part: slice) -> Tensor:
        """Some rows of logits in the compute dtype ``[few, V]``; the caller may overwrite them."""
        place = part_of(self._buffer, slice(few.start - part.start, few.stop - part.start))
        source = place if self._given is None else self._given[few]
        out = place if self._room is None else self._room[: few.stop - few.start]
        if source is not out:
            out.copy_(source)
        return out if self._late is None else out.add_(self._late)

    def keep(self, few: slice, part: slice, gradient: Tensor) -> None:
        """Overwrites the logits of some rows with their gradient."""
        if self.narrow:
            self._buffer[few.start - part.start : few.stop - part.start] = gradient
