"""The gradient of tiles of logits, from the incoming gradients of their rows' reductions.

In: operands and incoming gradients. Out: the gradient of the transformed logits, and of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpass.aten.exponential import exponential
from fxpass.aten.gemm import slice_of
from fxpass.aten.row_sums import is_dense
from fxpass.formula import expression
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import LEAST_LOG, OF_PICKS, Output, line_count, of_one_softmax
from fxpass.formula.reductions import Reductions
from fxpass.formula.terms import Terms

# Times a factor that products with x may make a denormal number, this is 0 in f32.
_SMALL = 2.0**-49


class Slope(Terms):
    """The gradient of some rows of transformed logits, for incoming gradients of their outputs: the
    sum of these terms, and of values at ``picked`` classes ``[rows, K]``. Numbers of rows are
    columns ``[rows, 1]``.

    Args:
        operands: of the call.
        rows: the rows.
        outputs: the outputs that have an incoming gradient.
        incoming: the incoming gradients, a column each, K for picks ``[N, K]``.
        sums: the moments of :func:`fxpass.formula.reductions.slope_moments`.
        dense: True if it is known that no incoming gradient is 0.

    Attributes:
        picked: pairs of class indices and their values.
        reads_log: True if the log-softmax is read.
    """

    def __init__(
        self,
        operands: Operands,
        rows: slice,
        outputs: Sequence[Output],
        incoming: Tensor,
        sums: Mapping[Any, Tensor],
        dense: bool = False,
    ) -> None:
        super().__init__()
        self.picked: list[tuple[Tensor, Tensor]] = []
        self._operands = operands
        self._rows = rows
        column = 0
        for output in outputs:
            count = line_count(output, operands.pick_count)
            lines = slice_of(incoming, slice(column, column + count), 1)
            if output in OF_PICKS:
                index = slice_of(operands.picked_classes(), rows)
                self.picked.append((index, lines))
            grad = lines if count == 1 else lines.sum(1, True)
            self.add_output(output, grad, sums)
            column += count
        self.reads_log = bool(self.coefficients)
        self._of_one_softmax = of_one_softmax(outputs)
        # the logits of a row without an incoming gradient have no gradient, but 0 * nan is nan
        self._zero_rows = None
        if not dense:
            has_gradient = incoming.any(1, True)
            if not is_dense(has_gradient):
                self._zero_rows = ~has_gradient

    def gradient(
        self, y: Tensor, log_total: Tensor, classes: slice, scaled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of some classes, where ``y - log_total`` is the log-softmax; and the factor
        by which the gradient has still to be multiplied, which is None or 1 if ``scaled``.
        Overwrites y, if :attr:`reads_log`."""
        if self._of_one_softmax:
            return self.softmax_gradient(exponential(y, out=y), log_total.exp(), classes, scaled)
        log = y
        g = None
        if self.reads_log:
            log = y.sub_(log_total).clamp_(min=LEAST_LOG)
        softmax = exponential(log) if any(a for a, _ in self.coefficients) else log
        for (a, weight), polynomial in self.coefficients.items():
            term = _polynomial(polynomial, log)
            for _ in range(a):
                term = softmax * term if term.shape[1] == 1 else term.mul_(softmax)
            if weight is not None:
                w = self._operands.given_tile(weight, self._rows, classes)
                term = w * term if term.shape[1] == 1 else term.mul_(w)
            if g is None:
                g = term if term.shape[1] > 1 else term.expand_as(log).clone()
            else:
                g += term
            del term  # before the next one
        del softmax
        g = torch.zeros_like(log) if g is None else g
        for index, each in self._picked(classes):
            g.scatter_add_(1, index, each)
        return g, None

    def softmax_gradient(
        self, e: Tensor, total: Tensor, classes: slice, scaled: bool
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`gradient`, from the softmax ``e / total``, of which only the first power is
        read."""
        factor = self.coefficients[1, None][0] / total
        # where several gradients cancel, only picked classes have a gradient, and the factor is 0
        small = self._zero_rows is not None or not is_dense(factor * _SMALL)
        if scaled or self._operands.scale is not None or small:
            e.mul_(factor)
            factor = torch.ones_like(factor)
        for index, each in self._picked(classes):
            e.scatter_add_(1, index, each / factor)
        return e, factor

    def _picked(self, classes: slice) -> list[tuple[Tensor, Tensor]]:
        """:attr:`picked`, with columns of a tile in place of classes, and 0 at other classes."""
        found = []
        for index, each in self.picked:
            column, elsewhere = self._operands.columns(index, classes)
            found.append((column, each if elsewhere is None else each.masked_fill(elsewhere, 0)))
        return found

    def overwrite(self, spec: Reductions, g: Tensor, logits: Tensor, classes: slice) -> None:
        """Overwrites the logits of some classes with their gradient, from the gradient ``g`` of the
        transformed and scaled logits, which is overwritten too."""
        if self._operands.scale is not None:
            g.mul_(self._operands.scale[self._rows].unsqueeze(1))
        slope = expression.derivative(spec.transform)
        if not slope.is_number:
            each = self._operands.evaluate(slope, logits, self._rows, classes)
            g.mul_(each)
            if spec.masks_logits:  # also where the softmax of a row is nan
                g.masked_fill_(each == 0, 0)
        elif slope != 1:
            g.mul_(float(slope))
        if g is not logits:
            logits.copy_(g)
        if self._zero_rows is not None:
            logits.masked_fill_(self._zero_rows, 0)


def transformed(
    operands: Operands, spec: Reductions, rows: slice, logits: Tensor, classes: slice
) -> Tensor:
    """The transformed logits of some classes, times the scale of their rows."""
    z = operands.evaluate(spec.transform, logits, rows, classes)
    return z if operands.scale is None else z * operands.scale[rows].unsqueeze(1)


def _polynomial(polynomial: Mapping[int, Tensor], x: Tensor) -> Tensor:
    """``[rows, 1]`` for a constant, else ``[rows, V]``, by Horner's scheme."""
    highest = max(polynomial)
    out = polynomial[highest]
    for b in range(highest - 1, -1, -1):
        out = out * x if b == highest - 1 else out.mul_(x)
        if b in polynomial:
            out.add_(polynomial[b])
    return out
