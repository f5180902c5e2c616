"""The products of a chunk of rows, a few classes at a time where operands are cast.

In: rows of operands in the dtype in which the device multiplies, and weights in their own. Out:
logits, and products with their gradient::

    >>> x, weight, scratch = torch.ones(2, 3), torch.ones(4, 3), Scratch(torch.empty(0))
    >>> logits(x, weight, None, torch.empty(2, 4), 4, scratch)[0]
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

from fxpass.aten.gemm import add_product, linear, part_of, slices
from fxpass.formula.dtypes import compute_dtype


class Scratch:
    """Memory that all chunks share, by names. (A new copy for each chunk would fragment the
    allocator's memory.) A name's tensor is valid until the name is asked for again.

    Args:
        like: a tensor on the device.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._places: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Uninitialised memory."""
        size = math.prod(shape)
        place = self._places.get((name, dtype))
        if place is None or place.numel() < size:
            place = self._places[name, dtype] = self._like.new_empty(size, dtype=dtype)
        return place[:size].view(*shape)

    def cast(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor in a dtype: itself if it has it."""
        if tensor.dtype == dtype:
            return tensor
        return self(name, tensor.shape, dtype).copy_(tensor)


def logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, classes: int, scratch: Scratch
) -> Tensor:
    """Writes ``x @ weight.T + bias`` to ``out``, rounded once.

    Args:
        x: ``[n, D]``, in the dtype of the products.
        weight: ``[V, D]``.
        bias: ``[V]``, or None.
        out: ``[n, V]``, in any dtype.
        classes: of a product, if something is cast.
    """
    if weight.dtype == x.dtype == out.dtype:
        return linear(x, weight, bias, out)
    for some in slices(0, weight.shape[0], classes):
        tile = part_of(out, some, 1)
        of_some = scratch.cast("weight", part_of(weight, some), x.dtype)
        more = None if bias is None else part_of(bias, some)
        if out.dtype == x.dtype:
            linear(x, of_some, None if more is None else more.to(x.dtype), tile)
        else:
            wide = torch.mm(x, of_some.t(), out=scratch("tile", tile.shape, x.dtype))
            tile.copy_(wide if more is None else wide.add_(more))
    return out


def add_products(
    gradient: Tensor,
    rows: Sequence[tuple[Tensor, Tensor]],
    sums: Sequence[tuple[Tensor, Tensor]],
    multiplied: torch.dtype,
    classes: int,
    add: bool,
    scratch: Scratch,
) -> None:
    """The products with the gradient of a chunk's logits.

    Args:
        gradient: g, ``[n, V]``.
        rows: places ``[n, K]`` that are overwritten with ``g @ weight``, and weights ``[V, K]``.
        sums: totals ``[V, K]`` and operands ``[n, K]`` in the dtype of the products: ``gᵀ @
            operand`` is added to the totals.
        multiplied: the dtype of the products.
        classes: of a product, if something is cast or added to a wider sum.
        add: whether the totals are read; else they are overwritten.
    """
    copied = gradient.dtype != multiplied
    places = [_unrounded(out, multiplied) for out, _ in rows]
    if not copied:
        for place, (_, weight) in zip(places, rows, strict=True):
            add_product(place, gradient, weight, add=False)
    for some in slices(0, gradient.shape[1], classes):
        if not copied and not sums:
            break
        g = part_of(gradient, some, 1)
        if copied:
            g = scratch("tile", g.shape, multiplied).copy_(g)
            for place, (_, weight) in zip(places, rows, strict=True):
                of_some = scratch.cast("weight", part_of(weight, some), multiplied)
                add_product(place, g, of_some, add=some.start > 0)
        for total, operand in sums:
            add_product(part_of(total, some), g.t(), operand, add=add)
    for place, (out, _) in zip(places, rows, strict=True):
        if place is not out:
            out.copy_(place)


def _unrounded(out: Tensor, multiplied: torch.dtype) -> Tensor:
    """Where the product goes that is to be written to ``out``: to ``out``, if it is not rounded
    twice there."""
    wide = compute_dtype(out.dtype)
    if out.dtype in (wide, multiplied):
        return out
    return torch.empty_like(out, dtype=wide)
