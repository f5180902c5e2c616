"""The operator calls of one vocabulary shard, for reductions over the classes of all shards.

In: :class:`fxpass.spec.reductions.Reductions` of all classes. Out: those that forward and backward
of :mod:`fxpass.op.sharded` call the operator with::

    >>> whole = Reductions(("pick", Moment(1, 1)), gradients=("x",), shard=True)
    >>> of_forward(whole).text()
    'r6 outputs=lse;at;moment(1,1) shard=1'
    >>> of_backward(whole).text()
    'r6 outputs=lse;at;moment(1,1) gradients=x shard=1'
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fxpass.spec.outputs import OF_PICKS, Moment, Output
from fxpass.spec.reductions import Reductions, raw


class Shard(NamedTuple):
    """A rank's first class, the number of all classes, and the name of the process group."""

    first: int
    classes: int
    group: str


def dealt(classes: int, ranks: int, rank: int) -> tuple[int, int]:
    """A rank's first class and its number of classes, divided as by ``torch.chunk``.

    >>> [dealt(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-classes // ranks)
    first = min(rank * step, classes)
    return first, min(classes, first + step) - first


# An output of a shard's backward: the outputs of all classes that it is part of. A log-softmax is a
# logit, which one shard has, less the lse.
PARTS: dict[Output, tuple[Output, ...]] = {"lse": ("lse", "pick"), "at": OF_PICKS, "max": ("max",)}


def of_forward(spec: Reductions) -> Reductions:
    """What merging reads: the lse, the logits at the picks, the largest logit and its class, all
    lower moments of each moment (``TOTAL`` is 1)."""
    outputs: list[Output] = ["lse", *["at"] * spec.picked, *["max"] * spec.ranks]
    outputs += raw(("lse", *spec.outputs))[1:]
    if spec.indices or (spec.gradients and spec.of_largest):  # the first class has the gradient
        outputs.append("argmax")
    return replace(of_backward(spec), outputs=tuple(outputs), gradients=())


def of_backward(spec: Reductions) -> Reductions:
    """The outputs whose gradients, with the lse and the moments of all classes, are those of
    ``spec`` at one shard's logits."""
    outputs = [o for o, parts in PARTS.items() if not set(parts).isdisjoint(spec.outputs)]
    outputs += [o for o in spec.outputs if isinstance(o, Moment)]
    outputs += spec.indices  # the logits are rounded as in forward
    return replace(spec, outputs=tuple(outputs))
