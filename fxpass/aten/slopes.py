"""The gradient of tiles of logits, from the incoming gradients of their rows' reductions.

In: operands and incoming gradients. Out: the gradient of the transformed logits, and of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpass.aten.exponential import exponential
from fxpass.aten.gemm import part_of
from fxpass.aten.row_sums import is_dense
from fxpass.formula import expression
from fxpass.formula.operands import Operands
from fxpass.formula.outputs import LEAST_LOG, OF_PICKS, Output, lines_of, of_one_softmax
from fxpass.formula.reductions import Reductions
from fxpass.formula.terms import Terms

# Times a factor that products with x may make a denormal number, this is 0 in f32.
_SMALL = 2.0**-49


class Slope(Terms):
    """The gradient of some rows of transformed logits, for incoming gradients of their outputs: the
    sum of these terms, and of values at ``picked`` classes ``[rows, K]``. A number of each row is a
    column ``[rows, 1]``.

    Args:
        operands: of the call.
        few: the rows.
        outputs: those that have an incoming gradient.
        incoming: the incoming gradients, a column each, K for picks ``[N, K]``.
        sums: those of :func:`fxpass.formula.reductions.for_slopes`.
        dense: whether all incoming gradients are known to differ from 0.

    Attributes:
        reads_log: whether the log-softmax is read.
    """

    def __init__(
        self,
        operands: Operands,
        few: slice,
        outputs: Sequence[Output],
        incoming: Tensor,
        sums: Mapping[Any, Tensor],
        dense: bool = False,
    ) -> None:
        super().__init__()
        self.picked: list[tuple[Tensor, Tensor]] = []
        self._operands = operands
        self._few = few
        column = 0
        for output in outputs:
            count = lines_of(output, operands.many)
            of_output = part_of(incoming, slice(column, column + count), 1)
            if output in OF_PICKS:
                index = part_of(operands.classes(), few)
                self.picked.append((index, of_output))
            grad = of_output if count == 1 else of_output.sum(1, True)
            self.add_output(output, grad, sums)
            column += count
        self.reads_log = bool(self.coefficients)
        self._of_one_softmax = of_one_softmax(outputs)
        # a row without an incoming gradient has none, whatever its logits are: 0 * nan is nan
        self._without = None
        if not dense:
            counts = incoming.any(1, True)
            if not is_dense(counts):
                self._without = ~counts

    def of(
        self, y: Tensor, log_total: Tensor, classes: slice, scaled: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of some classes, where ``y - log_total`` is the log-softmax; and the factor
        by which it has still to be multiplied, which is None or 1 if ``scaled``. It
        overwrites y, if :attr:`reads_log`."""
        if self._of_one_softmax:
            return self.of_softmax(exponential(y, out=y), log_total.exp(), classes, scaled)
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
                w = self._operands.values(weight, self._few, classes)
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

    def of_softmax(
        self, e: Tensor, total: Tensor, classes: slice, scaled: bool
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`of`, from the softmax ``e / total``, where its first power is all there is."""
        factor = self.coefficients[1, None][0] / total
        # of a row without softmax, as where several gradients cancel, only picked classes have one
        small = self._without is not None or not is_dense(factor * _SMALL)
        if scaled or self._operands.scale is not None or small:
            e.mul_(factor)
            factor = torch.ones_like(factor)
        for index, each in self._picked(classes):
            e.scatter_add_(1, index, each / factor)
        return e, factor

    def _picked(self, classes: slice) -> list[tuple[Tensor, Tensor]]:
        """:attr:`picked`, in a tile of some classes."""
        found = []
        for index, each in self.picked:
            column, elsewhere = self._operands.columns(index, classes)
            found.append((column, each if elsewhere is None else each.masked_fill(elsewhere, 0)))
        return found

    def to_logits(self, spec: Reductions, g: Tensor, logits: Tensor, classes: slice) -> None:
        """Overwrites the logits of some classes with their gradient; ``g``, which is overwritten
        too, is that of the transformed and scaled ones."""
        if self._operands.scale is not None:
            g.mul_(self._operands.scale[self._few].unsqueeze(1))
        slope = expression.derivative(spec.transform)
        if not slope.is_number:
            each = self._operands.evaluate(slope, logits, self._few, classes)
            g.mul_(each)
            if spec.masks:  # also where the softmax of a row is nan
                g.masked_fill_(each == 0, 0)
        elif slope != 1:
            g.mul_(float(slope))
        if g is not logits:
            logits.copy_(g)
        if self._without is not None:
            logits.masked_fill_(self._without, 0)


def transformed(
    operands: Operands, spec: Reductions, few: slice, logits: Tensor, classes: slice
) -> Tensor:
    """The transformed logits of some classes, times the scale of their row."""
    z = operands.evaluate(spec.transform, logits, few, classes)
    return z if operands.scale is None else z * operands.scale[few].unsqueeze(1)


def _polynomial(polynomial: Mapping[int, Tensor], x: Tensor) -> Tensor:
    """``[rows, 1]`` for a constant, else ``[rows, V]``, by Horner's scheme."""
    highest = max(polynomial)
    out = polynomial[highest]
    for b in range(highest - 1, -1, -1):
        out = out * x if b == highest - 1 else out.mul_(x)
        if b in polynomial:
            out.add_(polynomial[b])
    return out
