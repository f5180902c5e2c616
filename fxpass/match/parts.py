"""Pieces of a head's rows become one reading of all rows, if together they are all rows.

In: a flow whose bases are pieces: ``for piece in logits.split(128)``. Out: the flow with one base
for all of them. An output of a piece is a part of the output of all rows, so that one call computes
the pieces, and gives the weight one gradient::

    lse of rows 0 to 128, lse of rows 128 to 192    ->    parts of the lse of rows 0 to 192

Class indices of the pieces are concatenated. Pieces with values [N, V] of their own stay pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sympy import Symbol

from fxpass.graph.nodes import value
from fxpass.match.classes import Classes, Flow
from fxpass.match.edits import Part, Step, operand_of_step, symbols_of
from fxpass.match.outputs import Base, Picked, Summed, given_of
from fxpass.match.views import CLASSES
from fxpass.spec.outputs import Top


def join_pieces(flow: Flow) -> None:
    """Replaces the bases of pieces by bases of all rows."""
    groups: dict[Any, list[tuple[Part, Base]]] = {}
    for base in flow.bases:
        part = _part(base.steps[-1]) if base.steps else None
        read = symbols_of(base.logit)  # of a piece, not of all rows
        if part is not None and not any(map(flow.varies, read)):
            key = (
                tuple(step.node for step in base.steps[:-1]),
                base.transform,
                base.scale,
                base.edits,
            )
            groups.setdefault(key, []).append((part, base))
    for (_, transform, scale, edits), pieces in groups.items():
        step = pieces[0][0].step
        ranges: dict[tuple[int, int | None], list[Base]] = {}
        for part, base in sorted(pieces, key=lambda piece: piece[0].start):
            ranges.setdefault((part.start, part.stop), []).append(base)
        picks = _joined_picks(flow, list(ranges.values()))
        if picks is None or not _all_rows(list(ranges)):
            continue
        like = Classes(pieces[0][1].steps[:-1], step.view.before, transform, edits=edits)
        whole = flow.base(like, transform, scale)
        for part, base in pieces:
            i = list(ranges).index((part.start, part.stop))
            for symbol in _symbols(flow, base):
                output = flow.outputs[symbol][1]
                if isinstance(output, Picked):
                    mine = replace(output, logit=False)
                    joined = next(pick for pick in picks if pick.pieces[i] == mine)
                    output = replace(joined, logit=output.logit)
                flow.parts[symbol] = flow.output(whole, output), part


def _symbols(flow: Flow, base: Base) -> list[Symbol]:
    return [symbol for symbol, (one, _) in flow.outputs.items() if one is base]


def _part(step: Step) -> Part | None:
    """The rows that a view takes; None if it is no range of the first dimension of the rows."""
    view, shape = step.view, value(operand_of_step(step)).shape
    index = view.args[0] if view.target is operator.getitem and view.classes is None else ()
    taken = [(axis, entry) for axis, entry in enumerate(index) if entry != CLASSES]
    if len(taken) != 1 or len(index) != len(shape):
        return None
    ((axis, entry),) = taken
    size = shape[axis]
    if isinstance(entry, int):
        entry = slice(entry, entry + 1 or None)
    known = isinstance(entry, slice) and all(
        isinstance(e, int | None) for e in (entry.start, entry.stop, entry.step)
    )
    if not known or axis != (1 if view.before == 0 else 0):
        return None
    start, stop, stride = entry.start or 0, entry.stop, entry.step
    if isinstance(size, int):
        start, stop, stride = entry.indices(size)
    if start < 0 or stride not in (None, 1):
        return None
    return Part(step, start, None if isinstance(size, int) and stop == size else stop)


def _all_rows(ranges: Sequence[tuple[int, int | None]]) -> bool:
    """Whether ranges, in the order of their first rows, are all rows, each once."""
    end: int | None = 0
    for start, stop in ranges:
        if end is None or start != end:
            return False
        end = stop
    return end is None


def _joined_picks(flow: Flow, ranges: Sequence[Sequence[Base]]) -> list[Picked] | None:
    """Class indices of all rows, each from indices of the pieces; None if they differ. ``ranges``
    are the bases of each piece."""
    each: list[list[Picked]] = []
    for bases in ranges:
        symbols = [symbol for base in bases for symbol in _symbols(flow, base)]
        outputs = [flow.outputs[symbol][1] for symbol in symbols]
        given = {symbol for o in outputs for symbol in given_of(o)}
        late = any(isinstance(o, Summed) and (o.hits or o.picks) for o in outputs)
        late |= any(isinstance(o, Top) for o in outputs)
        if late or any(map(flow.varies, given)):
            return None
        picks = (replace(o, logit=False) for o in outputs if isinstance(o, Picked))
        each.append(list(dict.fromkeys(picks)))
    if len({len(picks) for picks in each}) != 1:
        return None
    joined = []
    for same in zip(*each, strict=True):
        counts = [pick.count for pick in same]
        if not all(isinstance(count, int) for count in counts) or len(set(counts)) != 1:
            return None
        joined.append(Picked(same[0].index, None, pieces=same))
    return joined
