"""Class reductions of a head whose classes are sharded over the ranks of a process group.

In: the operands of ``fxpass::class_reductions`` for this rank's classes, its first class and the
name of the group. Out: the operator's rows and indices over the classes of all ranks. Each rank
runs the operator over its classes, and the ranks merge its outputs, a few numbers per row. With
lse_r and moments M_r of shard r, m = max(lse_r) and d_r = lse_r - m,

    L = log(sum_r exp(d_r))     S_ab = sum_r exp(a d_r) sum_k C(b,k) d_r**(b-k) M_ak,r
    lse = m + L                 M_ab = exp(-a L) sum_k C(b,k) (-L)**(b-k) S_ak

so the ranks exchange a maximum of lse_r, and of the largest logit if an output reads it, and then
one sum: of S, of the logits at the picks, each of which one rank has, and of a nan that is a rank's
largest logit, since a maximum may lose it. The first class with the largest logit is a minimum that
they exchange along with the sum.

Backward exchanges nothing: each rank runs the operator's backward over its classes, with the lse
and the moments of all of them. A log-probability has the gradient 1[j = c] - p_j, which is that of
the logit at c, of one rank, and of -lse, of all ranks::

    rows, indices = class_reductions(
        x, w, None, None, picks, [], None, "r6 outputs=pick;moment(1,1) gradients=x,weight",
        first=0, classes=9, group=group,
    )
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fxpass.aten.row_sums import finite, under
from fxpass.op.checks import check_first_derivative, check_gradients
from fxpass.op.collectives import all_reduce, started, waited
from fxpass.op.reductions import class_reductions as of_one_rank
from fxpass.spec.operands import Operands
from fxpass.spec.outputs import LEAST_LOG, TOTAL, Moment, Output, lines_of
from fxpass.spec.reductions import Reductions, normalised, raw
from fxpass.spec.shards import PARTS, Shard, of_backward, of_forward


def class_reductions(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    picks: Tensor | None,
    given: Sequence[Tensor],
    logits: Tensor | None,
    spec: str,
    *,
    first: int,
    classes: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Reductions over the classes of all ranks of ``group``.

    Backward returns this rank's part of the gradients of x, scale and given values; where all ranks
    have the same tensor, the caller sums its gradient over ``group``.

    Args:
        x: ``[N, D]`` floating point, the same on all ranks.
        weight: ``[V_r, D]``, dtype of x, the classes from ``first`` on; V_r may be 0.
        bias: ``[V_r]`` in the dtype of x or of the outputs, or None.
        scale: ``[N]`` in the dtype of the outputs, the same on all ranks, or None.
        picks: class indices ``[N]`` or ``[N, K]`` int64 among all classes, the same on all ranks,
            if outputs read them; else None.
        given: the weights of moments and what the transform reads, ``[V_r]`` or ``[N, V_r]``.
        logits: ``[N, V_r]``, the linear's output with its bias if it exists anyway; no gradient.
        spec: the text of a :class:`fxpass.spec.reductions.Reductions` without a total.
        first: this rank's first class. Shards do not overlap.
        classes: the number of all classes.
        group: the name of the process group.

    Returns:
        rows: ``[R, N]`` f32 (f64 for f64 operands), in the order of the spec's outputs; K rows for
            picks ``[N, K]``.
        indices: ``[I, N]`` int64 among all classes.

        Both are the same on all ranks.

    Raises:
        ValueError: the spec has a total; operands do not fit together.
        IndexError: a pick is none of the classes (on CPU; on GPUs a device-side assertion fails).
        RuntimeError: a tensor needs a gradient that the spec does not name.
    """
    # one shard with all classes has all picks, of which it refuses the others
    s = dataclasses.replace(Reductions.parse(spec), shard=len(weight) < classes)
    if s.total:
        raise ValueError(f"a total needs an lse of all classes before its gradients: {spec!r}")
    operands = Operands(x, weight, bias, scale, picks, tuple(given), logits=logits)
    if torch.is_grad_enabled():
        check_gradients(operands, s)
    shard = Shard(first, classes, group)
    return _Merged.apply(s, shard, picks, logits, x, weight, bias, scale, *given)


