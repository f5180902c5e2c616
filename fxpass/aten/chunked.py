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
from fxpass.plan.plan import Plan
from fxpass.spec.dtypes import compute_dtype, gradient_dtype
from fxpass.spec.operands import Operands

# Overwrites some rows of logits ``[few, V]`` with their gradient, and returns the factor
# ``[few, 1]`` by which the gradient has still to be multiplied, or None for all rows. It has to be
# 1 or None if the last argument is True.
ToGradient = Callable[[slice, Tensor, bool], Tensor | None]


def over_chunks(
    inputs: Operands,
    gradients: tuple[str, ...],
    to_gradient: ToGradient,
    plan: Plan,
    unrounded: tuple[str, ...] = (),
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, from a function of some rows of logits.

    Deterministic; does not write to its inputs. A gradient has its operand's dtype, with four
    exceptions in f32 (f64 for f64): the weight's gradient if there are several chunks, the bias's,
    those of fp16 operands, and unrounded ones.

    Args:
        inputs: x, weight, bias, and the logits if they exist.
        gradients: the operands whose gradients are returned; if empty, the logits are only read.
        to_gradient: called once for each block of rows, in the compute dtype.
        plan: its rows, of a chunk; its block; its classes, of one product, if the weight or its
            gradient needs a cast.
        unrounded: those of x and weight whose gradients keep the dtype of the sums.
    """
    x, weight = inputs.x, inputs.weight
    dtype, multiplied = compute_dtype(x.dtype), multiplied_in(x.dtype, x.device)
    n, v = x.shape[0], weight.shape[0]
    rows, copied = min(plan.rows, n), x.dtype != multiplied
    of_x, final = (gradient_dtype(x.dtype, name in unrounded) for name in ("x", "weight"))
    final = final if rows == n else dtype
    whole = not copied and ("weight" not in gradients or final == multiplied)
    tiles = slices(0, v, v if whole else plan.classes)
    # the products of the only chunk are the gradients; else there are places for them
    only = whole and rows == n > 0 and of_x == multiplied
    shapes = {"x": (x.shape, of_x), "weight": (weight.shape, final), "bias": ((v,), dtype)}
    placed = [name for name in gradients if not only or name == "bias"]
    new = x.new_empty if n else x.new_zeros
    grads = {name: new(shapes[name][0], dtype=shapes[name][1]) for name in placed}
    chunks = _Chunks(inputs, rows, tiles, min(plan.block, rows), multiplied)
    x_rows, x_sums = Rows(x, rows, multiplied), None
    if "x" in gradients and of_x != multiplied:
        x_sums = x.new_empty((rows, x.shape[1]), dtype=multiplied)
    for part in slices(0, n, rows):
        chunk, factors = chunks.logits(part, x_rows[part]), []
        for few in chunks.blocks(part):
            some = chunks.block(few, part)
            factor = to_gradient(few, some, chunks.narrow)
            factors.append(factor)
            if "bias" in gradients:
                of_rows = some.new_ones(some.shape[0]) if factor is None else factor.view(-1)
                # beta 0: the first block overwrites uninitialised memory
                grads["bias"].addmv_(some.t(), of_rows, beta=float(few.start > 0))
            if gradients:
                chunks.keep(few, part, some)
        if not gradients:
            continue
        each = None if chunks.narrow or factors[0] is None else joined(factors)
        scaled = x_rows[part] if each is None else part_of(x, part) * each
        x_grad = sums = part_of(grads["x"], part) if "x" in grads else None
        if x_sums is not None:
            sums = part_of(x_sums, slice(0, part.stop - part.start))
        if "x" in gradients and not copied:
            sums = torch.mm(chunk, weight, out=sums)
        for place in tiles:
            g = chunks.multiplied(part_of(chunk, place, 1))
            if "x" in gradients and copied:
                add_product(sums, g, chunks.weight[place], add=place.start > 0)
            if "weight" in gradients:
                of_classes = None if only else part_of(grads["weight"], place)
                product = add_product(of_classes, g.t(), scaled, add=part.start > 0)
                grads.setdefault("weight", product)
        if sums is not None:
            if each is not None:
                sums.mul_(each)
            if x_sums is not None and x_grad is not None:
                x_grad.copy_(sums)
            grads.setdefault("x", sums)
    return grads


class _Chunks:
    """One chunk of logits, in the operands' dtype, and its blocks in the compute dtype.

    Attributes:
        weight: the weight in the dtype of the products.
        narrow: whether blocks are copies of the chunk's rows, in a wider dtype.
    """

    def __init__(
        self,
        inputs: Operands,
        rows: int,
        tiles: tuple[slice, ...],
        block: int,
        multiplied: torch.dtype,
    ) -> None:
        x, v = inputs.x, inputs.weight.shape[0]
        dtype, stored = compute_dtype(x.dtype), gradient_dtype(x.dtype)
        widest = tiles[0].stop if tiles else 0
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

    def blocks(self, part: slice) -> tuple[slice, ...]:
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
