"""Reductions of the logits' rows in ATen, and their gradients.

In: :class:`Operands` and :class:`fxpass.spec.reductions.Reductions`. Out: the outputs of every row,
or the gradients of the operands for incoming gradients of the outputs. One chunk of ``rows`` rows
of logits exists at a time, as in :mod:`fxpass.aten.chunked`; backward computes it again. The
outputs are computed in f32 (f64 for f64), the logits in the operands' dtype, as in eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fxpass.aten import common
from fxpass.aten.chunked import over_chunks
from fxpass.plan.plan import Plan
from fxpass.spec import expression
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.operands import Inputs
from fxpass.spec.reductions import (
    LEAST_LOG,
    OF_PICKS,
    TOTAL,
    LogitSum,
    Moment,
    Output,
    Reductions,
    for_slope,
    normalised,
    raw,
)


class Operands(NamedTuple):
    """The tensors of one call.

    Attributes:
        x: ``[N, D]``.
        weight: ``[V, D]``, dtype of x.
        bias: ``[V]`` in the dtype of x or in the compute dtype, or None.
        scale: ``[N]``, a factor of each row's transformed logits in the compute dtype, or None.
        picks: class indices ``[N]`` or ``[N, K]`` int64, or None.
        given: weights of moments, vectors ``[V]`` or values ``[N, V]``.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    picks: Tensor | None
    given: tuple[Tensor, ...]

    def classes(self) -> Tensor:
        """The class indices as ``[N, K]``."""
        assert self.picks is not None
        return self.picks if self.picks.dim() == 2 else self.picks.unsqueeze(1)

    def weights(self, moment: Moment | LogitSum, rows: slice) -> Tensor | None:
        """The weights of a sum ``[V]`` or ``[rows, V]`` in the compute dtype; None for ones."""
        return None if moment.weight is None else self.values(moment.weight, rows)

    def values(self, position: int, rows: slice) -> Tensor:
        """One of ``given``, ``[V]`` or ``[rows, V]`` in the compute dtype."""
        w = self.given[position]
        return (w if w.dim() == 1 else w[rows]).to(compute_dtype(self.x.dtype))


class Outputs(NamedTuple):
    """The outputs of all rows.

    Attributes:
        rows: ``[R, N]`` in the compute dtype, in the order of ``spec.rows``; K rows for a ``pick``
            of K classes.
        indices: ``[I, N]`` int64.
        lse, rest: ``[N]``, the log-sum-exp and its rounding error.
        saved: ``[S, N]``, the moments of ``spec.saved``.
    """

    rows: Tensor
    indices: Tensor
    lse: Tensor
    rest: Tensor
    saved: Tensor


def forward(operands: Operands, spec: Reductions, plan: Plan) -> Outputs:
    """The outputs of every row."""
    out = empty(operands, spec)
    moments = raw(spec.outputs)

    def read(few: slice, logits: Tensor, _: bool) -> Tensor:
        z = _transformed(operands, spec, few, logits)
        highest, at = z.max(1)
        # clamped: if every logit is -inf, -inf - -inf would make the lse nan
        m = highest.clamp(min=torch.finfo(z.dtype).min)
        lines = _of_logits(operands, spec, z, few)
        y = z.sub_(m.unsqueeze(1))  # nobody reads these logits again
        sums = {moment: _sum(operands, moment, y, few) for moment in moments}
        log_total = sums[TOTAL].log()
        lse = m + log_total
        out.lse[few], out.rest[few] = lse, torch.where(lse.isfinite(), log_total - (lse - m), 0)
        lines |= {"lse": [lse], "max": [highest], "amax": [highest]}
        # highest - m is 0, or nan if every logit is -inf
        lines["peak"] = [highest - m - log_total]
        for output in spec.rows:
            if isinstance(output, Moment):
                lines[output] = [normalised(output, sums, log_total, torch.exp)]
            elif output == "pick":
                picked = y.gather(1, operands.classes()[few])
                lines[output] = (picked - log_total.unsqueeze(1)).unbind(1)
        every = itertools.chain.from_iterable(lines[output] for output in spec.rows)
        for place, line in zip(out.rows, every, strict=True):
            place[few] = line
        for place, moment in zip(out.saved, spec.saved, strict=True):
            place[few] = normalised(moment, sums, log_total, torch.exp)
        for place in out.indices:
            place[few] = at
        return lse

    over_chunks(_linear(operands), (), read, plan.rows, plan.classes, plan.block)
    return out


