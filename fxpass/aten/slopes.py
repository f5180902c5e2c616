"""The gradient of rows of logits, from the incoming gradients of their reductions.

In: operands and incoming gradients. Out: the gradient of the transformed logits, which
:mod:`fxpass.aten.reductions` hands on to the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fxpass.spec.reduction_operands import Operands
from fxpass.spec.reductions import (
    LEAST_LOG,
    OF_PICKS,
    LogitSum,
    Moment,
    Output,
    Terms,
)


class Slope(Terms):
    """The gradient of some rows of transformed logits, for incoming gradients of their outputs.

    It is a sum of polynomials of the log-softmax, each multiplied by a power of the softmax and by
    weights, of values at picked classes, and of what is dense.

    Attributes:
        picked: class indices and values ``[rows, K]``.
        dense: ``[rows, V]``.
        weighted: the sums, and their incoming gradients.
    """

    def __init__(
        self,
        operands: Operands,
        few: slice,
        outputs: Iterable[Output],
        lines: Tensor,
        sums: Mapping[Moment, Tensor],
        z: Tensor,
    ) -> None:
        super().__init__()
        self.picked: list[tuple[Tensor, Tensor]] = []
        self.dense: list[Tensor] = []
        self.weighted: list[tuple[Moment | LogitSum, Tensor]] = []
        self._operands, self._few = operands, few
        row = 0
        for output in outputs:
            count = operands.classes().shape[1] if output in OF_PICKS else 1
            line, row = lines[row : row + count], row + count
            self._add_output(output, line if output in OF_PICKS else line[0], sums, z)

    def _add_output(
        self, output: Output, line: Tensor, sums: Mapping[Moment, Tensor], z: Tensor
    ) -> None:
        """Adds one output; ``line`` is ``[rows]``, or ``[K, rows]`` for picked classes."""
        if isinstance(output, Moment | LogitSum):
            self.weighted.append((output, line))
        if isinstance(output, Moment):
            self.add_moment(output, line, sums)
        elif isinstance(output, LogitSum):
            self.add(0, 0, output.weight, line)
        elif output in OF_PICKS:
            self.picked.append((self._operands.classes()[self._few], line.t()))
            if output == "pick":
                self.add(1, 0, None, -line.sum(0))
        elif output == "amax":  # equal maxima share the gradient
            highest = z == z.amax(1, keepdim=True)
            self.dense.append(highest * (line / highest.sum(1)).unsqueeze(1))
        else:
            if output != "lse":
                self.picked.append((z.argmax(1, keepdim=True), line.unsqueeze(1)))
            if output != "max":
                self.add(1, 0, None, line if output == "lse" else -line)

    def of(self, log: Tensor, scaled: bool) -> tuple[Tensor, Tensor]:
        """The gradient, from the log-softmax ``[rows, V]``, which is overwritten; and the factor
        ``[rows]`` by which it has still to be multiplied, which is 1 if ``scaled``."""
        powers = {key: set(polynomial) for key, polynomial in self.coefficients.items()}
        if powers == {(1, None): {0}} and not self.dense:
            return self.of_softmax(log.exp_(), torch.ones_like(log[:, 0]), scaled)
        log.clamp_(min=LEAST_LOG)
        softmax = log.exp()
        g = None
        for (a, weight), polynomial in self.coefficients.items():
            term = _polynomial(polynomial, log)
            for _ in range(a):
                term = softmax * term if term.shape[1] == 1 else term.mul_(softmax)
            if weight is not None:
                w = self._operands.values(weight, self._few)
                term = w * term if term.shape[1] == 1 else term.mul_(w)
            if g is None:
                g = term if term.shape == log.shape else term.expand_as(log).clone()
            else:
                g += term
        g = torch.zeros_like(log) if g is None else g
        for some in self.dense:
            g += some
        for index, each in self.picked:
            g.scatter_add_(1, index, each)
        return g, torch.ones_like(log[:, 0])

    def of_softmax(self, e: Tensor, total: Tensor, scaled: bool) -> tuple[Tensor, Tensor]:
        """As :meth:`of`, from the softmax ``e / total``, where its first power is all that is left
        besides picked classes."""
        share = self.coefficients[1, None][0]
        alone = [((each != 0).any(1) & (share == 0)).any() for _, each in self.picked]
        # of a row without softmax, only the picked classes have a gradient
        if scaled or self._operands.scale is not None or any(alone):
            e.mul_((share / total).unsqueeze(1))
            share, total = torch.ones_like(share), torch.ones_like(share)
        for index, each in self.picked:
            factor = (total / share).masked_fill(share == 0, 0)
            e.scatter_add_(1, index, each * factor.unsqueeze(1))
        return e, share / total


def _polynomial(polynomial: Mapping[int, Tensor], x: Tensor) -> Tensor:
    """``[rows, 1]`` for a constant, else ``[rows, V]``, by Horner's scheme."""
    highest = max(polynomial)
    out = polynomial[highest].unsqueeze(1)
    for b in range(highest - 1, -1, -1):
        out = out * x if b == highest - 1 else out.mul_(x)
        if b in polynomial:
            out.add_(polynomial[b].unsqueeze(1))
    return out
