"""What one fused loss computes, apart from its tensors.

The matcher makes a :class:`Spec`. Its text form is the operator's last argument in the graph, and
the key of every cache. Shapes, strides, dtypes and the presence of a bias or of class weights are
not part of a spec: the tensors carry them::

    >>> Spec(reduction="sum", label_smoothing=0.1).text()
    'v7 reduction=sum label_smoothing=0.1'
    >>> Spec.parse('v7 reduction=sum label_smoothing=0.1').label_smoothing
    0.1
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sympy import Expr

from fxpass.spec import expression
from fxpass.spec.reductions import Moment, Output, Reductions

# A change of the operator's outputs, of their meaning, or of the arguments of the calls in its
# backward needs a new revision. Every compiled graph contains the revision, so that a compile cache
# written by another version of fxpass misses instead of pairing an old backward with a new forward.
REVISION = "v7"

REDUCTIONS = ("none", "mean", "sum")
TARGETS = ("indices", "probabilities", "none")
GRADIENTS = ("x", "weight", "bias")
STRATEGIES = ("chunked", "tiled")

ELSEWHERE, IGNORED = -1, -100
_INT64 = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class Spec:
    """One linear cross-entropy.

    Attributes:
        reduction: ``none``, ``mean`` or ``sum``, as in ``F.cross_entropy``.
        target: class ``indices`` (int64 ``[N]``), class ``probabilities`` (float ``[N, V]``), or
            ``none``: the row loss is then the log-sum-exp of the row's logits.
        ignore_index: rows with this class index contribute nothing to the loss; None ignores no
            row. Only for class indices.
        label_smoothing: in [0, 1].
        transform: the logit that enters the loss, as an expression of the linear's output ``z``.
        gradients: which of ``x``, ``weight``, ``bias`` need a gradient, in this order.
        lse: whether the log-sum-exp of every row's logits is an output beside the loss.
        strategy: ``chunked`` (a chunk of rows at a time, gradients in forward) or ``tiled`` (a tile
            of rows and classes at a time, gradients in backward, which recomputes the logits).
        shard_of: the number of all classes where the weight is a vocabulary shard, else 0.
        memory_mb: scratch budget in MiB; 0 leaves it to the plan.
    """

    reduction: str = "mean"
    target: str = "indices"
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    transform: Expr = expression.Z
    gradients: tuple[str, ...] = ()
    lse: bool = False
    shard_of: int = 0
    strategy: str = "chunked"
    memory_mb: int = 0

    def __post_init__(self) -> None:
        _check("reduction", self.reduction, REDUCTIONS)
        _check("target", self.target, TARGETS)
        _check("strategy", self.strategy, STRATEGIES)
        for name in self.gradients:
            _check("gradients", name, GRADIENTS)
        if self.gradients != tuple(name for name in GRADIENTS if name in self.gradients):
            raise ValueError(
                f"gradients must be named once and in the order {', '.join(GRADIENTS)}; got "
                f"{', '.join(self.gradients)}"
            )
        if self.ignore_index is not None and self.ignore_index not in _INT64:
            raise ValueError(f"ignore_index must be an int64, got {self.ignore_index}")
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing must be in [0, 1], got {self.label_smoothing}")
        if self.memory_mb < 0:
            raise ValueError(f"memory_mb must not be negative, got {self.memory_mb}")
        if self.shard_of < 0:
            raise ValueError(f"shard_of must not be negative, got {self.shard_of}")
        for name in ("ignore_index", "label_smoothing"):
            value, default = getattr(self, name), getattr(Spec, name)
            if self.target == "none" and value != default:
                raise ValueError(f"without a target {name} must be {default}, got {value}")

    @property
    def totals(self) -> bool:
        """Whether the operator returns the sum of the rows' losses, and forward its gradients."""
        later = self.gradients and self.strategy == "tiled"
        return self.reduction != "none" and not self.lse and not later

    @property
    def waits(self) -> bool:
        """Whether backward computes the gradients."""
        return bool(self.gradients) and not self.totals

    def outputs(self, weighted: bool = False) -> tuple[Output, ...]:
        """The outputs of the operator whose weighted sum is the loss of a row; ``weighted``:
        there are class weights."""
        if self.target == "none":
            return ("lse",)
        probabilities = self.target == "probabilities"
        found: list[Output] = [Moment(0, 1, 0) if probabilities else "pick"]
        if self.label_smoothing:
            found.append(Moment(0, 1, int(probabilities) if weighted else None))
        return tuple(found)

    def reductions(self, weighted: bool = False) -> Reductions:
        """The operator call of this loss; ``weighted``: there are class weights."""
        read = self.outputs(weighted)
        total = read if self.totals else ()
        outputs = () if total else tuple(dict.fromkeys((*["lse"] * self.lse, *read)))
        return Reductions(outputs, self.transform, self.gradients, total, self.memory_mb)

    def of_shard(self) -> Spec:
        """The spec of one rank's operator call, for this loss over all vocabulary shards."""
        return dataclasses.replace(self, reduction="none", lse=True)

    def text(self) -> str:
        """One line; fields at their defaults are left out, except the reduction."""
        words = [REVISION, f"reduction={self.reduction}"]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                words.append(f"{field.name}={_WRITE.get(field.name, str)(value)}")
        return " ".join(words)

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Spec:
        """The spec of a text form; ``ValueError`` for anything that :meth:`text` cannot write."""
        revision, *words = text.split(" ")
        if revision != REVISION:
            raise ValueError(
                f"this graph was compiled by another version of fxpass ({revision!r}, this is "
                f"{REVISION!r}): clear the compile cache"
            )
        try:
            values = dict(word.split("=", 1) for word in words)
            spec = Spec(**{name: _READ.get(name, str)(value) for name, value in values.items()})
        except (TypeError, ValueError) as error:
            raise ValueError(f"not a spec: {text!r}") from error
        if spec.text() != text:  # one computation, one text, one cache key
            raise ValueError(f"not a spec: {text!r} (it is written {spec.text()!r})")
        return spec


# Text forms of the fields that are not strings.
_WRITE: dict[str, Callable[[Any], str]] = {
    "ignore_index": lambda value: str(value).lower(),
    "transform": expression.text,
    "gradients": ",".join,
    "lse": lambda value: str(value).lower(),
}
_READ: dict[str, Callable[[str], Any]] = {
    "ignore_index": lambda word: None if word == "none" else int(word),
    "label_smoothing": float,
    "transform": expression.parse,
    "gradients": lambda word: tuple(word.split(",")),
    "lse": lambda word: word == "true",
    "shard_of": int,
    "memory_mb": int,
}


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
