"""The tensors that one call of class reductions reads and returns.

In: the operands of a call. Out: records, and uninitialised outputs of the right shapes::

    >>> x, weight = torch.ones(4, 8), torch.ones(9, 8)
    >>> operands = Operands(x, weight, None, None, torch.zeros(4, 2, dtype=torch.int64), ())
    >>> empty_outputs(operands, Reductions(("lse", "pick"))).rows.shape  # two picks
    torch.Size([3, 4])
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sympy import Expr
from torch import Tensor

from fxpass.formula import expression
from fxpass.formula.dtypes import compute_dtype
from fxpass.formula.outputs import line_count
from fxpass.formula.reductions import Reductions


class Operands(NamedTuple):
    """The tensors of one call.

    Attributes:
        x: ``[N, D]``.
        weight: ``[V, D]``, dtype of x.
        bias: ``[V]`` in the dtype of x or in the compute dtype, or None.
        scale: ``[N]``, a factor of each row's transformed logits in the compute dtype, or None.
        picks: class indices ``[N]`` or ``[N, K]`` int64, or None.
        given: weights of moments and operands of the transform, ``[V]`` or ``[N, V]``.
        coef: ``[T, N]`` in the compute dtype, the weights of the total's outputs in their order, K
            rows for a pick of K classes; None without a total.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    picks: Tensor | None
    given: tuple[Tensor, ...]
    coef: Tensor | None = None

    def picked_classes(self) -> Tensor:
        """The class indices as ``[N, K]``."""
        assert self.picks is not None
        return self.picks if self.picks.dim() == 2 else self.picks.unsqueeze(1)

    @property
    def pick_count(self) -> int:
        """The number of picks of a row."""
        if self.picks is None:
            return 0
        return 1 if self.picks.dim() == 1 else self.picks.shape[1]

    def given_tile(self, position: int, rows: slice, classes: slice) -> Tensor:
        """One of ``given`` in a tile of logits, ``[classes]`` or ``[rows, classes]``, in the
        compute dtype."""
        w = self.given[position]
        w = w[classes] if w.dim() == 1 else w[rows, classes]
        return w.to(compute_dtype(self.x.dtype))

    def evaluate(self, expr: Expr, z: Tensor, rows: slice, classes: slice) -> Tensor:
        """An expression in a tile of logits ``z`` ``[rows, classes]``, which is not written to, as
        :func:`fxpass.formula.expression.evaluate`."""
        read = expression.given_in(expr)
        values = {f"given{i}": self.given_tile(i, rows, classes) for i in read}
        return expression.evaluate(expr, z, values)

    def columns(self, index: Tensor, classes: slice) -> tuple[Tensor, Tensor | None]:
        """The columns of class indices in a tile of logits, and a mask of the indices outside the
        tile, whose columns mean nothing; None if all indices are inside."""
        if classes.stop - classes.start == self.weight.shape[0]:
            return index, None
        column = index - classes.start if classes.start else index
        inside = column.clamp(0, classes.stop - classes.start - 1)
        return inside, inside != column


class Outputs(NamedTuple):
    """The outputs of all rows; outputs that the spec does not have are of size 0.

    Attributes:
        rows: ``[R, N]`` in the compute dtype, in the order of ``spec.rows``; K rows for a ``pick``
            of K classes.
        indices: ``[I, N]`` int64.
        lse, rest: ``[N]``, the log-sum-exp and its rounding error.
        saved: ``[S, N]``, the sums of ``spec.saved``.
    """

    rows: Tensor
    indices: Tensor
    lse: Tensor
    rest: Tensor
    saved: Tensor


def empty_outputs(operands: Operands, spec: Reductions) -> Outputs:
    """Uninitialised outputs; the operands may be fake tensors."""
    n = operands.x.shape[0]
    dtype = compute_dtype(operands.x.dtype)
    new = operands.x.new_empty
    found = dict.fromkeys(Outputs._fields, new((0, 0), dtype=dtype))
    if spec.returns_lse:
        found |= {name: new(n, dtype=dtype) for name in ("lse", "rest")}
    for name, outputs in ("rows", spec.rows), ("indices", spec.indices), ("saved", spec.saved):
        if outputs:
            lines = sum(line_count(output, operands.pick_count) for output in outputs)
            found[name] = new((lines, n), dtype=torch.int64 if name == "indices" else dtype)
    return Outputs(**found)
