"""The fused loss in ATen: what goes in, what comes out, and the arithmetic of a tile of logits.

In: a tile of logits ``[rows, classes]``. Out: the sums that losses are made of, and the tile's
gradient. :mod:`fxpass.aten.chunked` and :mod:`fxpass.aten.tiled` say which tiles there are, and
when; together they are the loss's meaning, the oracle of the kernels, and what runs on CPUs.

With z the transformed logits, q the (weighted, smoothed) target distribution and Q = sum(q), one
row's loss and gradient are, for class indices and class probabilities alike,

    loss = Q * logsumexp(z) - sum(q * z)        d loss / dz = Q * softmax(z) - q
    lse  = logsumexp(z)                         d lse  / dz = softmax(z)

so that one pass adds up both gradients: (row_scale * Q + lse_scale) * softmax(z) - row_scale * q.
Without a target q is 0 and Q is 1: the loss is the lse. An ignored row has a loss and a row_scale
of 0, and its lse like any other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fxpass.plan.devices import compute_dtype
from fxpass.spec import expression
from fxpass.spec.spec import ELSEWHERE, Spec


class Inputs(NamedTuple):
    """The tensors of one fused loss: x ``[N, D]``, weight ``[V, D]``, bias ``[V]`` or none (f32
    beside narrower operands is added in f32), target ``[N]`` int64, ``[N, V]`` or none,
    class_weight ``[V]`` or none, logits ``[N, V]`` where they exist already, row_scale ``[N]`` or
    none (all ones), lse_scale ``[N]`` or none (all zeros), lse and lse_rest ``[N]`` in the compute
    dtype where an earlier pass has returned them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    class_weight: Tensor | None = None
    logits: Tensor | None = None
    row_scale: Tensor | None = None
    lse_scale: Tensor | None = None
    lse: Tensor | None = None
    lse_rest: Tensor | None = None


class Results(NamedTuple):
    """What the spec asks for: loss ``[N]`` and lse ``[N]`` in the compute dtype, and gradients,
    shaped as their operands, in their operands' dtype or the compute dtype.
    lse_rest ``[N]``, for ``tiled``, is what rounding took from lse."""

    loss: Tensor | None = None
    lse: Tensor | None = None
    x: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    lse_rest: Tensor | None = None


def is_valid(target: Tensor, spec: Spec) -> Tensor:
    """Which class indices ``[rows]`` int64 count: a mask of the same shape."""
    if spec.ignore_index is None:
        return torch.ones_like(target, dtype=torch.bool)
    return target != spec.ignore_index


# ---------------------------------------------------------------- targets


