"""Views of rows, as nodes: what a slice does to the rows of logits is done to an operand instead.

In: an emitter of nodes, an operand ``[*rows, ...]``, a :class:`fxpass.capture.values.RowOp`. Out:
a node with the rows of the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from fxpass.capture.values import RowOp

A = torch.ops.aten


def _inner(emitter: Any, node: Node, rows: int) -> list[Any]:
    shape = node.meta["example_value"].shape[rows:]
    return emitter.sizes(shape)


def _reshape(emitter: Any, node: Node, op: RowOp) -> Node:
    inside = _inner(emitter, node, op.before)
    return emitter.call(torch.reshape, node, [*emitter.sizes(op.args[0]), *inside])


def _permute(emitter: Any, node: Node, op: RowOp) -> Node:
    rank = node.meta["example_value"].dim()
    return emitter.call(A.permute.default, node, [*op.args[0], *range(op.before, rank)])


def _slice(emitter: Any, node: Node, op: RowOp) -> Node:
    return emitter.call(A.slice.Tensor, node, *emitter.sizes(op.args))


def _narrow(emitter: Any, node: Node, op: RowOp) -> Node:
    return emitter.call(torch.narrow, node, *emitter.sizes(op.args))


def _select(emitter: Any, node: Node, op: RowOp) -> Node:
    return emitter.call(A.select.int, node, *emitter.sizes(op.args))


def _flip(emitter: Any, node: Node, op: RowOp) -> Node:
    return emitter.call(A.flip.default, node, list(op.args[0]))


def _roll(emitter: Any, node: Node, op: RowOp) -> Node:
    return emitter.call(A.roll.default, node, *map(list, op.args))


def _index(emitter: Any, node: Node, op: RowOp) -> Node:
    indices = [i and emitter.operand(i) for i in op.args[0]]
    new = emitter.call(A.index.Tensor, node, indices)
    for size in op.args[1:]:  # the rows that a mask takes
        if isinstance(size, torch.SymInt):
            dim = len(indices) - 1
            emitter.known_size(size, emitter.call(A.sym_size.int, new, dim))
    return new


def _broadcast(emitter: Any, node: Node, op: RowOp) -> Node:
    places, sizes = op.args
    inside = _inner(emitter, node, op.before)
    for i, place in enumerate(places):
        if place is None:
            node = emitter.call(A.unsqueeze.default, node, i)
    return emitter.call(A.expand.default, node, [*emitter.sizes(sizes), *inside])


VIEWS: dict[str, Any] = {
    "reshape": _reshape,
    "permute": _permute,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    "flip": _flip,
    "roll": _roll,
    "index": _index,
    "broadcast": _broadcast,
}
