"""Which deferred logits a program computes, where, and why: for a warning, and for a report.

In: a run whose logits are computed now. Out: a line of the program::

    with watched() as found:
        logits.sort(0)
    [str(one) for one in found]    train.py:9 computes the logits ...: sort works ...
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fxpass.deferred.run import Run
from fxpass.formula.dtypes import short
from fxpass.graph.source import calling_line, warn_once

log = logging.getLogger(__name__)

_COMPUTED = (
    "{} computes the logits {} of `{}`, which were deferred{}. Compute what reads them in the "
    "compiled function, beside the loss; or have them computed there (FUSEDCE_LOGITS=keep)"
)
_why = threading.local()  # what computes logits now, and why


@contextmanager
def because(function: Any, reason: Exception) -> Iterator[None]:
    """Logits computed inside are computed for a function, for this reason."""
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
        logits: their dtype and shape, as text.
        bytes: of them.
        source: the user's line of the head.
        line: the line of the program that computes them.
        why: what reads them, and why it is not answered; empty if nothing is known.
    """

    logits: str
    bytes: int
    source: str
    line: str
    why: str

    def __str__(self) -> str:
        return f"{self.line} computes the logits {self.logits} of `{self.source}`{self.why}"


_watchers: list[tuple[list[Computed], weakref.WeakSet[Run]]] = []


@contextmanager
def watched() -> Iterator[list[Computed]]:
    """The deferred logits that any thread computes inside, each once."""
    watcher = list[Computed](), weakref.WeakSet[Run]()
    _watchers.append(watcher)
    try:
        yield watcher[0]
    finally:
        _watchers[:] = [one for one in _watchers if one is not watcher]


def note(run: Run | None) -> None:
    """Notes that the program computes logits now, unless they are known; says once a process where
    it computes those whose loss was fused."""
    if run is None or run.inputs is None:
        return
    line = calling_line()
    why = getattr(_why, "text", "")
    if run.recipe.requires_grad:
        text = _COMPUTED.format(line, _layout(run), run.recipe.source, why)
        warn_once(log, "deferred logits", text)
    for found, seen in _watchers:
        for root in (one for one in run.roots if one not in seen):
            seen.add(root)
            size = root.like.numel() * root.like.itemsize
            found.append(Computed(_layout(root), size, root.recipe.source, line, why))


def _layout(run: Run) -> str:
    return f"{short(run.like.dtype)}{list(run.like.shape)}"