def empty(operands: Operands, spec: Reductions) -> Outputs:
    """Uninitialised outputs, also of fake operands."""
    n, dtype = operands.x.shape[0], compute_dtype(operands.x.dtype)
    picked = operands.classes().shape[1] if operands.picks is not None else 0
    count = sum(picked if output in OF_PICKS else 1 for output in spec.rows)
    new = operands.x.new_empty
    return Outputs(
        new((count, n), dtype=dtype),
        new((len(spec.outputs) - len(spec.rows), n), dtype=torch.int64),
        new(n, dtype=dtype),
        new(n, dtype=dtype),
        new((len(spec.saved), n), dtype=dtype),
    )


def backward(
    operands: Operands, spec: Reductions, plan: Plan, out: Outputs, incoming: Tensor
) -> dict[str, Tensor]:
    """The gradients that ``spec`` names, for the incoming gradients ``[R, N]`` of ``out.rows``.

    Of ``out`` it reads lse, rest and saved. Gradients of x, weight and bias have the dtypes of
    :func:`fxpass.aten.chunked.over_chunks`, those of ``[N, V]`` the dtype of their operand, the
    others the compute dtype.
    """
    dtype = compute_dtype(operands.x.dtype)
    others = {"scale": operands.scale} | {f"given{i}": t for i, t in enumerate(operands.given)}
    grads = {
        name: t.new_zeros(t.shape, dtype=dtype if t.dim() == 1 else t.dtype)
        for name, t in others.items()
        if t is not None and name in spec.gradients
    }
    sigmas = dict(zip(spec.saved, out.saved, strict=True))

    def to_gradient(few: slice, logits: Tensor, _: bool) -> Tensor:
        unscaled = expression.evaluate(spec.transform, logits)
        z = unscaled if operands.scale is None else unscaled * operands.scale[few].unsqueeze(1)
        log = (z - out.lse[few].unsqueeze(1)).sub_(out.rest[few].unsqueeze(1))
        g, terms = torch.zeros_like(z), _Terms()
        row, lines = 0, incoming[:, few]
        for output in spec.rows:
            if output in OF_PICKS:
                index = operands.classes()[few]
                each = lines[row : row + index.shape[1]].t()
                row += index.shape[1]
                g.scatter_add_(1, index, each)
                if output == "pick":
                    terms.add(1, 0, None, -each.sum(1))
                continue
            grad = lines[row]
            row += 1
            if isinstance(output, Moment):
                terms.add_moment(output, grad, {m: sigma[few] for m, sigma in sigmas.items()})
                if (name := f"given{output.weight}") in grads:
                    _add_weights(grads[name], output.term(log).mul_(grad.unsqueeze(1)), few)
            elif isinstance(output, LogitSum):
                terms.add(0, 0, output.weight, grad)
                if (name := f"given{output.weight}") in grads:
                    _add_weights(grads[name], z * grad.unsqueeze(1), few)
            elif output == "lse":
                terms.add(1, 0, None, grad)
            elif output in ("max", "peak"):
                g.scatter_add_(1, z.argmax(1, keepdim=True), grad.unsqueeze(1))
                if output == "peak":
                    terms.add(1, 0, None, -grad)
            else:  # amax: equal maxima share the gradient
                _add_shared(g, z, grad)
        log.clamp_(min=LEAST_LOG)
        terms.add_to(g, log, lambda weight: operands.values(weight, few))
        if operands.scale is not None:
            if "scale" in grads:
                grads["scale"][few] = (g * unscaled).sum(1)
            g *= operands.scale[few].unsqueeze(1)
        common.to_logits(spec.transform, g, logits)
        return out.lse.new_ones(few.stop - few.start)

    products = tuple(name for name in spec.gradients if name not in others)
    sizes = plan.rows, plan.classes, plan.block
    return grads | over_chunks(_linear(operands), products, to_gradient, *sizes)


