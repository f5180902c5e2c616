"""Reductions of the logits' rows in ATen, and their gradients.

In: :class:`Operands` and :class:`fxpass.formula.reductions.Reductions`. Out: outputs of every row,
or the gradients of the operands for incoming gradients of the outputs. The plan says which of the
logits exist at a time: those of some rows (:mod:`fxpass.aten.blocks`), a tile of some rows and
some classes, or all of them in the memory of the weight's gradient (:mod:`fxpass.aten.tiles`). The
outputs are computed in f32 (f64 for f64), the logits in the operands' dtype, as in eager.
"""

from __future__ import annotations

import functools

from torch import Tensor

from fxpass.aten import tiles
from fxpass.aten.blocks import over_blocks
from fxpass.aten.gemm import part_of
from fxpass.aten.row_sums import RowSums
from fxpass.aten.slopes import Slope, transformed
from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.operands import Operands, Outputs, empty
from fxpass.formula.outputs import of_one_softmax
from fxpass.formula.reductions import Reductions
from fxpass.plan.plan import Plan


def forward(operands: Operands, spec: Reductions, plan: Plan) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every row, and the gradients of the total, if there is one, in the dtypes of
    :func:`fxpass.aten.blocks.over_blocks`; in tiles and in place, in those of
    :mod:`fxpass.aten.tiles`."""
    if plan.in_place:
        return _in_place(operands, spec, plan)
    results = _Results(operands, spec)
    products = spec.gradients if spec.total else ()
    if plan.strategy == "tiled":
        assert not products, "gradients before all classes are read"
        _in_tiles(operands, spec, plan, results)
        return results.all(), {}
    every = slice(0, operands.weight.shape[0])
    once = of_one_softmax(spec.total)  # the exponentials of the sum may become the gradient

    def read_rows(few: slice, logits: Tensor, scaled: bool) -> Tensor | None:
        sums = RowSums(operands, spec, few)
        # nobody reads these logits again
        z = transformed(operands, spec, few, logits, every)
        y = sums.add(z, every, keep=bool(products) and not once)
        results.add(few, sums.finish())
        if sums.coef is None:
            return None
        slope = Slope(operands, few, spec.total, sums.coef, sums.moments, dense=sums.dense)
        if once and sums.exponentials:
            # a row that is masked wholly has an infinite factor
            g, factor = slope.of_softmax(y, sums.total, every, scaled or spec.masks)
        else:
            g, factor = slope.of(y, sums.log_total, every, scaled)
        slope.to_logits(spec, g, logits, every)
        return factor

    grads = over_blocks(operands, products, read_rows, plan, spec.unrounded)
    return results.all(), grads


class _Results:
    """The outputs of all rows, from those of some rows at a time."""

    def __init__(self, operands: Operands, spec: Reductions) -> None:
        self._call = (operands, spec)
        self._out = None

    def add(self, few: slice, found: Outputs) -> None:
        """Adds the outputs of some rows; they are not copied if they are all."""
        if few.stop - few.start == self._call[0].x.shape[0]:
            self._out = found
            return
        for whole, some in zip(self.all(), found, strict=True):
            if whole.numel():
                whole[..., few] = some

    def all(self) -> Outputs:
        """The outputs; uninitialised where no rows were added."""
        if self._out is None:
            self._out = empty(*self._call)
        return self._out


def _in_tiles(operands: Operands, spec: Reductions, plan: Plan, results: _Results) -> None:
    """Adds the outputs of every row, a tile of logits at a time."""
    of_part: dict[int, RowSums] = {}

    def read(part: slice, some: slice, logits: Tensor) -> None:
        if some.start == 0:
            of_part[part.start] = RowSums(operands, spec, part)
        sums = of_part[part.start]
        sums.add(transformed(operands, spec, part, logits, some), some)
        if some.stop == operands.weight.shape[0]:
            results.add(part, sums.finish())
            del of_part[part.start]

    tiles.over_tiles(operands, (), read, plan, spec.ranks, operands.weight.dtype)


def _in_place(
    operands: Operands, spec: Reductions, plan: Plan
) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every row, and the gradients of the total."""
    every = slice(0, operands.x.shape[0])
    sums = RowSums(operands, spec, every)
    found = []
    coef = sums.coef
    assert coef is not None, "logits are in the place of a gradient that forward computes"

    def read(every: slice, some: slice, logits: Tensor) -> None:
        sums.add(transformed(operands, spec, every, logits, some), some)

    def finish() -> tiles.OfTile:
        found.append(sums.finish())
        slope = Slope(operands, every, spec.total, coef, sums.moments, dense=sums.dense)
        lse, rest = sums.lse_and_rest() if spec.softmax else (None, coef)

        def to_gradient(every: slice, some: slice, logits: Tensor) -> None:
            z = transformed(operands, spec, every, logits, some)
            y = z if lse is None else z.sub_(lse)
            g, _ = slope.of(y, rest, some, True)
            slope.to_logits(spec, g, logits, some)

        return to_gradient

    grads = tiles.in_gradient(operands, spec.gradients, read, finish, plan.classes)
    return found[0], grads


def backward(
    operands: Operands, spec: Reductions, plan: Plan, out: Outputs, incoming: Tensor
) -> dict[str, Tensor]:
    """The gradients that ``spec`` names, for the incoming gradients ``[R, N]`` of ``out.rows``.

    Of ``out`` it reads lse, rest and saved. The dtypes are those of
    :func:`fxpass.aten.blocks.over_blocks` or of :func:`fxpass.aten.tiles.over_tiles`.
    """
    sigmas = dict(zip(spec.saved, out.saved, strict=True))
    of_part: dict[int, Slope] = {}  # of rows whose classes are in several tiles

    def to_gradient(few: slice, some: slice, logits: Tensor, scaled: bool) -> Tensor | None:
        z = transformed(operands, spec, few, logits, some)
        slope = of_part.get(few.start)
        if slope is None:
            sums = {moment: sigma[few].unsqueeze(1) for moment, sigma in sigmas.items()}
            slope = Slope(operands, few, spec.rows, incoming[:, few].t(), sums)
            if z.shape[1] < operands.weight.shape[0]:
                of_part[few.start] = slope
        lse = None
        rest = z
        if spec.softmax:
            lse, rest = (part_of(t, few).unsqueeze(1) for t in (out.lse, out.rest))
        y = z if lse is None else z.sub_(lse)
        g, factor = slope.of(y, rest, some, scaled)
        slope.to_logits(spec, g, logits, some)
        return factor

    if plan.strategy == "tiled":
        of_tile = functools.partial(to_gradient, scaled=True)
        dtype = operands.weight.dtype
        dtype = compute_dtype(dtype) if "weight" in spec.unrounded else dtype
        return tiles.over_tiles(operands, spec.gradients, of_tile, plan, spec.ranks, dtype)

    def of_rows(few: slice, logits: Tensor, scaled: bool) -> Tensor | None:
        return to_gradient(few, slice(0, logits.shape[1]), logits, scaled)

    return over_blocks(operands, spec.gradients, of_rows, plan, spec.unrounded)
