"""The operator calls of one vocabulary shard, for reductions over the classes of all shards.

In: :class:`fxpass.spec.reductions.Reductions` of all classes. Out: those that forward and backward
of :mod:`fxpass.op.sharded` call the operator with::

    >>> whole = Reductions(("pick", Moment(1, 1)), gradients=("x",))
    >>> of_forward(whole).text()
    'r5 outputs=lse;at;moment(1,1)'
    >>> of_backward(whole).text()
    'r5 outputs=lse;at;moment(1,1) gradients=x'
"""

from __future__ import annotations

from fxpass.spec.outputs import OF_PICKS, Moment, Output, Sum
from fxpass.spec.reductions import Reductions, raw

# An output of a shard's backward: the outputs of all classes that it is part of. A log-softmax is a
# logit, which one shard has, less the lse.
PARTS: dict[Output, tuple[Output, ...]] = {
    "lse": ("lse", "pick", "peak"),
    "at": OF_PICKS,
    "max": ("max", "peak"),
    "amax": ("amax",),
}


def of_forward(spec: Reductions) -> Reductions:
    """What merging reads: the lse, the logits at the picks, the largest logit and its class, all
    lower moments of each moment (``TOTAL`` is 1), sums of logits."""
    named = set(spec.outputs)
    outputs: list[Output] = ["lse"]
    outputs += ["at"] * (not named.isdisjoint(OF_PICKS)) + ["amax"] * spec.ranks
    outputs += [*raw(("lse", *spec.outputs))[1:], *(o for o in spec.outputs if isinstance(o, Sum))]
    # a gradient of max and peak goes to the first class
    if spec.indices or (spec.gradients and not named.isdisjoint(("max", "peak"))):
        outputs.append("argmax")
    return Reductions(tuple(outputs), spec.transform, memory_mb=spec.memory_mb)


def of_backward(spec: Reductions) -> Reductions:
    """The outputs whose gradients, with the lse and the moments of all classes, are those of
    ``spec`` at one shard's logits."""
    named = set(spec.outputs)
    outputs: list[Output] = [o for o, parts in PARTS.items() if not named.isdisjoint(parts)]
    outputs += [o for o in spec.outputs if isinstance(o, Moment | Sum)]
    outputs += spec.indices  # the logits are rounded as in forward
    return Reductions(tuple(outputs), spec.transform, spec.gradients, memory_mb=spec.memory_mb)
