"""Loops over tiles of logits, some rows and some classes at a time.

In: x, weight, bias, and functions of a tile of logits ``[rows, classes]`` in the compute dtype.
Out: the gradients of x, weight and bias. What the logits are reduced to is the functions' affair.

- :func:`over_tiles` computes every logit once, from functions that know each row's sums already.
  The part of the weight's gradient that belongs to a tile's classes is final and rounded once, to
  the weight's dtype: it is the only tensor of its size. Scratch is one tile.
- :func:`in_gradient` computes every logit once and reads it twice, first for the sums and then for
  the gradient. For this the logits ``[V, N]`` of all rows, N <= D, are kept in the memory of the
  weight's gradient ``[V, D]``; a tile is overwritten with the weight's gradient of its classes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxpass.aten.gemm import RowReader, add_product, linear, slices, split_bias
from fxpass.formula.dtypes import compute_dtype, gradient_dtype
from fxpass.formula.operands import Operands
from fxpass.plan.devices import multiplied_in
from fxpass.plan.plan import Plan

# A function of a tile: its rows, its classes, and its logits, which the function may overwrite. It
# has to leave their gradient in their place where a gradient is asked for.
OfTile = Callable[[slice, slice, Tensor], object]


def over_tiles(
    inputs: Operands,
    gradients: tuple[str, ...],
    to_gradient: OfTile,
    plan: Plan,
    rounded: bool,
    of_weight: torch.dtype,
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, from a function that overwrites a tile of logits with
    its gradient, called in the order of the classes.

    Deterministic; does not write to its inputs. The weight's gradient has the dtype ``of_weight``,
    the others have the compute dtype.

    Args:
        inputs: x, weight and bias.
        gradients: the operands whose gradients are returned.
        plan: its rows and classes, of a tile, at most.
        rounded: whether logits of bf16 operands are rounded to bf16, also by f32 products.
    """
    tiles = _Tiles(inputs, plan.rows, plan.classes, rounded)
    x = inputs.x
    weight = inputs.weight
    dtype = tiles.dtype
    parts = tiles.parts
    shapes = {"x": x.shape, "weight": weight.shape, "bias": weight.shape[:1]}
    # a tile's part of the weight's gradient is final; those of x and bias accumulate over tiles
    dtypes = {"x": dtype, "weight": of_weight, "bias": dtype}
    grads = {name: x.new_zeros(shapes[name], dtype=dtypes[name]) for name in gradients}
    sums = None
    if "weight" in grads and of_weight != dtype and len(parts) > 1:
        sums = x.new_empty((tiles.widest, x.shape[1]), dtype=dtype)
    for some in tiles.classes:
        w = tiles.weight[some]
        for part in parts:
            x_rows = tiles.x[part]
            logits = tiles.logits(x_rows, w, some)
            to_gradient(part, some, logits)
            if "bias" in grads:
                grads["bias"][some] += logits.sum(0)
            if not {"x", "weight"} & grads.keys():
                continue
            g = tiles.multiplied(logits)
            if "x" in grads:
                add_product(grads["x"][part], g, w, add=True)
            if "weight" in grads:
                out = grads["weight"][some] if sums is None else sums[: len(w)]
                add_product(out, g.t(), x_rows, add=part.start > 0)
        if sums is not None:
            grads["weight"][some] = sums[: some.stop - some.start]
    return grads


