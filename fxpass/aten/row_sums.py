"""The reductions of some rows of logits, from tiles of their classes.

In: tiles of transformed logits ``[rows, classes]``. Out: the outputs of these rows. The raw sums of
:mod:`fxpass.formula.reductions` are accumulated under the largest logit so far; a larger logit
changes the sums of the tiles before. Numbers of rows are columns ``[rows, 1]``: beside a tile they
need no view.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fxpass.aten.exponential import exponential
from fxpass.aten.gemm import joined, slice_of
from fxpass.aten.largest import larger, largest
from fxpass.formula.operands import Operands, Outputs
from fxpass.formula.outputs import INDICES, LEAST_LOG, OF_PICKS, TOTAL, Moment, Output
from fxpass.formula.reductions import Reductions, normalised, shifted

LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64)}
# In the place of outputs that a call does not have.
ABSENT = torch.empty(0, device="cpu")


class RowSums:
    """The sums of some rows from the tiles so far. :meth:`finish` sets ``log_total``, the
    logarithm of ``total``, 0 without a softmax, and the normalised ``moments``.

    Attributes:
        exponentials: True if :meth:`add` can return exponentials.
        coef: the weights ``[rows, T]`` of the total, if there is one.
        dense: True if it is known that no weight is 0, see :func:`is_dense`.
    """

    def __init__(self, operands: Operands, spec: Reductions, rows: slice) -> None:
        self._operands = operands
        self._spec = spec
        self._rows = rows
        self._raw = spec.raw_moments
        # of the tiles so far: the largest logit and its class, the logits at the picks [rows, K],
        # and the raw sums under the clamped largest logit
        self._highest: Tensor | None = None
        self._clamped: Tensor
        self._index: Tensor | None = None
        self._at: Tensor | None = None
        self._sums: dict[Moment, Tensor] = {}
        self.log_total: Tensor
        self.moments: dict[Moment, Tensor] = {}
        # no sum overwrites the exponentials with another power
        self.exponentials = bool(self._raw) and all(m.a == 1 and m.b <= 1 for m in self._raw)
        self.coef = None if operands.coef is None else slice_of(operands.coef, rows, 1).t()
        self.dense = is_dense(self.coef)

    @property
    def total(self) -> Tensor:
        """The sum of the exponentials that :meth:`add` returns."""
        return self._sums[TOTAL]

    def add(self, z: Tensor, classes: slice, differences: bool = False) -> Tensor:
        """Adds the transformed logits ``z`` of some classes, each class once and in order.

        Returns:
            the memory of z, with the differences y to the largest logit so far (to the lowest
            finite number if that logit is -inf), at least ``LEAST_LOG`` where moments are summed;
            with the exponentials of y if :attr:`exponentials` and not ``differences``; with z if no
            output reads the softmax.
        """
        before = self._highest
        if "argmax" in self._spec.outputs:
            found = largest(z)
            if self._index is not None and before is not None:
                found = larger(before, self._index, *found, classes.start)
            self._highest, self._index = found
        elif self._raw:
            highest = z.amax(1, True)
            self._highest = highest if before is None else torch.maximum(highest, before)
        if self._spec.reads_picks:
            self._add_picks(z, classes)
        if not self._raw:
            self.log_total = z.new_zeros((z.shape[0], 1))
            return z
        assert self._highest is not None
        # clamped: if every logit is -inf, -inf - -inf would make the lse nan
        m = finite_maximum(self._highest)
        y = z.sub_(m)
        sums = self._raw_sums(y, classes, self.exponentials and not differences)
        if before is not None:
            shift = self._clamped - m
            sums = {
                moment: s + under_maximum(moment, self._sums, shift) for moment, s in sums.items()
            }
        self._sums = sums
        self._clamped = m
        return y

    def _add_picks(self, z: Tensor, classes: slice) -> None:
        """Adds the logits at the picks that are in a tile."""
        index = slice_of(self._operands.picked_classes(), self._rows)
        column, elsewhere = self._operands.columns(index, classes)
        at = z.gather(1, column)
        if elsewhere is not None:
            # each pick is in one of the tiles
            at = torch.where(elsewhere, 0 if self._at is None else self._at, at)
        self._at = at

    def _raw_sums(self, y: Tensor, classes: slice, in_place: bool) -> dict[Moment, Tensor]:
        """The raw sums of y ``[rows, classes]``. The exponentials overwrite y if ``in_place``, else
        only its clamped values may. One exponential serves all powers of y."""
        found: dict[Moment, Tensor] = {}
        for a in sorted({moment.a for moment in self._raw}):
            moments = [moment for moment in self._raw if moment.a == a]
            powers = range(max(moment.b for moment in moments) + 1)
            term = y
            if a:
                if len(powers) > 1:  # 0 * -inf would be nan
                    y = torch.clamp(y, min=LEAST_LOG, out=None if in_place else y)
                term = exponential(term, a, out=term if in_place else None)
            for b in powers:
                if not a:  # no exponential makes it 0: an infinite y counts
                    term = y**b if b else y.new_ones(()).expand_as(y)
                elif b:
                    term = torch.mul(term, y, out=y if in_place else term)
                for moment in moments:
                    if moment.b == b:
                        found[moment] = self._weighted(term, moment, classes)
        return {moment: found[moment] for moment in self._raw}

    def _weighted(self, term: Tensor, output: Moment, classes: slice) -> Tensor:
        """The sum over the classes of ``w * term``."""
        if output.weight is None:
            return term.sum(1, True)
        w = self._operands.given_tile(output.weight, self._rows, classes)
        return term.mv(w).unsqueeze(1) if w.dim() == 1 else (w * term).sum(1, True)

    def finish(self) -> Outputs:
        """The outputs, after all classes were added."""
        spec = self._spec
        if self._raw:
            self.log_total = self.total.log()
        self.moments = {
            moment: normalised(moment, self._sums, self.log_total, self.total.reciprocal())
            for moment in self._raw
            if moment != TOTAL  # it is 1
        }
        rows, indices, saved = (
            self._columns(outputs).t().contiguous() if outputs else ABSENT
            for outputs in (spec.rows, spec.indices, spec.saved)
        )
        if spec.saved and spec.saved == spec.rows:
            saved = rows.clone()  # each result has memory of its own
        lse = rest = ABSENT
        if spec.returns_lse:
            lse, rest = (column.view(-1) for column in self.lse_and_rest())
        return Outputs(rows, indices, lse, rest, saved)

    def lse_and_rest(self) -> tuple[Tensor, Tensor]:
        """The log-sum-exp and its rounding error; to be called after :meth:`finish`."""
        m = self._clamped
        log_total = self.log_total
        lse = m + log_total
        return lse, torch.where(lse.isfinite(), log_total - (lse - m), 0)

    def _columns(self, outputs: Iterable[Output]) -> Tensor:
        return joined([self._column(output) for output in outputs], 1)

    def _column(self, output: Output) -> Tensor:
        """One output, ``[rows, 1]``, or ``[rows, K]`` for picks."""
        if isinstance(output, Moment):
            return self.moments[output]
        if output in OF_PICKS:
            assert self._at is not None, "the call has picks"
            return self._at if output == "at" else self._at - self._clamped - self.log_total
        if output in INDICES:
            assert self._index is not None
            return self._index
        if output == "lse":
            return self._clamped + self.log_total
        assert self._highest is not None, "there is at least one class"
        return self._highest


def is_dense(coef: Tensor | None) -> bool:
    """Tells if no element is 0. On a GPU always False: an answer would have to wait for the GPU."""
    return coef is not None and not coef.is_cuda and int(coef.count_nonzero()) == coef.numel()


def finite_maximum(highest: Tensor) -> Tensor:
    """The largest logits, with the lowest finite number in place of -inf."""
    return highest.clamp_min(LOWEST[highest.dtype])


def under_maximum(moment: Moment, sums: Mapping[Moment, Tensor], shift: Tensor) -> Tensor:
    """The raw sum under a new maximum, where ``shift`` is the old maximum minus the new one."""
    old = sums[moment]
    if not moment.a and not moment.b:
        return old
    # where the exponentials vanish, so does the sum: infinity * 0 would be nan
    shift = shift.clamp(min=LEAST_LOG) if moment.a else shift
    # an infinite sum remains: 0 * -inf would be nan
    return torch.where(old.isinf(), old, shifted(moment, sums, shift, shift.exp()))
