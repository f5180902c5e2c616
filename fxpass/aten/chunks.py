"""The loop over chunks of rows of logits, and the products with their gradients.

In: the operands of a head, and a function of some rows of its logits. Out: the gradients of the
operands. One chunk of rows of logits exists at a time, in a buffer that all chunks share. Operands
are multiplied in the dtype that the device multiplies fastest; sums over chunks are f32 (f64 for
f64). It takes 6·N·D·V operations, or 2·N·D·V without gradients. :mod:`fxpass.aten.blocks` has the
function of a spec.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fxpass.aten.gemm import RowReader, add_product, linear, part_of, slices
from fxpass.formula.dtypes import compute_dtype

# Some rows, and their logits ``[rows, V]``, which are overwritten with their gradient -> the factor
# ``[rows, 1]`` by which it has still to be multiplied, or None.
OfChunk = Callable[[slice, Tensor], Tensor | None]


def over_chunks(n: int, rows: int, head: Chunks, of_chunk: OfChunk) -> None:
    """Calls the function once for each chunk of ``n`` rows, and adds the gradient that it leaves
    to those of the head's operands. Deterministic; does not write to the operands."""
    for part in slices(0, n, rows):
        chunk = head.logits(part)
        factor = of_chunk(part, chunk)
        if head.trained:
            head.add(part, chunk, factor)


def place(operand: Tensor, dtype: torch.dtype, n: int, exact: bool) -> Tensor:
    """Memory for the gradient of an operand, in ``dtype`` if it is ``exact``: one product computes
    each element and rounds it once. Else in the dtype of sums. Without rows it is 0."""
    new = operand.new_empty if n else operand.new_zeros
    return new(operand.shape, dtype=dtype if exact else compute_dtype(dtype))


class Chunks:
    """The products of one head with a chunk of rows.

    Attributes:
        trained: whether the gradient of the logits is read.

    Args:
        operands: x ``[N, D]``, weight ``[V, D]``, and the bias ``[V]`` that products add, or None.
        rows: of a chunk, at most.
        classes: of a product, at most, if operands are cast or products added to a wider sum.
        multiplied: the dtype of the products.
        stored: the dtype of a chunk of logits.
        grads: where the gradients of x and weight go, each in the dtype of the products or in that
            of sums; None for those that nobody asks for.
    """

    def __init__(
        self,
        operands: tuple[Tensor, Tensor, Tensor | None],
        rows: int,
        classes: int,
        multiplied: torch.dtype,
        stored: torch.dtype,
        grads: tuple[Tensor | None, Tensor | None],
    ) -> None:
        self._x, weight, self._bias = operands
        self._grads = grads
        self.trained = any(gradient is not None for gradient in grads)
        v = weight.shape[0]
        classes = min(classes, v)
        self._every = slice(0, v)
        self._tiles = slices(0, v, classes)
        self._copied = self._x.dtype != multiplied
        self._x_rows = RowReader(self._x, rows, multiplied)
        self._weight = RowReader(weight, classes, multiplied)
        self._buffer = self._x.new_empty((rows, v), dtype=stored)
        self._tile = None
        if stored != multiplied:
            self._tile = self._x.new_empty(rows * classes, dtype=multiplied)
        # of x, for the chunk that was computed last, in the dtype of the products
        self._rows: Tensor = self._x

    def logits(self, part: slice) -> Tensor:
        """The logits of some rows ``[rows, V]``; valid until the next call."""
        self._rows = self._x_rows[part]
        out = part_of(self._buffer, slice(0, part.stop - part.start))
        if not self._copied:
            return linear(self._rows, self._weight[self._every], self._bias, out)
        for some in self._tiles:
            tile = part_of(out, some, 1)
            weight = self._weight[some]
            bias = None if self._bias is None else self._bias[some]
            if self._tile is None:
                linear(self._rows, weight, bias, tile)
            else:
                wide = torch.mm(self._rows, weight.t(), out=self._wide(tile))
                tile.copy_(wide if bias is None else wide.add_(bias))
        return out

    def _wide(self, tile: Tensor) -> Tensor:
        """Memory for a tile of logits in the dtype of the products."""
        assert self._tile is not None
        return self._tile[: tile.numel()].view(tile.shape)

    def add(self, part: slice, gradient: Tensor, factor: Tensor | None) -> None:
        """Adds the gradients of the operands, from that of the chunk's logits ``[rows, V]`` times
        the ``factor`` ``[rows, 1]``. The factor is multiplied into ``[rows, D]``, which are
        smaller: x before the product for the weight's gradient, and the gradient of x."""
        x, weight = self._grads
        out = sums = None
        if x is not None:
            out = part_of(x, part)
            sums = self._sums(out)
            if not self._copied:
                add_product(sums, gradient, self._weight[self._every], add=False)
        x_rows = self._rows if factor is None else part_of(self._x, part) * factor
        for some in self._tiles:
            g = part_of(gradient, some, 1)
            if self._tile is not None:
                g = self._wide(g).copy_(g)
            if sums is not None and self._copied:
                add_product(sums, g, self._weight[some], add=some.start > 0)
            if weight is not None:
                add_product(part_of(weight, some), g.t(), x_rows, add=part.start > 0)
        if sums is not None and out is not None:
            if factor is not None:
                sums.mul_(factor)
            if sums is not out:
                out.copy_(sums)

    def _sums(self, out: Tensor) -> Tensor:
        """Where the product goes that is to be written to ``out``: to ``out``, if it is not rounded
        twice there."""
        wide = compute_dtype(out.dtype)
        if out.dtype in (wide, self._rows.dtype):
            return out
        return torch.empty_like(out, dtype=wide)