class _OfAll(NamedTuple):
    """The reductions of all classes, and what backward of one shard reads, ``[1, N]`` if not said.

    Attributes:
        rows, indices: see :func:`class_reductions`.
        lse, rest: the log-sum-exp and its rounding error.
        saved: ``[S, N]``, the sums of ``spec.saved``.
        leads: whether this shard has the first class with the largest logit, or None.
    """

    rows: Tensor
    indices: Tensor
    lse: Tensor
    rest: Tensor
    saved: Tensor
    leads: Tensor | None


class _Merged(torch.autograd.Function):
    """Rows and indices over all classes. Every rank computes the same loss from them, so the
    incoming gradient is complete on every rank and is not summed again."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: Reductions,
        shard: Shard,
        picks: Tensor | None,
        logits: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        *given: Tensor,
    ) -> tuple[Tensor, Tensor]:
        picks = None if picks is None else _in_shard(picks, shard, len(weight))
        operands = Operands(x, weight, bias, scale, picks, given, logits=logits)
        out = _merged(operands, spec, shard)
        ctx.spec = spec
        ctx.mark_non_differentiable(out.indices)
        ctx.save_for_backward(*out[2:], picks, logits, x, weight, bias, scale, *given)
        return out.rows, out.indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_first_derivative()
        spec: Reductions = ctx.spec
        lse, rest, saved, leads, picks, logits, *tensors = ctx.saved_tensors
        x, weight, bias, scale, *own = tensors
        operands = Operands(x, weight, bias, scale, picks, tuple(own), logits=logits)
        local = of_backward(spec)
        here = operands.read_by(local)
        lines = _of_shard(_by_output(grad, spec.rows, operands.many), spec, local, leads)
        grads = torch.ops.fxpass.class_reductions_backward(
            torch.cat([grad[:0], *lines]),
            *(lse[0], rest[0], saved, x, weight, bias, scale),
            *(here.picks, here.given, logits, local.text()),
        )
        found = dict(zip(spec.gradients, grads, strict=False))
        named = ("x", "weight", "bias", "scale", *(f"given{i}" for i in range(len(own))))
        return None, None, None, None, *map(found.get, named)


def _of_shard(
    lines: Mapping[Output, Tensor], spec: Reductions, local: Reductions, leads: Tensor | None
) -> list[Tensor]:
    """The gradients of the outputs of one shard's backward, from those of all classes, ``[1, N]``,
    or ``[K, N]`` of picks; that of the largest logit belongs to the shard that ``leads``."""
    found = []
    for output in (o for o in local.rows if o in PARTS):
        parts = {o: lines[o] for o in PARTS[output] if o in lines}
        if output == "lse":
            parts = {o: t if o == "lse" else -t.sum(0, keepdim=True) for o, t in parts.items()}
        line = functools.reduce(torch.add, parts.values())
        if output == "max":
            assert leads is not None, "gradients of the largest logit take its class"
            line = torch.where(leads, line, 0)
        found.append(line)
    return found + [lines[o] for o in spec.rows if isinstance(o, Moment)]


# ---------------------------------------------------------------- forward


def _in_shard(picks: Tensor, shard: Shard, count: int) -> Tensor:
    """The picks among this shard's ``count`` classes; ``count`` for those of other shards. Indices
    that are no class of any shard remain: the operator raises for them."""
    column = picks - shard.first
    column = torch.where((column >= 0) & (column < count), column, count)
    known = (picks >= 0) & (picks < shard.classes)
    return torch.where(known, column, picks)


def _merged(operands: Operands, spec: Reductions, shard: Shard) -> _OfAll:
    sums = raw(("lse", *spec.outputs))
    local, index, rest = _run(operands, of_forward(spec))
    largest = local.get("max")
    # a nan is larger than any number, as in torch, but gloo's maximum may lose it
    sent = [] if largest is None else [torch.where(largest.isnan(), torch.inf, largest)]
    m, *highest = all_reduce(torch.cat([local["lse"], *sent]), "max", shard.group).split(1)
    m = finite(m)

    parts = _parts(operands, local, sums, (local["lse"] - m) + rest)
    least = leads = None
    if largest is not None:
        parts["max"] = torch.where(largest.isnan(), largest, 0)
        here = (sent[0] == highest[0]) & bool(len(operands.weight))
        if len(index):  # that of a nan is below 0: it comes before infinity
            index = shard.first + index - shard.classes * largest.isnan()
            index = torch.where(here, index, shard.classes)
            least = started(index, "min", shard.group)
    total = _added(parts, shard)
    if largest is not None:
        highest = [highest[0] + total.pop("max")]
    if least is not None:
        least = waited(least)
        leads = least == index

    found, rest = _found(total, sums, m)
    if highest:
        found["max"] = highest[0]
    rows, saved = (
        torch.cat([rest[:0], *(found[output] for output in outputs)])
        for outputs in (spec.rows, spec.saved)
    )
    indices = index[:0] if least is None or not spec.indices else least % shard.classes
    return _OfAll(rows, indices, found["lse"], rest, saved, leads)


def _added(parts: Mapping[Output, Tensor], shard: Shard) -> dict[Output, Tensor]:
    """The sums over all shards."""
    added = all_reduce(torch.cat(list(parts.values())), "sum", shard.group)
    return dict(zip(parts, added.split([len(line) for line in parts.values()]), strict=True))


def _parts(
    operands: Operands, local: Mapping[Output, Tensor], sums: Iterable[Moment], d: Tensor
) -> dict[Output, Tensor]:
    """What this shard adds to sums over all classes, where ``d`` is its lse without the maximum."""
    if not len(operands.weight):
        d = d.clamp(min=LEAST_LOG)  # 0 * -inf would be nan
    moments = {m: local.get(m, torch.ones_like(d)) for m in sums}  # TOTAL is 1
    parts: dict[Output, Tensor] = {"at": local["at"]} if "at" in local else {}
    for moment in sums:
        # if every logit is -inf, the log-softmax in the shard is not known, that of all classes is
        none = 0 if moment.a else moments[Moment(0, 0, moment.weight)] * d**moment.b
        parts[moment] = torch.where(d == -torch.inf, none, under(moment, moments, d))
    return parts


def _found(
    total: Mapping[Output, Tensor], sums: Iterable[Moment], m: Tensor
) -> tuple[dict[Output, Tensor], Tensor]:
    """The outputs of all classes, from sums under the maximum ``m``; the lse's rounding error."""
    moments = {moment: total[moment] for moment in sums}
    log_total = moments[TOTAL].log()
    lse = m + log_total
    rest = torch.where(lse.isfinite(), log_total - (lse - m), 0)
    found: dict[Output, Tensor] = {**total, "lse": lse}
    for moment, line in moments.items():
        value = normalised(moment, moments, log_total, moments[TOTAL].reciprocal())
        # an infinite sum remains: 0 * -inf would be nan
        found[moment] = torch.where(line.isinf(), line, value)
    if "at" in total:
        found["pick"] = (total["at"] - lse) - rest
    return found, rest


def _run(operands: Operands, local: Reductions) -> tuple[dict[Output, Tensor], Tensor, Tensor]:
    """The outputs of the shard, by name; its indices ``[I, N]``; the rounding error of its lse
    ``[N]``."""
    here = operands.read_by(local)
    x, weight, bias, scale, picks, given, _, logits, _ = here
    found = of_one_rank(x, weight, bias, scale, picks, given, None, logits, local.text())
    rows, rest = found["rows"], found.get("rest", x.new_empty(0))
    index = found.get("indices", rows.new_empty((0, len(x)), dtype=torch.int64))
    return _by_output(rows, local.rows, here.many), index, rest


def _by_output(rows: Tensor, outputs: Iterable[Output], many: int) -> dict[Output, Tensor]:
    """The lines of each output in ``[R, N]``: ``[1, N]``, or ``[many, N]`` of picks."""
    outputs = list(outputs)
    sizes = [lines_of(output, many) for output in outputs]
    return dict(zip(outputs, rows.split(sizes), strict=True))
