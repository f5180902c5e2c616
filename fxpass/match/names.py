"""The names that a spec has for the tensors of a call.

In: the symbols of a call's outputs. Out: its index tensors and given values in their order, and the
names by which expressions read them, those of :mod:`fxpass.spec.expression`::

    Summed(given_q * exp(l))    ->    moment(1,0,0)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sympy import Symbol

from fxpass.match.classes import Flow
from fxpass.match.outputs import Base, Picked, Summed, given_of, moment_of
from fxpass.spec import expression
from fxpass.spec.outputs import Output, is_index


@dataclass(frozen=True)
class Names:
    """The tensors of a call.

    Attributes:
        picks: the index tensors of the outputs ``pick`` and ``at``.
        given: the symbols of the values that expressions and moments read.
        of: symbols that expressions read -> their names in the spec.
    """

    picks: tuple[Picked, ...]
    given: tuple[Symbol, ...]
    of: dict[Symbol, Symbol]


def names_of(flow: Flow, base: Base, symbols: Iterable[Symbol]) -> Names:
    """The names of what a call with these outputs reads."""
    outputs = [flow.outputs[s][1] for s in symbols]
    picked = (o for o in outputs if isinstance(o, Picked))
    picks = tuple(dict.fromkeys(replace(o, logit=False) for o in picked))
    given = tuple(dict.fromkeys((*(s for o in outputs for s in given_of(o)), *base.given)))
    return Names(picks, given, {s: expression.given(i) for i, s in enumerate(given)})


def named(flow: Flow, symbols: Iterable[Symbol], names: Names) -> dict[Output, Symbol | None]:
    """Outputs by their names in a spec, in its order; None for those of picks."""
    outputs: dict[Output, Symbol | None] = {}
    for symbol in symbols:
        output = flow.outputs[symbol][1]
        if isinstance(output, Summed):
            moment = moment_of(output.function.xreplace(names.of))  # type: ignore[arg-type]
            assert moment is not None, output
            outputs[moment] = symbol
        elif isinstance(output, Picked):
            outputs["at" if output.logit else "pick"] = None
        else:
            outputs[output] = symbol
    return {o: outputs[o] for o in sorted(outputs, key=lambda o: (is_index(o), str(o)))}
