"""``fxpass::linear_cross_entropy``: a cross-entropy as arithmetic on ``fxpass::class_reductions``.

In: the operands of a linear and of its loss, and a spec's text. Out: the loss, and the lse if the
spec names it. A rewritten graph calls this operator; it has no kernel of its own, and a compiler
traces what it calls::

    >>> x, w, t = torch.randn(4, 8), torch.randn(10, 8), torch.arange(4)
    >>> loss, lse = linear_cross_entropy(x, w, target=t, spec="v7 reduction=mean lse=true")
    >>> loss_with_z_loss = loss + 1e-4 * (lse**2).mean()

With l the log-softmax of a row, V classes, smoothing s, class weights w and the target c or q,

    class indices    loss = - (1 - s) w_c l_c - s / V sum_j w_j l_j
    probabilities    loss = - (1 - s) sum_j w_j q_j l_j - s / V sum_j w_j l_j
    no target        loss = lse

so a row's loss is a sum of outputs, each multiplied by a coefficient that is known before. For
``mean`` and ``sum``, the operator returns the total of all rows, and forward computes its
gradients. For ``none``, with an lse, and for the strategy ``tiled``, it returns the outputs of the
rows, and backward computes the logits again.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

import fxpass.op.reductions  # noqa: F401, registers the operator
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.reductions import Output
from fxpass.spec.spec import Spec


class Inputs(NamedTuple):
    """The tensors of a fused loss.

    Attributes:
        x: ``[N, D]`` floating point.
        weight: ``[V, D]``, dtype of x.
        bias: ``[V]`` in the dtype of x or in the compute dtype, or None.
        target: class indices ``[N]`` int64 or uint8, class probabilities ``[N, V]``, or None.
        class_weight: ``[V]`` floating point, or None; None without a target.
        logits: ``[N, V]``, the linear's output if the graph needs it anyway, else None.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor | None
    class_weight: Tensor | None = None
    logits: Tensor | None = None


