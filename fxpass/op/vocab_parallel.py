"""The fused loss over a sharded vocabulary: each rank of a process group has some of the classes.

In: plain tensors, the rank's first class, names of process groups. Out: the loss, the same on all
ranks of the group. It is the arithmetic of :mod:`fxpass.op.losses` on reductions over the classes
of all ranks (:mod:`fxpass.op.sharded`), whose gradients each rank computes in backward, of its
classes. The ranks exchange a maximum, a sum of exponentials and the logit of the target per row,
and further sums for label smoothing and class probabilities; in backward only the gradient of x,
which the caller sums over the ranks::

    loss, _ = linear_cross_entropy(x, w, target=t, spec="v7 shard_of=9", first=0, group=g)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fxpass.op import losses, sharded
from fxpass.op.collectives import all_reduce
from fxpass.op.losses import Inputs
from fxpass.spec.spec import Spec


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    target: Tensor | None = None,
    class_weight: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    spec: str,
    first: int,
    group: str | None,
    row_groups: tuple[str, ...] = (),
    save_logits: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy over the classes of all ranks of ``group``.

    Args:
        x: ``[N, D]`` floating point, the same on all ranks of ``group``. Backward returns this
            rank's part of its gradient; the caller sums over ``group``.
        weight: ``[V_r, D]``, dtype of x, the classes from ``first`` on; V_r may be 0.
        bias: ``[V_r]``, dtype of x, or None.
        target: class indices ``[N]`` among all classes, or class probabilities ``[N, V]``; None if
            the spec says ``target=none``.
        class_weight: ``[V]`` floating point, of all classes, or None.
        logits: ``[N, V_r]`` if the graph needs them anyway, else None; has no gradient.
        spec: the text of a :class:`fxpass.spec.spec.Spec`; with a group, ``shard_of`` is V.
        first: this rank's first class.
        group: name of the process group that shards the classes; None if this rank has all classes.
        row_groups: names of groups that shard the rows; ``mean`` is over the rows of all ranks.
        save_logits: whether logits ``[N, V_r]``, in the dtype of x, are computed once and saved for
            backward; otherwise backward recomputes them.

    Returns:
        loss: f32 (f64 for f64 operands), ``[N]`` for ``none``, else this rank's part of a scalar:
            the sum over ``row_groups`` is the loss.
        lse: ``[N]`` if the spec says ``lse=true``, else None.

    Raises:
        IndexError: a class index is outside ``[0, V)`` and not ``ignore_index`` (on CPU; on GPUs a
            device-side assertion fails).
    """
    s = Spec.parse(spec)
    if save_logits:
        logits = _logits(x, weight, bias)
    inputs = Inputs(x, weight, bias, target, class_weight, logits)
    factor = None
    if s.reduction == "mean":
        count = losses.counted(inputs, s)
        for rows in row_groups:
            count = all_reduce(count, "sum", rows)
        factor = losses.of_mean(count, inputs)
    found = losses.terms(inputs, s, factor, None if group is None else first)
    of_rows = s if group is None else s.of_shard()
    if of_rows.totals:
        return losses.total(inputs, s, found, factor), None
    if group is None:
        outputs, *_ = losses.reduced(inputs, s, found)
    else:
        text = of_rows.reductions(class_weight is not None).text()
        operands = x, weight, bias, None, found.picks, found.given, logits, text
        outputs, _ = sharded.class_reductions(
            *operands, first=first, classes=s.shard_of, group=group
        )
    loss, lse = losses.rows(inputs, of_rows, found, outputs)
    return losses.added(loss, s, factor), lse if s.lse else None


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear's output without autograd; the operator differentiates x, weight and bias."""
    # the graph's casts are explicit: an ambient autocast must not cast again
    with torch.no_grad(), torch.amp.autocast(x.device.type, enabled=False):
        return F.linear(x, weight, bias)
