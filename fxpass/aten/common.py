"""The arithmetic of a tile of logits in ATen.

In: a tile of logits ``[rows, classes]``. Out: the sums for the loss, and the tile's gradient.
:mod:`fxpass.aten.chunked`, :mod:`fxpass.aten.tiled` and :mod:`fxpass.aten.in_place` loop over the
tiles.

With z the transformed logits, q the (weighted, smoothed) target distribution and Q = sum(q), the
loss of one row and its gradient are, for class indices and class probabilities alike,

    loss = Q * logsumexp(z) - sum(q * z)        d loss / dz = Q * softmax(z) - q
    lse  = logsumexp(z)                         d lse  / dz = softmax(z)

One pass computes the sum of both gradients: (row_scale * Q + lse_scale) * softmax(z) - row_scale *
q. Without a target, q is 0 and Q is 1, so the loss is the lse. An ignored row has loss 0 and
row_scale 0; its lse is computed as usual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fxpass.aten.gemm import slices
from fxpass.aten.slopes import through as to_logits
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.operands import Inputs, is_valid
from fxpass.spec.spec import ELSEWHERE, Spec

__all__ = ["slices", "to_logits"]  # moved: for the modules that use them from here

# ---------------------------------------------------------------- targets


class Target:
    """The target distributions q of all rows. This base class is for ``target=none``: q is 0, and
    Q is 1.

    Attributes:
        sums_to_one: whether Q is 1 in every row, but for its rounding.
        valid: ``[N]``, False for ignored rows; None if no row is ignored.
    """

    sums_to_one = True

    def __init__(self, inputs: Inputs, spec: Spec) -> None:
        self.classes = inputs.weight.shape[0]
        self.dtype = compute_dtype(inputs.x.dtype)
        self.smoothing = spec.label_smoothing
        self.all_classes = spec.shard_of or self.classes
        self.valid: Tensor | None = None
        self._like = inputs.x
        w = inputs.class_weight
        self.weight = None if w is None else w.to(self.dtype)

    def sums(self, z: Tensor, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        """The tile's part of sum(q * z) and of Q, ``[rows]`` each; z is ``[rows, classes]``."""
        del rows
        return torch.zeros_like(z[:, 0]), torch.full_like(z[:, 0], float(classes.start == 0))

    def mass(self, rows: slice, step: int) -> Tensor:
        """Q ``[rows]``; class probabilities are summed ``step`` classes at a time."""
        del step
        return self._like.new_ones(rows.stop - rows.start, dtype=self.dtype)

    def of_valid(self, values: Tensor, rows: slice) -> Tensor:
        """``values`` ``[rows]``, 0 for ignored rows, where they may be infinite."""
        return values if self.valid is None else torch.where(self.valid[rows], values, 0)

    def subtract_from(self, g: Tensor, scale: Tensor, rows: slice, classes: slice) -> None:
        """``g -= scale * q`` for one tile, in place; scale ``[rows]``."""


