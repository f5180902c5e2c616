"""The inputs of a call of ``fxpass::rows``: the tensors of a graph that a loop reads, and how.

In: a node. Out: records that tell inputs apart; two views of one matrix are one input::

    CallInput("row", x, "rk", (0,), View(N))    matrix_of(permute(weight, [1, 0]))  (weight, True)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from fxpass.rows.aten_calls import A
from fxpass.rows.sizes import is_one, is_tensor_node, key, packet, shape
from fxpass.rows.tags import View
from fxpass.rows.views import permutation

_TURNS = {A.permute, A.t, A.transpose}
_VIEWS = {*_TURNS, A.view, A.reshape, A._unsafe_view, A.unsqueeze, A.squeeze, A.alias}


@dataclass(frozen=True)
class CallInput:
    """An input of a call.

    Attributes:
        kind: ``row``, an operand in the head's rows; ``entries``, an operand whose rows a chunk
            looks up by ``entry_indices``; ``handed``, canonical rows of an earlier call;
            ``shared``, an operand that all rows share; ``row_mask``, the rows of a view;
            ``number``, a number that varies; ``size``, a tensor that only has a size.
        source: the node; of a row mask the view, of a size the symbol.
        letters, places, view: of rows, as in :class:`fxpass.rows.rules.Ref`.
    """

    kind: str
    source: Any
    letters: str = ""
    places: tuple[int | None, ...] = ()
    view: View | None = None


def matrix_of(node: Node) -> tuple[Node, bool]:
    """The matrix behind views of a matrix, and True if the node is its transpose."""
    matrix = node
    turned = False
    swapped = False
    sizes = [key(s) for s in shape(node) if not is_one(s)] if is_tensor_node(node) else []
    if len(sizes) != 2 or len(shape(node)) != 2:
        return node, False
    while node.op == "call_function" and packet(node) in _VIEWS and isinstance(node.args[0], Node):
        source: Node = node.args[0]
        own = [key(s) for s in shape(source) if not is_one(s)]
        if packet(node) in _TURNS:
            swapped ^= _swaps(node, source)
        elif own != ([*reversed(sizes)] if swapped else sizes):
            break
        node = source
        if len(shape(node)) == 2:
            matrix = node
            turned = swapped
    return matrix, turned


def _swaps(node: Node, source: Node) -> bool:
    """True if a permutation swaps the two dimensions of more than one element."""
    large = [d for d in permutation(node) if not is_one(shape(source)[d])]
    return len(large) == 2 and large[0] > large[1]
