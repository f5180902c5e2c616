"""The fused loss as a function, with its options as one record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from sympy import Expr
from torch import Tensor

from fxpass.op.losses import cross_entropy_of, loss_coefficients, reductions_of_loss
from fxpass.op.reductions import class_reductions
from fxpass.spec import expression
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.outputs import Moment, Output
from fxpass.spec.reductions import Reductions

GRADIENTS = ("x", "weight", "bias")


@dataclass(frozen=True)
class Spec:
    """The options of :func:`fused_loss`; ``strategy`` says whether
    forward (``chunked``) or backward (``tiled``) computes the gradients."""

    reduction: str = "mean"
    target: str = "indices"
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    transform: Expr = expression.Z
    gradients: tuple[str, ...] = ()
    strategy: str = "chunked"
    memory_mb: int = 0
    accumulate: str = "auto"

    @property
    def totals(self) -> bool:
        """Whether the operator returns the sum of the rows' losses, and forward its gradients."""
        return self.reduction != "none" and self.strategy == "chunked"

    def reductions(self) -> Reductions:
        """The operator call, without class weights."""
        probabilities = self.target == "probabilities"
        read: list[Output] = [Moment(0, 1, 0) if probabilities else "pick"]
        read += [Moment(0, 1)] * bool(self.label_smoothing)
        outputs, total = ((), tuple(read)) if self.totals else (tuple(read), ())
        return Reductions(outputs, self.transform, self.gradients, total, self.memory_mb)

    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        options = asdict(self)
        options["in_forward"] = options.pop("strategy") == "chunked"
        del options["target"]
        return options


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    target: Tensor | None = None,
    class_weight: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    spec: Spec,
    shard: Shard | None = None,
) -> Tensor:
    """The loss of a spec."""
    assert target is not None
    operands = x, weight, bias, target, class_weight, logits
    return fused_loss(*operands, shard=shard, **spec.options())


class Shard(NamedTuple):
    """The first class of a rank, the number of all classes, and the name of their group."""

    first: int
    classes: int
    group: str


def fused_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None = None,
    logits: Tensor | None = None,
    *,
    wide_x: Tensor | None = None,
    wide_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    transform: Expr = expression.Z,
    gradients: tuple[str, ...] = (),
    in_forward: bool = True,
    memory_mb: int = 0,
    accumulate: str = "auto",
    shard: Shard | None = None,
) -> Tensor:
    """Cross-entropy of ``x @ weight.T + bias`` by the operator, as a rewritten graph computes it.

    Args:
        x, weight, bias, logits: see :class:`fxpass.spec.operands.Operands`.
        target: class indices ``[N]``, or probabilities ``[N, V]``, of all classes.
        class_weight: ``[V]``, of all classes.
        wide_x, wide_weight: what x and weight were cast from, if their gradients are unrounded.
        in_forward: whether forward computes the gradients, if it can.
        shard: the rank's classes; None if this process has all of them.
    """
    of_loss = target, class_weight, label_smoothing
    outputs, given = reductions_of_loss(*of_loss, compute_dtype(x.dtype))
    if shard is not None:
        given = [w[..., shard.first : shard.first + len(weight)] for w in given]
    picks = index = None
    if not target.is_floating_point():
        picks = index = target.long()  # uint8 cannot hold -100
        if ignore_index is not None:
            picks = index.masked_fill(index == ignore_index, 0)
    classes = weight.shape[0] if shard is None else shard.classes
    arguments = index, class_weight, reduction, ignore_index, label_smoothing, classes
    names = tuple(sorted(outputs, key=str))
    operands = x, weight, bias, None, picks, given
    wide = {"x": wide_x, "weight": wide_weight}
    unrounded = tuple(name for name, t in wide.items() if t is not None)
    options = {"memory_mb": memory_mb, "accumulate": accumulate, "unrounded": unrounded}
    if in_forward and reduction != "none" and shard is None:
        zeros = x.new_zeros(x.shape[0], dtype=compute_dtype(x.dtype))
        *found, constant = loss_coefficients(zeros, len(outputs) == 2, *arguments)
        coef = torch.stack([found[outputs.index(name)] for name in names])
        text = Reductions((), transform, gradients, names, **options).text()
        found = class_reductions(*operands, coef, logits, text, wide_x, wide_weight)
        return found["total"] + constant
    text = Reductions(names, transform, gradients, **options).text()
    if shard is None:
        found = class_reductions(*operands, None, logits, text, wide_x, wide_weight)
        rows = found["rows"]
    else:
        from fxpass.op import sharded  # not every PyTorch has torch.distributed

        rows, _ = sharded.class_reductions(*operands, logits, text, **shard._asdict())
    logs = [rows[names.index(output)] for output in outputs]
    return cross_entropy_of(logs[0], logs[1] if len(logs) == 2 else None, *arguments)