class _Indices(Target):
    """q = (1 - s) * w[t] * onehot(t) + s / V * w, with smoothing s and class weights w. In a
    vocabulary shard, V counts the classes of all shards, and t may be in another shard."""

    def __init__(self, inputs: Inputs, spec: Spec) -> None:
        super().__init__(inputs, spec)
        assert inputs.target is not None
        target = inputs.target.long()  # uint8 cannot hold -100
        if spec.ignore_index is not None:
            self.valid = is_valid(target, spec)
        here = self.valid
        if spec.shard_of:
            here = target != ELSEWHERE if here is None else here & (target != ELSEWHERE)
        self.picked = target if here is None else torch.where(here, target, 0)
        self.sharp = torch.full_like(target, 1 - self.smoothing, dtype=self.dtype)
        if self.weight is not None:
            self.sharp.mul_(self.weight[self.picked])
        if spec.shard_of and here is not None:
            self.sharp.masked_fill_(~here, 0)  # no product: a class weight may be inf
        self.smooth = self.smoothing / self.all_classes
        self.sums_to_one = self.weight is None and not spec.shard_of

    def _in_tile(self, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        """The target's column in the tile ``[rows, 1]``, and q's peak there ``[rows]``: 0 if the
        target is in another tile."""
        column, sharp = self.picked[rows] - classes.start, self.sharp[rows]
        width = classes.stop - classes.start
        if width != self.classes:
            inside = (column >= 0) & (column < width)
            column, sharp = torch.where(inside, column, 0), torch.where(inside, sharp, 0)
        return column.unsqueeze(1), sharp

    def sums(self, z: Tensor, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        column, mass = self._in_tile(rows, classes)
        dot = z.gather(1, column).squeeze(1)
        if not (self.sums_to_one and not self.smooth and z.shape[1] == self.classes):
            # where(), because the product may be 0 * -inf outside the target's tile
            dot = torch.where(mass == 0, 0, mass * dot)
        if self.smooth:
            w = self.weight
            dot = dot + self.smooth * (z.sum(1) if w is None else z.mv(w[classes]))
            mass = mass + self.smooth * (z.shape[1] if w is None else w[classes].sum())
        return dot, mass

    def mass(self, rows: slice, step: int) -> Tensor:
        if not self.smooth:
            return self.sharp[rows]
        total = self.classes if self.weight is None else self.weight.sum()
        return self.sharp[rows] + self.smooth * total

    def subtract_from(self, g: Tensor, scale: Tensor, rows: slice, classes: slice) -> None:
        column, sharp = self._in_tile(rows, classes)
        g.scatter_add_(1, column, (-scale * sharp).unsqueeze(1))
        if self.smooth:
            w = 1 if self.weight is None else self.weight[classes]
            g.sub_((self.smooth * scale).unsqueeze(1) * w)


class _Probabilities(Target):
    """q = w * ((1 - s) * p + s / V), with the given probabilities p, which may have any sum."""

    sums_to_one = False

    def __init__(self, inputs: Inputs, spec: Spec) -> None:
        super().__init__(inputs, spec)
        assert inputs.target is not None
        self.given = inputs.target

    def _q(self, rows: slice, classes: slice) -> Tensor:
        q = self.given[rows, classes].to(self.dtype) * (1 - self.smoothing)
        q += self.smoothing / self.all_classes
        if self.weight is not None:
            q *= self.weight[classes]
        return q

    def sums(self, z: Tensor, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        q = self._q(rows, classes)
        mass = q.sum(1)
        return q.mul_(z).sum(1), mass

    def mass(self, rows: slice, step: int) -> Tensor:
        total = self._like.new_zeros(rows.stop - rows.start, dtype=self.dtype)
        for classes in slices(0, self.classes, step):
            total += self._q(rows, classes).sum(1)
        return total

    def subtract_from(self, g: Tensor, scale: Tensor, rows: slice, classes: slice) -> None:
        g.addcmul_(self._q(rows, classes), scale.unsqueeze(1), value=-1)


_TARGETS = {"indices": _Indices, "probabilities": _Probabilities, "none": Target}


def target_of(inputs: Inputs, spec: Spec) -> Target:
    """The targets of all rows."""
    return _TARGETS[spec.target](inputs, spec)


# ---------------------------------------------------------------- losses


class Sums(NamedTuple):
    """The sums of each row over the classes so far, ``[rows]`` each."""

    highest: Tensor  # m = max(z)
    total: Tensor  # sum(exp(z - m))
    dot: Tensor  # sum(q * (z - m))
    mass: Tensor  # Q so far


def add_tile(sums: Sums | None, z: Tensor, target: Target, rows: slice, classes: slice) -> Sums:
    """The sums including one more tile; overwrites ``z`` ``[rows, classes]`` with ``exp(z - m)``.

    The maximum is subtracted before any sum, so huge logits lose no precision.
    """
    lowest = torch.finfo(z.dtype).min
    # clamped: if every logit is -inf, -inf - -inf would make the lse nan
    highest = z.amax(1).clamp_(min=lowest)
    if sums is not None:
        torch.maximum(highest, sums.highest, out=highest)
    z.sub_(highest.unsqueeze(1))
    dot, mass = target.sums(z, rows, classes)
    total = z.exp_().sum(1)
    if sums is None:
        return Sums(highest, total, dot, mass)
    # clamped: lowest - highest may overflow to -inf, and a mass of 0 times -inf is nan
    shift = (sums.highest - highest).clamp_(min=lowest)
    return Sums(
        highest,
        total.add_(shift.exp().mul_(sums.total)),
        dot + sums.dot + sums.mass * shift,
        mass + sums.mass,
    )


def of_all(sums: Sums, spec: Spec) -> Sums:
    """The sums after the last tile. All logits of a shard may be -inf (padding of the vocabulary,
    say); its lse is then the lowest finite number instead of -inf, which would lead to nan."""
    if not spec.shard_of:
        return sums
    return sums._replace(total=torch.where(sums.total == 0, 1, sums.total))


def rest_of(lse: Tensor, sums: Sums) -> Tensor:
    """The rounding error of ``lse`` ``[rows]``. If z is large, every softmax computed from the
    rounded lse would have this relative error."""
    rest = sums.total.log() - (lse - sums.highest)
    return torch.where(lse.isfinite(), rest, 0)


def losses(sums: Sums, target: Target, rows: slice, spec: Spec) -> tuple[Tensor, Tensor]:
    """loss and lse ``[rows]``, from the sums over all classes."""
    log_total = sums.total.log()
    lse = sums.highest + log_total
    if spec.target == "none":
        return lse, lse
    return target.of_valid(sums.mass * log_total - sums.dot, rows), lse


# ---------------------------------------------------------------- gradients


def coefficients(
    inputs: Inputs, target: Target, mass: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    """The factors of q and of the softmax in the gradient, ``[rows]`` each; mass is Q."""
    if inputs.row_scale is None:
        scale = torch.ones_like(mass)
    else:
        scale = inputs.row_scale[rows].to(mass.dtype)
    scale = target.of_valid(scale, rows)
    share = scale * mass
    if inputs.lse_scale is not None:
        share += inputs.lse_scale[rows].to(mass.dtype)
    return scale, share
