"""Specs from their text form.

In: a text. Out: the record::

    >>> spec_of("outputs=lse;moment(1,1,0) gradients=x,weight").outputs
    ('lse', Moment(a=1, b=1, weight=0))
"""

from __future__ import annotations

import re
from typing import Any

from fxpass.formula.expression import Z, parse
from fxpass.formula.outputs import Moment, Output
from fxpass.formula.reductions import Reductions


def spec_of(text: str) -> Reductions:
    """The record whose text form this is; fields in any order."""
    found = dict(word.split("=", 1) for word in text.split(" "))
    outputs, total, detached = (
        outputs_of(found.pop(k, "")) for k in ("outputs", "total", "detached")
    )
    transform = parse(found.pop("transform")) if "transform" in found else Z
    names = {k: tuple(found.pop(k).split(",")) for k in ("gradients", "unrounded") if k in found}
    more: dict[str, Any] = {"memory_mb": int(found.pop("memory_mb", "0")), **found, **names}
    return Reductions(outputs, transform, total=total, detached=detached, **more)


def outputs_of(text: str) -> tuple[Output, ...]:
    """Outputs by their names, with ";" between them."""
    return tuple(map(_output, filter(None, text.split(";"))))


def _output(word: str) -> Output:
    if match := re.fullmatch(r"moment\((\d),(\d)(?:,(\d+))?\)", word):
        return Moment(*map(int, filter(None, match.groups())))
    return word