class Terms(NamedTuple):
    """What the losses of the rows add up.

    Attributes:
        coefficients: of each output of the operator, ``[N]`` in the compute dtype; 0 in rows that
            are ignored.
        picks: class indices ``[N]`` int64, or None.
        given: the weights of moments.
    """

    coefficients: dict[Output, Tensor]
    picks: Tensor | None
    given: list[Tensor]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    target: Tensor | None = None,
    class_weight: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    spec: str,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of ``x @ weight.T + bias`` without the logits.

    Args:
        x, weight, bias, target, class_weight, logits: see :class:`Inputs`.
        spec: the text of a :class:`fxpass.spec.spec.Spec`.

    Returns:
        loss: f32 (f64 for f64 operands), a scalar, or ``[N]`` for ``none``.
        lse: ``[N]``, the log-sum-exp of the transformed logits of every row, ignored rows included,
            if the spec says ``lse=true``; else of size 0.

    Raises:
        IndexError: a class index is outside ``[0, V)`` and not ``ignore_index`` (on CPU; on GPUs a
            device-side assertion fails, as in PyTorch's loss).

    ``lse`` is for the z-loss of https://arxiv.org/abs/2204.02311, ``loss + c * (lse**2).mean()``.
    """
    s = Spec.parse(spec)
    inputs = Inputs(x, weight, bias, target, class_weight, logits)
    factor = of_mean(counted(inputs, s), inputs) if s.reduction == "mean" else None
    found = terms(inputs, s, factor)
    if s.totals:
        loss = total(inputs, s, found, factor)
        return loss, loss.new_empty(0)
    outputs, *_ = reduced(inputs, s, found)
    loss, lse = rows(inputs, s, found, outputs)
    return added(loss, s, factor), loss.new_empty(0) if lse is None else lse


_LIBRARY = torch.library.Library("fxpass", "FRAGMENT")
_LIBRARY.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias=None, Tensor? target=None, "
    "Tensor? class_weight=None, Tensor? logits=None, *, str spec) -> (Tensor, Tensor)"
)
_LIBRARY.impl("linear_cross_entropy", linear_cross_entropy, "CompositeImplicitAutograd")


def total(inputs: Inputs, spec: Spec, found: Terms, factor: Tensor | None) -> Tensor:
    """The sum of the rows' losses, whose gradients forward computes."""
    coef = torch.stack(list(found.coefficients.values()))
    return added(reduced(inputs, spec, found, coef)[TOTAL], spec, factor)


def added(loss: Tensor, spec: Spec, factor: Tensor | None) -> Tensor:
    """The reduction of rows' losses that are multiplied by ``factor`` already."""
    loss = loss if spec.reduction == "none" else loss.sum()
    # without valid rows the factor is infinite and the mean is nan, as in PyTorch
    return loss if factor is None else loss + 0 * factor


def rows(inputs: Inputs, spec: Spec, found: Terms, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Each row's loss, and its lse if the spec names it, ``[N]``, from the operator's rows."""
    weighted = inputs.class_weight is not None
    named = dict(zip(spec.reductions(weighted).rows, outputs.unbind(), strict=True))
    # where(): an ignored row adds 0 even if its output is nan, and passes no gradient on
    parts = (torch.where(c == 0, 0, c * named[o]) for o, c in found.coefficients.items())
    return functools.reduce(torch.add, parts), named["lse"] if spec.lse else None


TOTAL = 5  # the position of the total among the operator's results


def reduced(
    inputs: Inputs, spec: Spec, found: Terms, coef: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The operator's results."""
    x, weight, bias, _, class_weight, logits = inputs
    return torch.ops.fxpass.class_reductions(
        *(x, weight, bias, None, found.picks, found.given, coef, logits),
        spec.reductions(class_weight is not None).text(),
    )


# ---------------------------------------------------------------- coefficients


def terms(
    inputs: Inputs, spec: Spec, factor: Tensor | None = None, first: int | None = None
) -> Terms:
    """The coefficients of the rows' losses, times ``factor``, and the operands that they need.

    ``first`` is the first class of a vocabulary shard: the weights are those of its classes, the
    picks are among all classes.
    """
    x, weight, _, target, w, _ = inputs
    n, count = x.shape[0], weight.shape[0]
    one = x.new_ones((), dtype=compute_dtype(x.dtype))
    one = one if factor is None else factor
    every = spec.outputs(w is not None)
    if target is None:
        return Terms({every[0]: one.expand(n)}, None, [])
    w = None if w is None else w.to(one.dtype)
    here = slice(None) if first is None else slice(first, first + count)
    given = [] if w is None or len(every) == 1 else [w[here]]
    sharp = (spec.label_smoothing - 1) * one
    smooth = -spec.label_smoothing / (spec.shard_of or count) * one
    if spec.target == "probabilities":
        q = target[:, here]
        q = q if w is None else q.to(one.dtype) * w[here]
        lines = [sharp.expand(n), smooth.expand(n)]
        return Terms(dict(zip(every, lines, strict=False)), None, [q, *given])
    counts = is_counted(target, spec)
    picks = torch.where(counts, target.long(), 0)
    if w is not None:
        sharp = sharp * w[picks.clamp(0, w.shape[0] - 1)]  # the operator checks the indices
    lines = [torch.where(counts, sharp, 0), torch.where(counts, smooth, 0)]
    return Terms(dict(zip(every, lines, strict=False)), picks, given)


def is_counted(target: Tensor, spec: Spec) -> Tensor:
    """A mask ``[N]``: False where a class index is ``ignore_index``."""
    if spec.ignore_index is None:
        return torch.ones_like(target, dtype=torch.bool)
    return target.long() != spec.ignore_index  # uint8 cannot hold -100


def counted(inputs: Inputs, spec: Spec) -> Tensor:
    """The divisor of ``mean``: the number of rows that are not ignored, or the sum of the class
    weights of their targets."""
    target, w = inputs.target, inputs.class_weight
    if target is None or spec.target == "probabilities":
        return inputs.x.new_full((), inputs.x.shape[0], dtype=torch.int64)
    counts = is_counted(target, spec)
    if w is None:
        return counts.sum()
    index = target.long().clamp(0, w.shape[0] - 1)  # the operator checks the indices
    return torch.where(counts, w.to(compute_dtype(inputs.x.dtype))[index], 0).sum()


def of_mean(count: Tensor, inputs: Inputs) -> Tensor:
    """The factor of ``mean``, in the compute dtype."""
    return count.to(compute_dtype(inputs.x.dtype)).reciprocal()
