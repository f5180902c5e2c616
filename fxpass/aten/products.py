"""The products of a chunk of rows, a few classes at a time where operands are cast.

In: rows of operands in the dtype of the products, in which the device multiplies, and weights in
their own. Out: logits, and products with their gradient::

    >>> x, weight, scratch = torch.ones(2, 3), torch.ones(4, 3), Scratch(torch.empty(0))
    >>> write_logits(x, weight, None, torch.empty(2, 4), 4, scratch)[0]
    tensor([3., 3., 3., 3.])
    >>> total = torch.empty(4, 3)
    >>> add_products(torch.ones(2, 4), [], [(total, x)], x.dtype, 4, False, scratch)
    >>> total[0]
    tensor([2., 2., 2.])
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fxpass.aten.gemm import add_product, linear, slice_of, slices
from fxpass.formula.dtypes import compute_dtype


class Scratch:
    """Memory that all parts of the logits share, by names. (New memory for each part would fragment
    the allocator's.) A name's tensor is valid until the next call with this name.

    Args:
        like: a tensor on the device.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory."""
        size = math.prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < size:
            memory = self._memory[name, dtype] = self._like.new_empty(size, dtype=dtype)
        return memory[:size].view(*shape)

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of a tensor in a dtype; the tensor itself if it has this dtype."""
        if tensor.dtype == dtype:
            return tensor
        return self(name, tensor.shape, dtype).copy_(tensor)


def write_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, classes: int, scratch: Scratch
) -> Tensor:
    """Writes ``x @ weight.T + bias`` to ``out``, rounded once.

    Args:
        x: ``[n, D]``, in the dtype of the products.
        weight: ``[V, D]``.
        bias: ``[V]``, or None.
        out: ``[n, V]``, in any dtype.
        classes: of a product, at most, if something is cast.
    """
    if weight.dtype == x.dtype == out.dtype:
        return linear(x, weight, bias, out)
    for some in slices(0, weight.shape[0], classes):
        tile = slice_of(out, some, 1)
        weight_part = scratch.cast("weight", slice_of(weight, some), x.dtype)
        bias_part = None if bias is None else slice_of(bias, some)
        if out.dtype == x.dtype:
            linear(x, weight_part, None if bias_part is None else bias_part.to(x.dtype), tile)
        else:
            z = torch.mm(x, weight_part.t(), out=scratch("tile", tile.shape, x.dtype))
            tile.copy_(z if bias_part is None else z.add_(bias_part))
    return out


def add_products(
    gradient: Tensor,
    rows: Sequence[tuple[Tensor, Tensor]],
    sums: Sequence[tuple[Tensor, Tensor]],
    product_dtype: torch.dtype,
    classes: int,
    add: bool,
    scratch: Scratch,
) -> None:
    """The products with the gradient of a chunk's logits.

    Args:
        gradient: g, ``[n, V]``.
        rows: outputs ``[n, K]`` that are overwritten with ``g @ weight``, and weights ``[V, K]``.
        sums: totals ``[V, K]`` and operands ``[n, K]`` in the dtype of the products: ``gᵀ @
            operand`` is added to the totals.
        product_dtype: the dtype of the products.
        classes: of a product, at most, unless nothing is cast or summed.
        add: whether the totals are read; else they are overwritten.
    """
    casts = any(t.dtype != product_dtype for t in (gradient, *(weight for _, weight in rows)))
    unrounded = [_unrounded(out, product_dtype) for out, _ in rows]
    if not casts:
        for total, (_, weight) in zip(unrounded, rows, strict=True):
            add_product(total, gradient, weight, add=False)
    for some in slices(0, gradient.shape[1], classes):
        if not casts and not sums:
            break
        g = scratch.cast("tile", slice_of(gradient, some, 1), product_dtype)
        if casts:
            for total, (_, weight) in zip(unrounded, rows, strict=True):
                weight_part = scratch.cast("weight", slice_of(weight, some), product_dtype)
                add_product(total, g, weight_part, add=some.start > 0)
        for total, operand in sums:
            add_product(slice_of(total, some), g.t(), operand, add=add)
    for total, (out, _) in zip(unrounded, rows, strict=True):
        if total is not out:
            out.copy_(total)


def _unrounded(out: Tensor, product_dtype: torch.dtype) -> Tensor:
    """Memory for a product that ends in ``out``: ``out`` itself, unless products of some classes
    would be rounded there before they are added."""
    dtype = compute_dtype(out.dtype)
    if out.dtype in (dtype, product_dtype):
        return out
    return torch.empty_like(out, dtype=dtype)