class Target:
    """The target distributions q of all rows: what a tile needs of them. This one is ``none``: q
    is 0, and Q is 1 all the same."""

    def __init__(self, inputs: Inputs, spec: Spec) -> None:
        n, self.classes = inputs.x.shape[0], inputs.weight.shape[0]
        self.dtype = compute_dtype(inputs.x.dtype)
        self.smoothing = spec.label_smoothing
        self.all_classes = spec.shard_of or self.classes
        self.valid = inputs.x.new_ones(n, dtype=torch.bool)
        w = inputs.class_weight
        self.weight = None if w is None else w.to(self.dtype)

    def sums(self, z: Tensor, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        """The tile's parts of sum(q * z) and of Q, ``[rows]`` each; z ``[rows, classes]``."""
        del rows
        return torch.zeros_like(z[:, 0]), torch.full_like(z[:, 0], float(classes.start == 0))

    def mass(self, rows: slice, step: int) -> Tensor:
        """Q ``[rows]``; looks at ``step`` classes at a time where it has to add them up."""
        del step
        return torch.ones_like(self.valid[rows], dtype=self.dtype)

    def subtract_from(self, g: Tensor, scale: Tensor, rows: slice, classes: slice) -> None:
        """``g -= scale * q`` for one tile, in place; scale ``[rows]``."""


class _Indices(Target):
    """q = (1 - s) * w[t] * onehot(t) + s / V * w, with smoothing s and class weights w. In a shard
    of the classes V is the number of all of them, and t may be a class of another shard."""

    def __init__(self, inputs: Inputs, spec: Spec) -> None:
        super().__init__(inputs, spec)
        assert inputs.target is not None
        target = inputs.target.long()  # uint8 cannot hold -100
        self.valid = is_valid(target, spec)
        here = self.valid & (target != ELSEWHERE) if spec.shard_of else self.valid
        self.picked = torch.where(here, target, 0)
        self.sharp = torch.full_like(self.picked, 1 - self.smoothing, dtype=self.dtype)
        if self.weight is not None:
            self.sharp.mul_(self.weight[self.picked])
        if spec.shard_of:
            self.sharp.masked_fill_(~here, 0)  # no product: a class weight may be inf
        self.smooth = self.smoothing / self.all_classes

    def _in_tile(self, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        """The target's column in the tile, and q's peak there: 0 where it is in another tile."""
        column, sharp = self.picked[rows] - classes.start, self.sharp[rows]
        width = classes.stop - classes.start
        if width != self.classes:
            inside = (column >= 0) & (column < width)
            column, sharp = torch.where(inside, column, 0), torch.where(inside, sharp, 0)
        return column.unsqueeze(1), sharp

    def sums(self, z: Tensor, rows: slice, classes: slice) -> tuple[Tensor, Tensor]:
        column, mass = self._in_tile(rows, classes)
        # where() and not a product alone: outside of the target's tile this may be 0 * -inf
        dot = torch.where(mass == 0, 0, mass * z.gather(1, column).squeeze(1))
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
    """q = w * ((1 - s) * p + s / V), with the given probabilities p."""

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
        total = torch.zeros_like(self.valid[rows], dtype=self.dtype)
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
    """What one row's loss is made of, over the classes seen so far; ``[rows]`` each."""

    highest: Tensor  # m = max(z)
    total: Tensor  # sum(exp(z - m))
    dot: Tensor  # sum(q * (z - m))
    mass: Tensor  # Q so far


def add_tile(sums: Sums | None, z: Tensor, target: Target, rows: slice, classes: slice) -> Sums:
    """The sums with one more tile; ``z`` ``[rows, classes]`` becomes ``exp(z - m)``.

    The maximum is subtracted before anything is added up, so that huge logits lose nothing.
    """
    lowest = torch.finfo(z.dtype).min
    # clamped: where every logit is -inf, subtracting that would make the lse nan
    highest = z.amax(1).clamp_(min=lowest)
    if sums is not None:
        torch.maximum(highest, sums.highest, out=highest)
    z.sub_(highest.unsqueeze(1))
    dot, mass = target.sums(z, rows, classes)
    total = z.exp_().sum(1)
    if sums is None:
        return Sums(highest, total, dot, mass)
    # Clamped: from the lowest it may overflow to -inf, and no mass times that is nan.
    shift = (sums.highest - highest).clamp_(min=lowest)
    return Sums(
        highest,
        total.add_(shift.exp().mul_(sums.total)),
        dot + sums.dot + sums.mass * shift,
        mass + sums.mass,
    )


def of_all(sums: Sums, spec: Spec) -> Sums:
    """The sums over all classes that are here. A shard may hold none but impossible ones (padding
    of the vocabulary, say); its lse is then the lowest number, and nothing of it is nan."""
    if not spec.shard_of:
        return sums
    return sums._replace(total=torch.where(sums.total == 0, 1, sums.total))


def rest_of(lse: Tensor, sums: Sums) -> Tensor:
    """What ``lse`` ``[rows]`` lacks of the logarithm of the sum of exp(z): where z is large, what
    was rounded away is a relative error of every softmax that is computed from it."""
    rest = sums.total.log() - (lse - sums.highest)
    return torch.where(lse.isfinite(), rest, 0)


def losses(sums: Sums, target: Target, rows: slice, spec: Spec) -> tuple[Tensor, Tensor]:
    """loss and lse ``[rows]`` of the sums over all classes."""
    log_total = sums.total.log()
    lse = sums.highest + log_total
    if spec.target == "none":
        return lse, lse
    # where() and not a product: an ignored row may hold an infinite loss
    return torch.where(target.valid[rows], sums.mass * log_total - sums.dot, 0), lse


# ---------------------------------------------------------------- gradients


def coefficients(
    inputs: Inputs, target: Target, mass: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    """What multiplies q and what multiplies the softmax, ``[rows]`` each; mass is Q."""
    scale = target.valid[rows].to(mass.dtype)
    if inputs.row_scale is not None:
        scale = torch.where(target.valid[rows], inputs.row_scale[rows].to(mass.dtype), 0)
    share = scale * mass
    if inputs.lse_scale is not None:
        share += inputs.lse_scale[rows].to(mass.dtype)
    return scale, share


def to_logits(spec: Spec, g: Tensor, raw: Tensor) -> None:
    """Writes to ``raw``, the linear's output, the gradient that ``g`` is of the transformed one."""
    if g is raw:
        return
    slope = expression.derivative(spec.transform)
    raw.copy_(g.mul_(float(slope) if slope.is_number else expression.evaluate(slope, raw)))


def slices(start: int, stop: int, step: int) -> list[slice]:
    """``[start, stop)``, ``step`` (at least 1) at a time."""
    step = max(1, step)
    return [slice(i, min(i + step, stop)) for i in range(start, stop, step)]
