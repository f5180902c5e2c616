"""The canonical layout of real tensors: views of rows, and the way back.

In: a tensor of a program, and its tag. Out: the same in the canonical layout ``[n, ...]``, one
dimension of rows first; or a tensor in that layout with the shape that the program has::

    rows_first(labels, "rr", (), size)      labels [B, T]    ->   [n]
    in_place_of(rows, "rkr", shape)         rows [n, 5]      ->   [B, 5, T]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxpass.capture.values import RowOp

A = torch.ops.aten


def orders(letters: str) -> tuple[list[int], list[int]]:
    """The dimensions of rows, and the others."""
    rows = [i for i, letter in enumerate(letters) if letter == "r"]
    return rows, [i for i, letter in enumerate(letters) if letter != "r"]


def canonical(tensor: Tensor, tag: str) -> Tensor:
    """``[n, ...]``: one dimension of rows, then the others."""
    rows, others = orders(tag)
    moved = tensor.permute([*rows, *others])
    return moved.flatten(0, len(rows) - 1) if rows else moved[None]


def in_place_of(rows: Tensor, tag: str, shape: Sequence[int]) -> Tensor:
    """A canonical tensor with the shape of the program's."""
    of_rows, others = orders(tag)
    order = [*of_rows, *others]
    moved = rows.reshape([shape[i] for i in order])
    return moved.permute([order.index(i) for i in range(len(order))])


def rows_first(
    tensor: Tensor, letters: str, chain: Sequence[RowOp], arguments: Callable[[Any], Any]
) -> Tensor:
    """An operand ``[n, ...]``, after views of its rows.

    Args:
        tensor: the operand.
        letters: what its dimensions are.
        chain: the views.
        arguments: makes tensors and numbers of what a view is given.
    """
    rows, others = orders(letters)
    return viewed(tensor.permute([*rows, *others]), chain, len(rows), arguments)


def viewed(
    tensor: Tensor, chain: Sequence[RowOp], rows: int, arguments: Callable[[Any], Any]
) -> Tensor:
    """``[*rows, ...]`` after views of its rows, as ``[n, ...]``."""
    for op in chain:
        tensor = _VIEWS[op.kind](tensor, op.before, *arguments(op.args))
        rows = op.after
    return tensor[None] if rows == 0 else tensor.flatten(0, rows - 1)


def _broadcast(tensor: Tensor, before: int, places: Any, sizes: Any) -> Tensor:
    inside = tensor.shape[before:]
    for i, place in enumerate(places):
        if place is None:
            tensor = tensor.unsqueeze(i)
    return tensor.expand(*sizes, *inside)


_VIEWS: dict[str, Callable[..., Tensor]] = {
    "reshape": lambda t, before, sizes: t.reshape(*sizes, *t.shape[before:]),
    "permute": lambda t, before, order: t.permute(*order, *range(before, t.dim())),
    "slice": lambda t, before, *args: A.slice.Tensor(t, *args),
    "narrow": lambda t, before, *args: torch.narrow(t, *args),
    "select": lambda t, before, *args: t.select(*args),
    "flip": lambda t, before, dims: t.flip(dims),
    "roll": lambda t, before, *args: t.roll(*args),
    "index": lambda t, before, indices, *size: A.index.Tensor(t, list(indices)),
    "broadcast": _broadcast,
}
