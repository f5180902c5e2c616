"""The operator calls of one vocabulary shard, for reductions over the classes of all shards.

In: :class:`fxpass.spec.reductions.Reductions` of all classes. Out: those that forward and backward
of :mod:`fxpass.op.sharded` call the operator with::

    >>> whole = Reductions(("pick", Moment(1, 1)), gradients=("x",), shard=True)
    >>> of_forward(whole).text()
    'r5 outputs=lse;at;moment(1,1) shard=1'
    >>> of_backward(whole).text()
    'r5 outputs=lse;at;moment(1,1) gradients=x shard=1'

A sum that takes a second pass reads the lse, its rounding error, and values at picks. Those of all
classes are known before this pass, so that they are given, and the sum is one of a function of the
logit::

    >>> squares = Reductions((Sum(given(0) * function("exp", L) ** 2),))
    >>> of_second_pass(squares).text()
    'r5 outputs=sum(given0*exp(log_softmax(z,given1,given2))**2)'
    >>> known_rows(squares)
    (('lse', 0), ('rest', 0))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sympy import Symbol
from torch import Tensor

from fxpass.spec.expression import L, Z, given, operands
from fxpass.spec.functions import call as function
from fxpass.spec.operands import Operands
from fxpass.spec.outputs import OF_PICKS, Moment, Output, Sum
from fxpass.spec.reductions import Reductions, for_slopes, raw
from fxpass.spec.terms import Terms


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
    picks = any(kind in OF_PICKS for kind, _ in known_rows(spec))
    outputs += ["at"] * (picks or not named.isdisjoint(OF_PICKS))
    outputs += ["amax"] * spec.ranks
    outputs += [*raw(("lse", *spec.outputs))[1:], *(o for o in spec.sums if not o.late)]
    # a gradient of max and peak goes to the first class
    if spec.indices or (spec.gradients and not named.isdisjoint(("max", "peak"))):
        outputs.append("argmax")
    return replace(of_backward(spec), outputs=tuple(outputs), gradients=())


def of_second_pass(spec: Reductions) -> Reductions:
    """The sums of ``spec.late``, those that backward reads too, from given :func:`known_rows`."""
    outputs = tuple(_given(spec, output) for output in spec.late)
    return replace(of_backward(spec), outputs=outputs, gradients=())


def of_backward(spec: Reductions) -> Reductions:
    """The outputs whose gradients, with the lse and the moments of all classes, are those of
    ``spec`` at one shard's logits, from given :func:`known_rows`."""
    sums = [output for output in spec.outputs if isinstance(output, Sum)]
    of_lse, at = added(dict.fromkeys(sums, 1), dict.fromkeys(for_slopes(sums), 1))
    named = {*spec.outputs, *["lse"] * bool(of_lse), *["at"] * bool(at)}
    outputs: list[Output] = [o for o, parts in PARTS.items() if not named.isdisjoint(parts)]
    outputs += [_given(spec, o) for o in spec.outputs if isinstance(o, Moment | Sum)]
    outputs += spec.indices  # the logits are rounded as in forward
    return replace(spec, outputs=tuple(outputs))


# ---------------------------------------------------------------- second passes


def known_rows(spec: Reductions) -> tuple[tuple[str, int], ...]:
    """What late sums read of a row, in the order in which it is given after the spec's own values:
    ``lse`` and ``rest``, and ``at`` and ``pick`` with the position of the pick."""
    log = any(output.function.has(L) for output in spec.late)
    read = {one for o in spec.late for one in operands(o.function) if one[0] in OF_PICKS}
    return (*((("lse", 0), ("rest", 0)) if log else ()), *sorted(read))


def with_known(operands: Operands, spec: Reductions, known: Tensor) -> Operands:
    """The operands of a second pass and of backward. ``known``: the values of :func:`known_rows`,
    ``[K, N]``."""
    rows = (row.unsqueeze(1).expand(-1, len(operands.weight)) for row in known)
    given = (*operands.given[: spec.least_given], *rows) if len(known) else operands.given
    return operands._replace(given=given)


def added(
    incoming: Mapping[Sum, Any], sums: Mapping[Any, Any]
) -> tuple[Any, list[tuple[int, Any]]]:
    """What the incoming gradients of sums add to those of the lse, and of the logits at picks, by
    position. ``sums`` has those of :func:`fxpass.spec.reductions.for_slopes`."""
    terms = Terms()
    for output, grad in incoming.items():
        terms.add_output(output, grad, sums)
    return terms.coefficients.get((1, None), {0: 0})[0], terms.at


def _given(spec: Reductions, output: Output) -> Output:
    """A late sum as one of what is given."""
    if not (isinstance(output, Sum) and output.late):
        return output
    rows = known_rows(spec)
    found = {name: given(spec.least_given + i) for i, name in enumerate(rows)}
    names: dict[Any, Any] = {Symbol(f"{kind}{i}"): s for (kind, i), s in found.items()}
    if ("lse", 0) in found:
        name = "log_softmax" if output.of_softmax else "difference"
        names[L] = function(name, Z, found["lse", 0], found["rest", 0])
    return Sum(output.function.xreplace(names))  # type: ignore[arg-type]