class _Terms:
    """The slope of a row's outputs: polynomials of the log-softmax, each multiplied by a power of
    the softmax and by weights. A coefficient is ``[rows]``."""

    def __init__(self) -> None:
        self.coefficients: dict[tuple[int, int | None], dict[int, Tensor]] = {}

    def add(self, a: int, b: int, weight: int | None, factor: Tensor) -> None:
        """Adds ``factor * w * softmax**a * log_softmax**b``."""
        polynomial = self.coefficients.setdefault((a, weight), {})
        polynomial[b] = polynomial[b] + factor if b in polynomial else factor

    def add_moment(self, moment: Moment, grad: Tensor, sigmas: Mapping[Moment, Tensor]) -> None:
        """Adds ``grad * (psi - softmax * sigma)``."""
        a, b, weight = moment.a, moment.b, moment.weight
        if a:
            self.add(a, b, weight, a * grad)
        if b:
            self.add(a, b - 1, weight, b * grad)
        for factor, lower in for_slope(moment):
            self.add(1, 0, None, -factor * grad * (1 if lower == TOTAL else sigmas[lower]))

    def add_to(self, g: Tensor, log: Tensor, weights: Callable[[int], Tensor]) -> None:
        """Adds all terms to ``g`` ``[rows, V]``."""
        softmax, term = log.exp(), torch.empty_like(log)
        for (a, weight), polynomial in self.coefficients.items():
            term.zero_()
            for b in range(max(polynomial), -1, -1):  # Horner's scheme
                term.mul_(log)
                if b in polynomial:
                    term.add_(polynomial[b].unsqueeze(1))
            for _ in range(a):
                term.mul_(softmax)
            if weight is not None:
                term.mul_(weights(weight))
            g += term


def _add_shared(g: Tensor, z: Tensor, grad: Tensor) -> None:
    """Adds the gradient of the maxima: equal ones share it."""
    highest = z == z.amax(1, keepdim=True)
    g += highest * (grad / highest.sum(1)).unsqueeze(1)


def _add_weights(grad: Tensor, term: Tensor, few: slice) -> None:
    """Adds the gradient of a moment's weights, of some rows."""
    if grad.dim() == 1:
        grad += term.sum(0)
    else:
        grad[few] += term


def _transformed(operands: Operands, spec: Reductions, few: slice, logits: Tensor) -> Tensor:
    z = expression.evaluate(spec.transform, logits)
    return z if operands.scale is None else z * operands.scale[few].unsqueeze(1)


def _of_logits(
    operands: Operands, spec: Reductions, z: Tensor, few: slice
) -> dict[Output, Sequence[Tensor]]:
    """The outputs that read logits and not their differences."""
    found: dict[Output, Sequence[Tensor]] = {}
    for output in spec.rows:
        if isinstance(output, LogitSum):
            found[output] = [_weighted(z, operands.weights(output, few))]
        elif output == "at":
            found[output] = z.gather(1, operands.classes()[few]).unbind(1)
    return found


def _sum(operands: Operands, moment: Moment, y: Tensor, few: slice) -> Tensor:
    """A raw sum of some rows ``[rows]``."""
    return _weighted(moment.term(y), operands.weights(moment, few))


def _weighted(term: Tensor, w: Tensor | None) -> Tensor:
    """The sum over the classes of ``w * term``."""
    if w is None:
        return term.sum(1)
    return term.mv(w) if w.dim() == 1 else (w * term).sum(1)


def _linear(operands: Operands) -> Inputs:
    return Inputs(operands.x, operands.weight, operands.bias, None)
