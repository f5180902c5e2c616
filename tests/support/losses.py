"""The fused loss as a function, with its options as one record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sympy import Expr
from torch import Tensor

from fxpass.op import losses
from fxpass.spec import expression
from fxpass.spec.outputs import Moment, Output
from fxpass.spec.reductions import Reductions

GRADIENTS = ("x", "weight", "bias")


@dataclass(frozen=True)
class Spec:
    """The options of :func:`fxpass.op.losses.linear_cross_entropy`; ``strategy`` says whether
    forward (``chunked``) or backward (``tiled``) computes the gradients."""

    reduction: str = "mean"
    target: str = "indices"
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    transform: Expr = expression.Z
    gradients: tuple[str, ...] = ()
    strategy: str = "chunked"
    memory_mb: int = 0

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
    shard: losses.Shard | None = None,
) -> Tensor:
    """The loss of a spec."""
    assert target is not None
    operands = x, weight, bias, target, class_weight, logits
    return losses.linear_cross_entropy(*operands, shard=shard, **spec.options())
