"""Loops over tiles of logits, some rows and some classes at a time.

In: x, weight, bias, and functions of a tile of logits ``[rows, classes]`` in the compute dtype.
Out: the gradients of x, weight and bias.

- :func:`over_tiles` computes each logit once; the function has the sums of each row already. The
  weight's gradient of a tile's classes is rounded once, to the weight's dtype: no other tensor has
  its size. Scratch is one tile.
- :func:`in_gradient` computes each logit once and reads it twice, first for the sums and then for
  the gradient. Until then the memory of the weight's gradient ``[V, D]`` holds the logits of all
  rows ``[V, N]``, N <= D.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxpass.aten.gemm import add_product, linear, slice_of, slices, split_bias
from fxpass.aten.products import Scratch
from fxpass.formula.dtypes import compute_dtype, gradient_dtype
from fxpass.formula.operands import Operands
from fxpass.plan.devices import multiplied_in
from fxpass.plan.plan import Plan

# A function of a tile's rows, classes and logits. It may overwrite the logits; where gradients are
# computed, it overwrites them with their gradient.
TileFunction = Callable[[slice, slice, Tensor], object]


def over_tiles(
    inputs: Operands,
    gradients: tuple[str, ...],
    to_gradient: TileFunction,
    plan: Plan,
    rounded: bool,
    weight_dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, from a function that overwrites a tile of logits with
    its gradient, called in the order of the classes.

    Deterministic; does not write to its inputs. The weight's gradient has ``weight_dtype``, the
    others have the compute dtype.

    Args:
        inputs: x, weight and bias.
        gradients: the operands whose gradients are returned.
        plan: its rows and classes are the most that a tile has.
        rounded: whether logits of bf16 operands are rounded to bf16, also by f32 products.
    """
    x = inputs.x
    weight = inputs.weight
    dtype = compute_dtype(x.dtype)
    tiles = _Tiles(inputs, rounded)
    row_parts = slices(0, x.shape[0], plan.rows)
    shapes = {"x": x.shape, "weight": weight.shape, "bias": weight.shape[:1]}
    # the gradients of x and bias are sums over tiles of classes
    dtypes = {"x": dtype, "weight": weight_dtype, "bias": dtype}
    grads = {name: x.new_zeros(shapes[name], dtype=dtypes[name]) for name in gradients}
    rounds_sums = weight_dtype != dtype and len(row_parts) > 1
    for classes in slices(0, weight.shape[0], plan.classes):
        w = tiles.product_operand("weight", slice_of(weight, classes))
        sums = None
        if "weight" in grads:
            sums = grads["weight"][classes]
            sums = tiles.scratch("sums", sums.shape, dtype) if rounds_sums else sums
        for rows in row_parts:
            x_rows = tiles.product_operand("x", slice_of(x, rows))
            logits = tiles.logits(x_rows, w, classes)
            to_gradient(rows, classes, logits)
            if "bias" in grads:
                grads["bias"][classes] += logits.sum(0)
            if not {"x", "weight"} & grads.keys():
                continue
            g = tiles.product_operand("product", logits)
            if "x" in grads:
                add_product(grads["x"][rows], g, w, add=True)
            if sums is not None:
                add_product(sums, g.t(), x_rows, add=rows.start > 0)
        if sums is not None and rounds_sums:
            grads["weight"][classes] = sums
    return grads