class _Tiles:
    """Tiles of logits in the compute dtype, and the operands of their products.

    Attributes:
        dtype: the compute dtype.
        parts, classes: the rows of each tile, and its classes, ``widest`` at most.
        x, weight: operands in the dtype of the products.
    """

    def __init__(self, inputs: Operands, rows: int, classes: int, rounded: bool) -> None:
        x = inputs.x
        weight = inputs.weight
        rows = min(rows, x.shape[0])
        classes = min(classes, weight.shape[0])
        multiplied = multiplied_in(x.dtype, x.device)
        self.dtype = compute_dtype(x.dtype)
        self.widest = classes
        self.parts = slices(0, x.shape[0], rows)
        self.classes = slices(0, weight.shape[0], classes)
        self.x = RowReader(x, rows, multiplied)
        self.weight = RowReader(weight, classes, multiplied)
        self._wide = x.new_empty(rows * classes, dtype=self.dtype)
        narrow = multiplied != self.dtype
        self._narrow = x.new_empty(rows * classes, dtype=multiplied) if narrow else None
        # fp16 has too small a range: see gradient_dtype
        self._stored = gradient_dtype(x.dtype) if rounded else self.dtype
        # products in f32 that are not rounded may have any bias added after them
        self._early, self._late = split_bias(inputs.bias, multiplied if narrow else self._stored)

    def logits(self, x_rows: Tensor, weight: Tensor, classes: slice) -> Tensor:
        """The linear's output for some rows and classes, in a buffer that every call overwrites."""
        shape = (x_rows.shape[0], weight.shape[0])
        out = self._wide[: shape[0] * shape[1]].view(shape)
        early, late = (None if b is None else b[classes] for b in (self._early, self._late))
        if self._narrow is None:
            torch.mm(x_rows, weight.t(), out=out)
            if early is not None:
                out.add_(early)
            if self._stored != self.dtype:
                out.copy_(out.to(self._stored))
        else:
            out.copy_(linear(x_rows, weight, early, self._narrow[: out.numel()].view(shape)))
        return out if late is None else out.add_(late)

    def multiplied(self, gradient: Tensor) -> Tensor:
        """The gradient of a tile in the dtype of the products."""
        if self._narrow is None:
            return gradient
        return self._narrow[: gradient.numel()].view(gradient.shape).copy_(gradient)


# ---------------------------------------------------------------- in the weight's gradient


def in_gradient(
    inputs: Operands,
    gradients: tuple[str, ...],
    read: OfTile,
    finish: Callable[[], OfTile],
    classes: int,
) -> dict[str, Tensor]:
    """The gradients of x, weight and bias, with all logits in the memory of the weight's gradient.

    Deterministic; does not write to its inputs. The weight's gradient has its dtype, but f32 for
    fp16; the others have the compute dtype.

    Args:
        inputs: x, weight and bias, with N <= D.
        gradients: the operands whose gradients are returned, among them the weight.
        read: called once for the logits ``[N, classes]`` of each tile, before ``finish``.
        finish: called once; what it returns is called once for each tile, and overwrites its logits
            with their gradient.
        classes: of a tile, at most.
    """
    x = inputs.x
    weight = inputs.weight
    n = len(inputs.x)
    v = len(inputs.weight)
    assert n <= x.shape[1], "the logits [V, N] of all rows have to fit into [V, D]"
    dtype = compute_dtype(x.dtype)
    multiplied = multiplied_in(x.dtype, x.device)
    every = slice(0, n)
    tiles = slices(0, v, classes)
    narrow = multiplied != dtype
    gradient = x.new_empty(weight.shape, dtype=gradient_dtype(x.dtype))
    stored = gradient[:, :n]
    room = x.new_empty((min(classes, v), n), dtype=dtype)
    xs = x.to(multiplied)
    weights = RowReader(weight, min(classes, v), multiplied)
    early, late = split_bias(inputs.bias, gradient.dtype)

    def logits(some: slice) -> Tensor:
        """``[N, classes]``, copied to the compute dtype; may be overwritten."""
        place = room[: some.stop - some.start].copy_(stored[some])
        return (place if late is None else place.add_(late[some].unsqueeze(1))).t()

    for some in tiles:
        w = weights[some]
        bias = None if early is None else early[some].unsqueeze(1)
        if narrow:
            stored[some] = w @ xs.t() if bias is None else torch.addmm(bias, w, xs.t())
        else:
            place = torch.mm(w, xs.t(), out=room[: len(w)])
            stored[some] = place if bias is None else place.add_(bias)
        read(every, some, logits(some))
    to_gradient = finish()
    grads = {"weight": gradient}
    if "x" in gradients:
        grads["x"] = x.new_zeros(x.shape, dtype=dtype)
    if "bias" in gradients:
        grads["bias"] = x.new_empty(v, dtype=dtype)
    for some in tiles:
        raw = logits(some)
        to_gradient(every, some, raw)
        if "bias" in grads:
            torch.sum(raw, 0, out=grads["bias"][some])
        g = stored[some].copy_(raw.t()) if narrow else raw.t()
        if "x" in grads:
            add_product(grads["x"], g.t(), weights[some], add=True)
        if narrow:  # the gradient is in the output's memory, so the product needs a new tensor
            gradient[some] = g @ xs
        else:
            add_product(gradient[some], g, xs, add=False)
    return grads
