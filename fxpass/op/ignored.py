"""Leaves rows that contribute nothing out of all products.

In: the mask of the rows that contribute to a result. Out: their indices. Padding and prompts are
often more than half of a batch, and an ignored row would cost as many operations as any other row.
A row that is left out does not change the gradients if it holds nan or inf. Eager multiplies such a
row by 0 and gets nan gradients; so does a call that leaves no rows out.

The mask is on the device. A CPU reads it. The host would have to wait for a GPU, so it asks for the
number of rows and reads this number at a later call of the same kind, which waits for the indices
if enough of the earlier rows were left out.
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


def contributing_index(mask: Tensor, least: float, operations: float, key: Any) -> Tensor | None:
    """The indices of the rows of a mask; None if fewer than this share of rows is left out.

    Also None on a GPU, unless an earlier call with this ``key`` left so many rows out; if the
    products are small; while a CUDA graph is captured, which must not depend on values; and where
    torch's algorithms are to be deterministic: an earlier call must not decide how this one rounds.

    Args:
        mask: of the rows that contribute, ``[N]``.
        least: the least share of rows left out.
        operations: of the products of all rows.
        key: of calls of the same kind.
    """
    n = mask.shape[0]
    if mask.is_cuda:
        if operations < WORTH_A_WAIT or torch.cuda.is_current_stream_capturing():
            return None
        if torch.are_deterministic_algorithms_enabled():
            return None
        if _EARLIER.left_out(key) <= least:
            _EARLIER.ask(key, mask)
            return None
        index = mask.nonzero()
        _EARLIER.record(key, index.shape[0], n)
    else:
        index = mask.nonzero()
    return index.squeeze(1) if n - index.shape[0] > n * least else None


class _Asked(NamedTuple):
    """The number of contributing rows, of ``rows``, which the GPU has written after ``event``."""

    number: Tensor
    rows: int
    event: Any


class _Earlier:
    """The share of rows that earlier calls left out, by their kind."""

    def __init__(self) -> None:
        self._asked: dict[Any, _Asked] = {}
        self._left_out: dict[Any, float] = {}

    def left_out(self, key: Any) -> float:
        """The share of the latest call whose number the GPU has written; 0 for a new kind."""
        asked = self._asked.get(key)
        if asked is not None and asked.event.query():
            self.record(key, int(asked.number), asked.rows)
            self._asked.pop(key, None)
        return self._left_out.get(key, 0.0)

    def record(self, key: Any, contributing: int, rows: int) -> None:
        self._left_out[key] = 1 - contributing / max(1, rows)

    def ask(self, key: Any, mask: Tensor) -> None:
        """Queues a copy of the number of contributing rows to the host."""
        if key not in self._asked:  # else the GPU is far behind
            number = _pinned()
            number.copy_(mask.count_nonzero(), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._asked[key] = _Asked(number, len(mask), event)


def _pinned() -> Tensor:
    """A number in pinned memory of the host."""
    return torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)


_EARLIER = _Earlier()
