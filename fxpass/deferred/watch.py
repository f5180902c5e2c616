"""Reports the deferred logits that a program computes, with the line and the reason.

In: a run whose logits are computed now. Out: a line of the program::

    with watched() as found:
        logits.sort(0)
    [*map(str, found)]    train.py:9 computes the logits ...: sort works ...
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fxpass import messages
from fxpass.deferred.run import Run
from fxpass.formula.dtypes import dtype_name
from fxpass.graph.source import calling_line, warn_once

log = logging.getLogger(__name__)

_why = threading.local()  # the function that computes logits now, and the reason


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
        bytes: their size.
        source: the user's line of the head.
        line: the line of the program that computes them.
        why: the function that reads them, and why it is not answered; empty if unknown.
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
        _watchers[:] = [other for other in _watchers if other is not watcher]


def note_computed(run: Run | None) -> None:
    """Reports, unless there is no run, that the program computes logits now; and warns, once a
    process, if their loss could be fused."""
    if run is None or run.inputs is None:
        return
    line = calling_line()
    why = getattr(_why, "text", "")
    if run.recipe.requires_grad:
        text = messages.COMPUTES_LOGITS.format(
            line=line, logits=_layout(run), source=run.recipe.source, why=why
        )
        warn_once(log, "deferred logits", messages.with_code(text))
    for found, reported in _watchers:
        for root in (root for root in run.roots if root not in reported):
            reported.add(root)
            size = root.like.numel() * root.like.itemsize
            found.append(Computed(_layout(root), size, root.recipe.source, line, why))


def _layout(run: Run) -> str:
    return f"{dtype_name(run.like.dtype)}{list(run.like.shape)}"
