"""Reductions of the logits' rows in ATen, and their gradients.

In: :class:`Operands` and :class:`fxpass.spec.reductions.Reductions`. Out: the outputs of every row,
or the gradients of the operands for incoming gradients of the outputs. One chunk of ``rows`` rows
of logits exists at a time, as in :mod:`fxpass.aten.chunked`; backward computes it again. The
outputs are computed in f32 (f64 for f64), the logits in the operands' dtype, as in eager.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fxpass.aten import common
from fxpass.aten.chunked import over_chunks
from fxpass.aten.slopes import Slope
from fxpass.plan.plan import Plan
from fxpass.spec import expression
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.reduction_operands import Operands, Outputs, empty
from fxpass.spec.reductions import (
    LEAST_LOG,
    TOTAL,
    LogitSum,
    Moment,
    Output,
    Reductions,
    normalised,
    raw,
)


def forward(operands: Operands, spec: Reductions, plan: Plan) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of every row, and the gradients of the total, if there is one, in the dtypes of
    :func:`fxpass.aten.chunked.over_chunks`."""
    out = empty(operands, spec)
    read = (*spec.outputs, *spec.total)
    moments = raw(read)
    # the exponentials of the sum may then become the gradient
    once = moments == (TOTAL,) and not {"lse", "pick"}.isdisjoint(spec.total)
    once = once and not any(isinstance(output, LogitSum) for output in spec.total)
    once = once and bool(spec.gradients)

    def read_rows(few: slice, logits: Tensor, scaled: bool) -> Tensor:
        z = _transformed(operands, spec, few, logits)[1]
        highest, at = z.max(1) if spec.indices else (z.amax(1), z)
        # clamped: if every logit is -inf, -inf - -inf would make the lse nan
        m = highest.clamp(min=torch.finfo(z.dtype).min)
        lines = _of_logits(operands, read, z, few)
        y = z.sub_(m.unsqueeze(1))  # nobody reads these logits again
        picked = y.gather(1, operands.classes()[few]) if "pick" in read else y
        e, sums = _raw_sums(operands, moments, y, few, once)
        log_total = sums[TOTAL].log()
        lse = m + log_total
        out.lse[few], out.rest[few] = lse, torch.where(lse.isfinite(), log_total - (lse - m), 0)
        # highest - m is 0, or nan if every logit is -inf
        peak = highest - m - log_total
        lines |= {"lse": [lse], "max": [highest], "amax": [highest], "peak": [peak]}
        if "pick" in read:
            lines["pick"] = (picked - log_total.unsqueeze(1)).unbind(1)
        normal = {m: normalised(m, sums, log_total, torch.exp) for m in moments}
        lines |= {moment: [line] for moment, line in normal.items()}
        for place, line in zip(out.rows, _all(lines, spec.rows), strict=True):
            place[few] = line
        for place, moment in zip(out.saved, spec.saved, strict=True):
            place[few] = normal[moment]
        for place in out.indices:
            place[few] = at
        if operands.coef is None:
            return lse
        coef = operands.coef[:, few]
        terms = zip(coef, _all(lines, spec.total), strict=True)
        out.total[few] = sum(torch.where(c == 0, 0, c * line) for c, line in terms)
        if not spec.gradients:
            return lse
        slope = Slope(operands, few, spec.total, coef, normal, y)
        if once:
            g, factor = slope.of_softmax(e, sums[TOTAL], scaled)
        else:
            g, factor = slope.of(y.sub_(log_total.unsqueeze(1)), scaled)
        _to_logits(operands, spec, few, g, logits)
        return factor

    products = spec.gradients if spec.total else ()
    sizes = plan.rows, plan.classes, plan.block
    return out, over_chunks(operands, products, read_rows, *sizes)


def _all(lines: Mapping[Output, Sequence[Tensor]], outputs: Iterable[Output]) -> Iterable[Tensor]:
    return itertools.chain.from_iterable(lines[output] for output in outputs)


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

    def to_gradient(few: slice, logits: Tensor, scaled: bool) -> Tensor:
        unscaled, z = _transformed(operands, spec, few, logits)
        lines = incoming[:, few]
        sums = {moment: sigma[few] for moment, sigma in sigmas.items()}
        slope = Slope(operands, few, spec.rows, lines, sums, z)
        for output, line in slope.weighted:
            if isinstance(output, LogitSum) and (name := f"given{output.weight}") in grads:
                _add_weights(grads[name], z * line.unsqueeze(1), few)
        # nobody reads these logits again
        log = z.sub_(out.lse[few].unsqueeze(1)).sub_(out.rest[few].unsqueeze(1))
        for output, line in slope.weighted:
            if isinstance(output, Moment) and (name := f"given{output.weight}") in grads:
                _add_weights(grads[name], output.term(log).mul_(line.unsqueeze(1)), few)
        g, factor = slope.of(log, scaled)
        if "scale" in grads:
            grads["scale"][few] = (g * unscaled).sum(1)
        _to_logits(operands, spec, few, g, logits)
        return factor

    products = tuple(name for name in spec.gradients if name not in others)
    sizes = plan.rows, plan.classes, plan.block
    return grads | over_chunks(operands, products, to_gradient, *sizes)


def _add_weights(grad: Tensor, term: Tensor, few: slice) -> None:
    """Adds the gradient of a moment's weights, of some rows."""
    if grad.dim() == 1:
        grad += term.sum(0)
    else:
        grad[few] += term


def _transformed(
    operands: Operands, spec: Reductions, few: slice, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """The transformed logits, without the scale of their row and with it."""
    z = expression.evaluate(spec.transform, logits)
    return z, z if operands.scale is None else z * operands.scale[few].unsqueeze(1)


def _to_logits(operands: Operands, spec: Reductions, few: slice, g: Tensor, logits: Tensor) -> None:
    """Overwrites ``logits`` with their gradient, from that of the transformed and scaled ones."""
    if operands.scale is not None:
        g.mul_(operands.scale[few].unsqueeze(1))
    common.to_logits(spec.transform, g, logits)


def _of_logits(
    operands: Operands, outputs: Iterable[Output], z: Tensor, few: slice
) -> dict[Output, Sequence[Tensor]]:
    """The outputs that read logits and not their differences."""
    found: dict[Output, Sequence[Tensor]] = {}
    for output in outputs:
        if isinstance(output, LogitSum):
            found[output] = [_weighted(z, operands.weights(output, few))]
        elif output == "at":
            found[output] = z.gather(1, operands.classes()[few]).unbind(1)
    return found


def _raw_sums(
    operands: Operands, moments: Sequence[Moment], y: Tensor, few: slice, in_place: bool
) -> tuple[Tensor, dict[Moment, Tensor]]:
    """The raw sums ``[rows]`` of y ``[rows, V]``, and the exponentials of y if ``in_place``.

    One exponential serves all powers of y. y is overwritten, at most by its clamped value unless
    ``in_place``.
    """
    found: dict[Moment, Tensor] = {}
    for a in sorted({moment.a for moment in moments}):
        some = [moment for moment in moments if moment.a == a]
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
                    found[moment] = _weighted(term, operands.weights(moment, few))
    return y, found


def _weighted(term: Tensor, w: Tensor | None) -> Tensor:
    """The sum over the classes of ``w * term``."""
    if w is None:
        return term.sum(1)
    return term.mv(w) if w.dim() == 1 else (w * term).sum(1)
