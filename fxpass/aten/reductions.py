"""Reductions of the logits' rows in ATen, and their gradients.

In: :class:`Operands` and :class:`fxpass.formula.reductions.Reductions`. Out: outputs of every row,
or the gradients of the operands for incoming gradients of the outputs. The plan says which of the
logits exist at a time: a chunk of rows (:mod:`fxpass.aten.blocks`), a tile of some rows and some
classes, or all logits in the memory of the weight's gradient (:mod:`fxpass.aten.tiles`). The
outputs are computed in f32 (f64 for f64), the logits in the operands' dtype, as in eager.
"""

from __future__ import annotations

import functools

from torch import Tensor

from fxpass.aten import tiles
from fxpass.aten.blocks import over_blocks
from fxpass.aten.gemm import slice_of
from fxpass.aten.row_sums import RowSums
from fxpass.aten.slopes import Slope, transformed
from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.operands import Operands, Outputs, empty_outputs
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
    one_softmax = of_one_softmax(spec.total)  # the sum's exponentials may become the gradient

    def to_gradient(rows: slice, logits: Tensor, scaled: bool) -> Tensor | None:
        sums = RowSums(operands, spec, rows)
        z = transformed(operands, spec, rows, logits, every)
        y = sums.add(z, every, differences=bool(products) and not one_softmax)
        results.add(rows, sums.finish())
        if sums.coef is None:
            return None
        slope = Slope(operands, rows, spec.total, sums.coef, sums.moments, dense=sums.dense)
        if one_softmax and sums.exponentials:
            # the factor of a row whose logits are all masked is infinite
            g, factor = slope.softmax_gradient(y, sums.total, every, scaled or spec.masks_logits)
        else:
            g, factor = slope.gradient(y, sums.log_total, every, scaled)
        slope.overwrite(spec, g, logits, every)
        return factor

    grads = over_blocks(operands, products, to_gradient, plan, spec.unrounded)
    return results.all(), grads


class _Results:
    """The outputs of all rows, from the outputs of some rows at a time."""

    def __init__(self, operands: Operands, spec: Reductions) -> None:
        self._operands = operands
        self._spec = spec
        self._out = None

    def add(self, rows: slice, found: Outputs) -> None:
        """Adds the outputs of some rows, without a copy if these are all rows."""
        if rows.stop - rows.start == self._operands.x.shape[0]:
            self._out = found
            return
        for whole, part in zip(self.all(), found, strict=True):
            if whole.numel():
                whole[..., rows] = part

    def all(self) -> Outputs:
        """The outputs; uninitialised where no rows were added."""
        if self._out is None:
            self._out = empty_outputs(self._operands, self._spec)
        return self._out


def _in_tiles(operands: Operands, spec: Reductions, plan: Plan, results: _Results) -> None:
    """Adds the outputs of every row, a tile of logits at a time."""
    by_start: dict[int, RowSums] = {}

    def reduce(rows: slice, classes: slice, logits: Tensor) -> None:
        if classes.start == 0:
            by_start[rows.start] = RowSums(operands, spec, rows)
        sums = by_start[rows.start]
        sums.add(transformed(operands, spec, rows, logits, classes), classes)
        if classes.stop == operands.weight.shape[0]:
            results.add(rows, sums.finish())
            del by_start[rows.start]

    tiles.over_tiles(operands, (), reduce, plan, spec.rounds_logits, operands.weight.dtype)


def _in_place(
    operands: Operands, spec: Reductions, plan: Plan
) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every row, and the gradients of the total."""
    every = slice(0, operands.x.shape[0])
    sums = RowSums(operands, spec, every)
    outputs = []
    coef = sums.coef
    assert coef is not None, "logits are in the place of a gradient that forward computes"

    def reduce(rows: slice, classes: slice, logits: Tensor) -> None:
        sums.add(transformed(operands, spec, rows, logits, classes), classes)

    def finish() -> tiles.TileFunction:
        outputs.append(sums.finish())
        slope = Slope(operands, every, spec.total, coef, sums.moments, dense=sums.dense)
        lse, rest = sums.lse_and_rest() if spec.reads_softmax else (None, coef)

        def to_gradient(rows: slice, classes: slice, logits: Tensor) -> None:
            z = transformed(operands, spec, rows, logits, classes)
            y = z if lse is None else z.sub_(lse)
            g, _ = slope.gradient(y, rest, classes, True)
            slope.overwrite(spec, g, logits, classes)

        return to_gradient

    grads = tiles.in_gradient(operands, spec.gradients, reduce, finish, plan.classes)
    return outputs[0], grads


def backward(
    operands: Operands, spec: Reductions, plan: Plan, out: Outputs, incoming: Tensor
) -> dict[str, Tensor]:
    """The gradients that ``spec`` names, for the incoming gradients ``[R, N]`` of ``out.rows``.

    Reads lse, rest and saved of ``out``. The dtypes are those of
    :func:`fxpass.aten.blocks.over_blocks` or of :func:`fxpass.aten.tiles.over_tiles`.
    """
    sigmas = dict(zip(spec.saved, out.saved, strict=True))
    by_start: dict[int, Slope] = {}  # if the classes of a row are in several tiles

    def to_gradient(rows: slice, classes: slice, logits: Tensor, scaled: bool) -> Tensor | None:
        z = transformed(operands, spec, rows, logits, classes)
        slope = by_start.get(rows.start)
        if slope is None:
            sums = {moment: sigma[rows].unsqueeze(1) for moment, sigma in sigmas.items()}
            slope = Slope(operands, rows, spec.rows, incoming[:, rows].t(), sums)
            if z.shape[1] < operands.weight.shape[0]:
                by_start[rows.start] = slope
        lse = None
        rest = z
        if spec.reads_softmax:
            lse, rest = (slice_of(t, rows).unsqueeze(1) for t in (out.lse, out.rest))
        y = z if lse is None else z.sub_(lse)
        g, factor = slope.gradient(y, rest, classes, scaled)
        slope.overwrite(spec, g, logits, classes)
        return factor

    if plan.strategy == "tiled":
        of_tile = functools.partial(to_gradient, scaled=True)
        dtype = operands.weight.dtype
        dtype = compute_dtype(dtype) if "weight" in spec.unrounded else dtype
        return tiles.over_tiles(operands, spec.gradients, of_tile, plan, spec.rounds_logits, dtype)

    def of_rows(rows: slice, logits: Tensor, scaled: bool) -> Tensor | None:
        return to_gradient(rows, slice(0, logits.shape[1]), logits, scaled)

    return over_blocks(operands, spec.gradients, of_rows, plan, spec.unrounded)
