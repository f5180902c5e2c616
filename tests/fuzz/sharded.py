"""Programs of one head whose classes are dealt to ranks, against the same programs on one.

In: a seed. Out: a :class:`Case` of :mod:`tests.fuzz.heads`, whose head is a product of DTensors, and
whose logits all ranks gather: at once, or after some steps. Every rank draws, runs and judges the
same programs; they agree on what has failed. ``python -m tests.fuzz --kind sharded`` starts them.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import torch

from .case import Case, Statement
from .heads import head

# Heads of :mod:`tests.fuzz.reductions`, and what they are on ranks.
_HEADS = (
    (r"F\.linear\((x[^,]*), w, b\)", r"F.linear(spread(\1), dealt(w), dealt(b))"),
    (
        r"F\.linear\((x[^,]*|x\[:, :-1\]|x\.reshape\(-1, 4\)), w\)",
        r"F.linear(spread(\1), dealt(w))",
    ),
    (r"x @ w\.T", "spread(x) @ dealt(w).T"),
)
# Names of variables: no methods, and no names of arguments.
_NAMES = re.compile(r"(?<![\w.])[A-Za-z_]\w*(?![\w=])")


def sharded(seed: str) -> Case | None:
    """A program with a sharded head."""
    case, rng = head(seed), random.Random(seed)
    if case is None or not case.body or case.implementation:
        return None
    first, *rest = case.body
    for pattern, text in _HEADS:
        found, count = re.subn(rf"^z = {pattern}", f"z = {text}", first.text)
        if count:
            break
    else:
        return None
    steps = 0
    while steps < len(rest) and _is_step(rest[steps]):
        steps += 1
    gathers = replace(first, text="z = gathered(z)")
    at = rng.randint(0, steps)
    body = (replace(first, text=found), *rest[:at], gathers, *rest[at:])
    options: dict[str, Any] = {**case.options, "fusedce.inner": "aot_eager"}
    return replace(case, body=body, options=options, sharded=True)


def _is_step(statement: Statement) -> bool:
    """Whether a statement computes logits of logits and numbers alone."""
    _, start, text = statement.text.partition("z = ")
    of_logits = {"z", "F", "torch"}.issuperset(_NAMES.findall(text))
    return bool(start) and of_logits and not statement.within


def main(rank: int, world: int, device: torch.device, *arguments: str) -> Any:
    """What a campaign found, the same on each rank."""
    from .campaign import campaign  # which knows this module

    del rank, world, device
    seed, programs, first, reduce = map(int, arguments)
    reported: list[str] = []
    return campaign(
        "sharded", seed, programs, first=first, reduce=bool(reduce), report=reported.append
    )
