"""The reductions of some rows of logits, from tiles of their classes.

In: tiles of transformed logits ``[rows, classes]``. Out: the outputs of these rows. The raw sums of
:mod:`fxpass.spec.reductions` are accumulated under the largest logit so far; a tile with a larger
one changes those before it. Logits that all are in one tile need no change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fxpass.aten.gemm import joined, part_of
from fxpass.spec.operands import Operands, Outputs
from fxpass.spec.reductions import (
    LEAST_LOG,
    OF_PICKS,
    TOTAL,
    LogitSum,
    Moment,
    Output,
    Reductions,
    normalised,
    raw,
    shifted,
)


class RowSums:
    """What is known of some rows from the tiles so far. :meth:`write` sets ``log_total``, the
    logarithm of ``total``, and the normalised ``moments``, ``[rows]`` each."""

    def __init__(self, operands: Operands, spec: Reductions, few: slice) -> None:
        self._operands, self._spec, self._few = operands, spec, few
        self._read = (*spec.outputs, *spec.total)
        self._raw = raw(self._read)
        self._picks = not set(OF_PICKS).isdisjoint(self._read)
        # of the tiles so far, [rows] each: the largest logit and its class, the logits at the
        # picks [rows, K], sums of logits, and the raw sums under the clamped largest logit
        self._highest: Tensor | None = None
        self._clamped: Tensor
        self._index: Tensor | None = None
        self._at: Tensor | None = None
        self._of_logits: dict[LogitSum, Tensor] = {}
        self._sums: dict[Moment, Tensor] = {}
        self.log_total: Tensor
        self.moments: dict[Moment, Tensor] = {}
        self.only_total = self._raw == (TOTAL,)  # no other sum is read

    @property
    def total(self) -> Tensor:
        """The sum of the exponentials of :meth:`add`."""
        return self._sums[TOTAL]

    def add(self, z: Tensor, classes: slice, keep: bool = False) -> Tensor:
        """Adds the transformed logits ``z`` of some classes, each class once and in order.

        Returns:
            the memory of z, with its differences y to the largest logit so far (the lowest finite
            number if that is -inf); they are at least ``LEAST_LOG`` where moments are summed. With
            the exponentials of y if :attr:`only_total` and not ``keep``.
        """
        before = self._highest
        if self._spec.indices:
            highest, index = z.max(1)
            if self._index is not None and before is not None:  # the first of equal logits counts
                later = (highest > before) | (highest.isnan() & ~before.isnan())
                index = torch.where(later, index + classes.start, self._index)
            self._index = index
        else:
            highest = z.amax(1)
        self._highest = highest if before is None else torch.maximum(highest, before)
        self._add_logits(z, classes)
        # clamped: if every logit is -inf, -inf - -inf would make the lse nan
        m = finite(self._highest)
        y = z.sub_(m.unsqueeze(1))
        sums = self._raw_sums(y, classes, self.only_total and not keep)
        if before is not None:
            shift = self._clamped - m
            sums = {moment: s + under(moment, self._sums, shift) for moment, s in sums.items()}
        self._sums, self._clamped = sums, m
        return y

    def _add_logits(self, z: Tensor, classes: slice) -> None:
        """What reads logits and not their differences."""
        for output in dict.fromkeys(self._read):
            if isinstance(output, LogitSum):
                line = self._weighted(z, output, classes)
                before = self._of_logits.get(output)
                self._of_logits[output] = line if before is None else before + line
        if self._picks:
            index = part_of(self._operands.classes(), self._few)
            column, elsewhere = self._operands.columns(index, classes)
            at = z.gather(1, column)
            # each pick is in one of the tiles
            if self._at is not None and elsewhere is not None:
                at = torch.where(elsewhere, self._at, at)
            self._at = at

    def _raw_sums(self, y: Tensor, classes: slice, in_place: bool) -> dict[Moment, Tensor]:
        """The raw sums ``[rows]`` of y ``[rows, classes]``, which is overwritten, unless
        ``in_place`` at most by its clamped value. One exponential serves all powers of y."""
        found: dict[Moment, Tensor] = {}
        for a in sorted({moment.a for moment in self._raw}):
            some = [moment for moment in self._raw if moment.a == a]
            term = y
            if a:
                term = y.exp_() if in_place else (a * y if a > 1 else y).exp()
            for b in range(max(moment.b for moment in some) + 1):
                if not a:  # no exponential vanishes: an infinite y counts
                    term = y**b if b else y.new_ones(()).expand_as(y)
                elif b:
                    y.clamp_(min=LEAST_LOG)  # 0 * -inf would be nan
                    term.mul_(y)
                for moment in some:
                    if moment.b == b:
                        found[moment] = self._weighted(term, moment, classes)
        return {moment: found[moment] for moment in self._raw}

    def _weighted(self, term: Tensor, output: Moment | LogitSum, classes: slice) -> Tensor:
        """The sum over the classes of ``w * term``."""
        if output.weight is None:
            return term.sum(1)
        w = self._operands.values(output.weight, self._few, classes)
        return term.mv(w) if w.dim() == 1 else (w * term).sum(1)

    def write(self, out: Outputs) -> None:
        """Writes the rows of ``out``, when all classes were added; of a total no lse and rest."""
        few, spec = self._few, self._spec
        self.log_total = self.total.log()
        self.moments = {
            moment: normalised(moment, self._sums, self.log_total, torch.exp)
            for moment in self._raw
            if moment != TOTAL or TOTAL in self._read  # every call sums it, and few read it
        }
        for rows, outputs in ((out.rows, spec.rows), (out.saved, spec.saved)):
            if outputs:
                rows[:, few] = self._lines(outputs)
        if self._index is not None:
            out.indices[:, few] = self._index
        if not spec.total:
            out.lse[few], out.rest[few] = self.lse_and_rest()
        elif (coef := self._operands.coef) is not None:
            coef = part_of(coef, few, 1)
            # a row without a coefficient adds this 0, whatever its value is
            terms = torch.where(coef.bool(), coef * self._lines(spec.total), coef)
            torch.sum(terms, 0, out=part_of(out.total, few))

    def lse_and_rest(self) -> tuple[Tensor, Tensor]:
        """The log-sum-exp ``[rows]`` and its rounding error, after :meth:`write`."""
        m, log_total = self._clamped, self.log_total
        lse = m + log_total
        return lse, torch.where(lse.isfinite(), log_total - (lse - m), 0)

    def _lines(self, outputs: Iterable[Output]) -> Tensor:
        return joined([self._line(output) for output in outputs])

    def _line(self, output: Output) -> Tensor:
        """One output, ``[1, rows]``, or ``[K, rows]`` for picks."""
        m, log_total = self._clamped, self.log_total
        if output in OF_PICKS:
            assert self._at is not None, "the call has picks"
            at = self._at.t()
            return at if output == "at" else at - m - log_total
        if not isinstance(output, str):
            line = self.moments[output] if isinstance(output, Moment) else self._of_logits[output]
        elif output == "lse":
            line = m + log_total
        else:
            assert self._highest is not None, "there is at least one class"
            # highest - m is 0, or nan if every logit is -inf
            line = self._highest - m - log_total if output == "peak" else self._highest
        return line.unsqueeze(0)


def finite(highest: Tensor) -> Tensor:
    """Largest logits, the lowest finite number for -inf."""
    return highest.clamp(min=torch.finfo(highest.dtype).min)


def under(moment: Moment, sums: Mapping[Moment, Tensor], shift: Tensor) -> Tensor:
    """The raw sum under a new maximum, where ``shift`` is the old one minus the new one."""
    line = sums[moment]
    if not moment.a and not moment.b:
        return line
    # where the exponentials vanish, so does the sum: infinity * 0 would be nan
    shift = shift.clamp(min=LEAST_LOG) if moment.a else shift
    # an infinite sum remains: 0 * -inf would be nan
    return torch.where(line.isinf(), line, shifted(moment, sums, shift, torch.exp))