class _Tiles:
    """Tiles of logits in the compute dtype, and the operands of their products."""

    def __init__(self, inputs: Operands, rounded: bool) -> None:
        x = inputs.x
        self.scratch = Scratch(x)
        self._dtype = compute_dtype(x.dtype)
        self._product_dtype = multiplied_in(x.dtype, x.device)
        # fp16 has too small a range: see gradient_dtype
        self._stored = gradient_dtype(x.dtype) if rounded else self._dtype
        # any bias may be added after products in f32 that are not rounded
        narrow = self._product_dtype != self._dtype
        stored = self._product_dtype if narrow else self._stored
        self._gemm_bias, self._added_bias = split_bias(inputs.bias, stored)

    def logits(self, x_rows: Tensor, weight: Tensor, classes: slice) -> Tensor:
        """The linear's output for some rows and classes, in a buffer that every call overwrites."""
        shape = (x_rows.shape[0], weight.shape[0])
        out = self.scratch("logits", shape, self._dtype)
        bias = None if self._gemm_bias is None else self._gemm_bias[classes]
        if self._product_dtype == self._dtype:
            torch.mm(x_rows, weight.t(), out=out)
            if bias is not None:
                out.add_(bias)
            if self._stored != self._dtype:
                out.copy_(out.to(self._stored))
        else:
            product = self.scratch("product", shape, self._product_dtype)
            out.copy_(linear(x_rows, weight, bias, product))
        return out if self._added_bias is None else out.add_(self._added_bias[classes])

    def product_operand(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor in the dtype of the products; a copy is valid until the next of its name."""
        return self.scratch.cast(name, tensor, self._product_dtype)


# ---------------------------------------------------------------- in the weight's gradient


def in_gradient(
    inputs: Operands,
    gradients: tuple[str, ...],
    reduce: TileFunction,
    finish: Callable[[], TileFunction],
    classes: int,
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, with all logits in the memory of the weight's gradient.

    Deterministic; does not write to its inputs. The weight's gradient has its dtype, but f32 for
    fp16; the others have the compute dtype.

    Args:
        inputs: x, weight and bias, with N <= D.
        gradients: the operands whose gradients are returned, among them the weight.
        reduce: called once for the logits ``[N, classes]`` of each tile, before ``finish``.
        finish: called once; returns a function that is called once for each tile and overwrites its
            logits with their gradient.
        classes: of a tile, at most.
    """
    x = inputs.x
    weight = inputs.weight
    n = len(x)
    v = len(weight)
    assert n <= x.shape[1], "the logits [V, N] of all rows have to fit into [V, D]"
    dtype = compute_dtype(x.dtype)
    product_dtype = multiplied_in(x.dtype, x.device)
    every = slice(0, n)
    tiles = slices(0, v, classes)
    narrow = product_dtype != dtype
    gradient = x.new_empty(weight.shape, dtype=gradient_dtype(x.dtype))
    stored = gradient[:, :n]
    scratch = Scratch(x)
    x_rows = x.to(product_dtype)
    gemm_bias, added_bias = split_bias(inputs.bias, gradient.dtype)

    def weight_of(tile: slice) -> Tensor:
        return scratch.cast("weight", slice_of(weight, tile), product_dtype)

    def logits_of(tile: slice) -> Tensor:
        """``[N, classes]``, copied to the compute dtype; may be overwritten."""
        z = scratch("tile", (tile.stop - tile.start, n), dtype).copy_(stored[tile])
        return (z if added_bias is None else z.add_(added_bias[tile].unsqueeze(1))).t()

    for tile in tiles:
        w = weight_of(tile)
        bias = None if gemm_bias is None else gemm_bias[tile].unsqueeze(1)
        if narrow:
            stored[tile] = w @ x_rows.t() if bias is None else torch.addmm(bias, w, x_rows.t())
        else:
            z = torch.mm(w, x_rows.t(), out=scratch("tile", (len(w), n), dtype))
            stored[tile] = z if bias is None else z.add_(bias)
        reduce(every, tile, logits_of(tile))
    to_gradient = finish()
    grads = {"weight": gradient}
    if "x" in gradients:
        grads["x"] = x.new_zeros(x.shape, dtype=dtype)
    if "bias" in gradients:
        grads["bias"] = x.new_empty(v, dtype=dtype)
    for tile in tiles:
        logits = logits_of(tile)
        to_gradient(every, tile, logits)
        if "bias" in grads:
            torch.sum(logits, 0, out=grads["bias"][tile])
        g = stored[tile].copy_(logits.t()) if narrow else logits.t()
        if "x" in grads:
            add_product(grads["x"], g.t(), weight_of(tile), add=True)
        if narrow:  # g is in the output's memory, so the product needs a new tensor
            gradient[tile] = g @ x_rows
        else:
            add_product(gradient[tile], g, x_rows, add=False)
    return grads
