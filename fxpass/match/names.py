"""The names that a spec has for the tensors of a call.

In: the symbols of a call's outputs. Out: its index tensors and given values in their order, and the
names by which expressions read them, those of :mod:`fxpass.spec.expression`::

    Summed(where(class_banned > 0, 0, z - hot_labels))    ->    sum(where(given0>0,0,z-hit0))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sympy import Symbol

from fxpass.match.classes import Flow
from fxpass.match.masks import index_of
from fxpass.match.outputs import Base, Picked, Summed, given_of
from fxpass.spec import expression
from fxpass.spec.outputs import Output, is_index, sum_of


@dataclass(frozen=True)
class Names:
    """The tensors of a call.

    Attributes:
        picks: the index tensors of the outputs ``pick`` and ``at``, and of one-hot tensors.
        given: the symbols of the values that expressions and moments read.
        of: symbols that expressions read -> their names in the spec.
    """

    picks: tuple[Picked, ...]
    given: tuple[Symbol, ...]
    of: dict[Symbol, Symbol]


def names_of(flow: Flow, base: Base, symbols: Iterable[Symbol]) -> Names:
    """The names of what a call with these outputs reads."""
    outputs = [flow.outputs[s][1] for s in symbols]
    summed = [o for o in outputs if isinstance(o, Summed)]
    read = (s for o in summed for s in o.picks)
    of_sums = {s: o for s in read if isinstance(o := flow.outputs[s][1], Picked)}
    picked = (o for o in (*outputs, *of_sums.values()) if isinstance(o, Picked))
    picks = tuple(dict.fromkeys(replace(o, logit=False) for o in picked))
    hits = dict.fromkeys((*base.hits, *(s for o in summed for s in o.hits)))
    of_hits = {s: _picked_too(flow.hit(s), picks) for s in hits}
    # those with a number of classes that varies last: what stands before others has to be known
    picks = dict.fromkeys((*picks, *of_hits.values()))
    picks = tuple(sorted(picks, key=lambda pick: not isinstance(pick.count, int)))
    given = tuple(dict.fromkeys((*(s for o in outputs for s in given_of(o)), *base.given)))

    def position(pick: Picked) -> int:
        return sum(int(other.count) for other in picks[: picks.index(pick)])

    names = {s: expression.given(i) for i, s in enumerate(given)}
    names |= {s: expression.hit(position(pick)) for s, pick in of_hits.items()}
    for symbol, pick in of_sums.items():
        kind = "at" if pick.logit else "pick"
        names[symbol] = Symbol(f"{kind}{position(replace(pick, logit=False))}")
    return Names(picks, given, names)


def named(flow: Flow, symbols: Iterable[Symbol], names: Names) -> dict[Output, Symbol | None]:
    """Outputs by their names in a spec, in its order; None for those of picks."""
    outputs: dict[Output, Symbol | None] = {}
    for symbol in symbols:
        output = flow.outputs[symbol][1]
        if isinstance(output, Summed):
            outputs[sum_of(output.function.xreplace(names.of))] = symbol  # type: ignore[arg-type]
        elif isinstance(output, Picked):
            outputs["at" if output.logit else "pick"] = None
        else:
            outputs[output] = symbol
    return {o: outputs[o] for o in sorted(outputs, key=lambda o: (is_index(o), str(o)))}


def _picked_too(hit: Picked, picks: Sequence[Picked]) -> Picked:
    """The classes of a one-hot tensor, as the one of the picks that has them anyway."""
    return next((p for p in picks if _are_alike(p, hit)), hit)


def _are_alike(one: Picked, hit: Picked) -> bool:
    same = one.wraps == hit.wraps and index_of(one.index) is hit.index
    # an ignored index that is no class is none of a one-hot tensor either
    ignored = one.ignored is not None and one.ignored >= 0
    return same and not (one.pieces or one.dim or ignored)
