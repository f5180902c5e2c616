"""Which deferred logits a program computes, where, and why: for a warning, and for a report.

In: a run whose logits are computed now. Out: a line of the program::

    with watched() as found:
        logits.sort(0)
    [str(one) for one in found.values()]    train.py:9 computes the logits ...: sort works ...
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fxpass.deferred.run import Run
from fxpass.graph.source import calling_line, warn_once
from fxpass.spec.dtypes import short

log = logging.getLogger(__name__)

_COMPUTED = (
    "{} computes the logits {} of `{}`, which were deferred{}. Compute what reads them in the "
    "compiled function, beside the loss; or have them computed there (FUSEDCE_LOGITS=keep)"
)
_why = threading.local()  # what computes logits now, and why


@contextmanager
def because(function: Any, reason: Exception) -> Iterator[None]:
    """What is computed inside is computed for a function, for this reason."""
    before = getattr(_why, "text", "")
    _why.text = f": {getattr(function, '__name__', function)} {reason}"
    try:
        yield
    finally:
        _why.text = before


@dataclass(frozen=True)
class Computed:
    """Deferred logits that a program computed.

    Attributes:
        run: of the logits.
        line: the line of the program that computes them.
        why: what reads them, and why it is not answered; empty if nothing is known.
    """

    run: Run
    line: str
    why: str

    @property
    def bytes(self) -> int:
        """Bytes of the logits."""
        return self.run.like.numel() * self.run.like.itemsize

    def __str__(self) -> str:
        logits = f"{short(self.run.like.dtype)}{list(self.run.like.shape)}"
        return f"{self.line} computes the logits {logits} of `{self.run.recipe.source}`{self.why}"


_watchers: list[dict[int, Computed]] = []


@contextmanager
def watched() -> Iterator[dict[int, Computed]]:
    """Which deferred logits any thread computes inside, by the identity of their run."""
    found: dict[int, Computed] = {}
    _watchers.append(found)
    try:
        yield found
    finally:
        _watchers.remove(found)


def note(run: Run | None) -> None:
    """Notes that the program computes logits now, unless they are known; says once a process where
    it computes those whose loss was fused."""
    if run is None or run.inputs is None:
        return
    line, why = calling_line(), getattr(_why, "text", "")
    if run.recipe.requires_grad:
        logits = f"{short(run.like.dtype)}{list(run.like.shape)}"
        text = _COMPUTED.format(line, logits, run.recipe.source, why)
        warn_once(log, "deferred logits", text)
    for root in getattr(run, "roots", [run]):
        for found in _watchers:
            found.setdefault(id(root), Computed(root, line, why))
