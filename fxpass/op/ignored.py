"""Leaves rows that add nothing out of all products.

In: which rows of a loop change a result. Out: their indices. Padding and prompts are often more
than half of a batch, and an ignored row would cost as many operations as any other row. A row that
is left out does not change the gradients if it holds nan or inf. Eager multiplies it by 0 and gets
nan gradients; so does a call that leaves no rows out.

Which rows count is known on the device. A CPU looks at them. The host would have to wait for a GPU,
so it asks for their number and reads it at a later call of the same kind, which waits for their
indices if enough of the earlier rows were left out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

# The minimum share of rows left out that is worth the copies of x and of its gradient.
WORTH_COPIES = 1 / 16
# Operations of a head's three products that are worth a wait for the indices of rows. An H200 is
# idle for 0.2 ms then, and computes these in 6 ms.
WORTH_A_WAIT = 4e12


def index_of(counted: Tensor, least: float, operations: float, key: Any) -> Tensor | None:
    """The indices of the rows that count; None if fewer than this share of rows is left out.

    Also None on a GPU, unless an earlier call with this ``key`` left so many rows out; if the
    products are small; while a CUDA graph is captured, which must not depend on values; and where
    torch's algorithms are to be deterministic: an earlier call must not decide how this one rounds.

    Args:
        counted: which rows count, ``[N]``.
        least: the least share of rows left out.
        operations: of the products of all rows.
        key: of calls of the same kind.
    """
    n = counted.shape[0]
    if counted.is_cuda:
        if operations < WORTH_A_WAIT or torch.cuda.is_current_stream_capturing():
            return None
        if torch.are_deterministic_algorithms_enabled():
            return None
        if _EARLIER.left_out(key) <= least:
            _EARLIER.ask(key, counted)
            return None
        index = counted.nonzero()
        _EARLIER.note(key, index.shape[0], n)
    else:
        index = counted.nonzero()
    return index.squeeze(1) if n - index.shape[0] > n * least else None


class _Asked(NamedTuple):
    """The number of rows that count, of ``rows``, as the GPU writes it; ``event`` says when."""

    number: Tensor
    rows: int
    event: Any


class _Earlier:
    """The share of rows that earlier calls left out, by their kind."""

    def __init__(self) -> None:
        self._asked: dict[Any, _Asked] = {}
        self._left_out: dict[Any, float] = {}

    def left_out(self, key: Any) -> float:
        """The share of the latest call that the GPU has told of; 0 for a new kind."""
        asked = self._asked.get(key)
        if asked is not None and asked.event.query():
            self.note(key, int(asked.number), asked.rows)
            self._asked.pop(key, None)
        return self._left_out.get(key, 0.0)

    def note(self, key: Any, counted: int, rows: int) -> None:
        self._left_out[key] = 1 - counted / max(1, rows)

    def ask(self, key: Any, counted: Tensor) -> None:
        """Has the GPU write the number of rows ``[N]`` that count, once it gets there."""
        if key not in self._asked:  # else the GPU is far behind
            number = _pinned()
            number.copy_(counted.count_nonzero(), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._asked[key] = _Asked(number, len(counted), event)


def _pinned() -> Tensor:
    """A number in memory of the host that a GPU writes without a wait."""
    return torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)


_EARLIER = _Earlier()
