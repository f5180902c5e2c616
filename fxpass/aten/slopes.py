"""The gradient of tiles of logits, from the incoming gradients of their rows' reductions.

In: operands and incoming gradients. Out: the gradient of the transformed logits, and of the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from sympy import Expr
from torch import Tensor

from fxpass.aten.exponential import exponential
from fxpass.aten.gemm import part_of
from fxpass.aten.row_sums import is_dense
from fxpass.spec import expression
from fxpass.spec.operands import Operands
from fxpass.spec.outputs import LEAST_LOG, OF_PICKS, Moment, Output, lines_of, of_one_softmax
from fxpass.spec.reductions import Reductions
from fxpass.spec.terms import Terms

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
        sums: those of :func:`fxpass.spec.reductions.for_slopes`.
        z: the transformed logits of all classes, read for max.
        dense: whether all incoming gradients are known to differ from 0.

    Attributes:
        weighted: the moments with weights, and their incoming gradients.
        reads_log: whether the log-softmax is read.
    """

    def __init__(
        self,
        operands: Operands,
        few: slice,
        outputs: Sequence[Output],
        incoming: Tensor,
        sums: Mapping[Any, Tensor],
        z: Tensor | None = None,
        dense: bool = False,
    ) -> None:
        super().__init__()
        self.picked: list[tuple[Tensor, Tensor]] = []
        self.weighted: list[tuple[Moment, Tensor]] = []
        self._operands, self._few = operands, few
        column = 0
        for output in outputs:
            count = lines_of(output, operands.many)
            of_output = part_of(incoming, slice(column, column + count), 1)
            self._add_output(output, of_output, sums, z)
            column += count
        self.reads_log = bool(self.coefficients or self.weighted)
        self._of_one_softmax = of_one_softmax(outputs)
        # a row without an incoming gradient has none, whatever its logits are: 0 * nan is nan
        self._without = None
        if not dense:
            counts = incoming.any(1, True)
            if not is_dense(counts):
                self._without = ~counts

    def _add_output(
        self, output: Output, each: Tensor, sums: Mapping[Any, Tensor], z: Tensor | None
    ) -> None:
        """Adds one output; ``each`` is ``[rows, K]``, K = 1 but for picks."""
        grad = each if each.shape[1] == 1 else each.sum(1, True)
        if isinstance(output, Moment):
            if output.weight is not None:
                self.weighted.append((output, grad))
        elif output in OF_PICKS:
            self.picked.append((part_of(self._operands.classes(), self._few), each))
        elif output == "max":
            assert z is not None, "the largest of all classes"
            self.picked.append((z.argmax(1, True), each))
        self.add_output(output, grad, sums)

    def of(
        self,
        y: Tensor,
        log_total: Tensor,
        classes: slice,
        scaled: bool,
        of_given: Mapping[int, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of some classes, where ``y - log_total`` is the log-softmax; and the factor
        by which it has still to be multiplied, which is None or 1 if ``scaled``. It
        overwrites y, if :attr:`reads_log`.

        ``of_given``: gradients of given values by position, to which those of moments are added."""
        if self._of_one_softmax and not of_given:
            return self.of_softmax(exponential(y, out=y), log_total.exp(), classes, scaled)
        log, g = y, None
        if self.reads_log:
            log = y.sub_(log_total)
            self._add_of_moments(of_given or {}, log, classes)
            log.clamp_(min=LEAST_LOG)
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

    def _add_of_moments(self, grads: Mapping[int, Tensor], log: Tensor, classes: slice) -> None:
        """Adds the gradients of the weights of moments."""
        for moment, each in self.weighted:
            if (grad := grads.get(cast(int, moment.weight))) is not None:
                self._add_of_values(grad, moment.term(log).mul_(each), classes)

    def _add_of_values(self, grad: Tensor, term: Tensor, classes: slice) -> None:
        """Adds the gradient of given values, ``[V]`` or ``[N, V]``, of some classes; overwrites
        ``term``."""
        if self._without is not None:
            term.masked_fill_(self._without, 0)
        if grad.dim() == 1:
            grad[classes] += term.sum(0)
        else:
            grad[self._few, classes] += term

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

    def to_logits(
        self,
        spec: Reductions,
        g: Tensor,
        logits: Tensor,
        classes: slice,
        given: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Overwrites the logits of some classes with their gradient; ``g``, which is overwritten
        too, is that of the transformed and scaled ones. ``given``: gradients of given values that
        the transform reads, by position, to which those of these classes are added."""
        if self._operands.scale is not None:
            g.mul_(self._operands.scale[self._few].unsqueeze(1))

        def times(g: Tensor, slope: Expr) -> Tensor:
            """``g`` times a slope at each of the linear's outputs, in place."""
            if slope == 1:
                return g
            if slope.is_number:
                return g.mul_(float(slope))
            each = self._operands.evaluate(slope, logits, self._few, classes)
            # also where the softmax of a row is nan
            return g.mul_(each).masked_fill_(each == 0, 0) if spec.masks else g.mul_(each)

        for position, grad in (given or {}).items():
            slope = expression.derivative(spec.transform, expression.given(position))
            self._add_of_values(grad, times(g.clone(), slope), classes)
        times(g, expression.derivative(spec.transform))
        if g is not logits:
            logits.copy_(g)
        if self._without is not None:
            logits.masked_fill_(self._without, 0)


def transformed(
    operands: Operands, spec: Reductions, few: slice, logits: Tensor, classes: slice
) -> tuple[Tensor, Tensor]:
    """The transformed logits of some classes, without the scale of their row and with it."""
    z = operands.evaluate(spec.transform, logits, few, classes)
    return z, z if operands.scale is None else z * operands.scale[few].unsqueeze(1)


def _polynomial(polynomial: Mapping[int, Tensor], x: Tensor) -> Tensor:
    """``[rows, 1]`` for a constant, else ``[rows, V]``, by Horner's scheme."""
    highest = max(polynomial)
    out = polynomial[highest]
    for b in range(highest - 1, -1, -1):
        out = out * x if b == highest - 1 else out.mul_(x)
        if b in polynomial:
            out.add_(polynomial[b])
    return out
