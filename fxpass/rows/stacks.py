"""Stacks of logits, part by part: what is computed of each part, and is reduced over the parts.

In: a graph. Out: the graph, changed in place. The rows of parts are those of logits, which can be
chosen (:mod:`fxpass.rows.chosen`); those of a stack are not::

    logsumexp(cat([unsqueeze(a, 0), unsqueeze(b, 0)]) * 2, [0])    logaddexp(a * 2, b * 2)
    select(exp(cat([unsqueeze(a, 0), unsqueeze(b, 0)])), 0, 1)     exp(b)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxpass.rows.outer import Outer
from fxpass.rows.rules import A, bound
from fxpass.rows.sizes import is_one, is_tensor, key, packet, shape, value

_REDUCED = {A.logsumexp: A.logaddexp.default, A.sum: A.add.Tensor}
_REDUCED |= {A.amax: A.maximum.default, A.amin: A.minimum.default}
MOST = 8  # parts


def unstack(graph: Graph, products: Iterable[Node]) -> None:
    """Replaces what is read of stacks of tensors with the classes of ``products`` of heads.

    NOTE: three parts of 16 bits, or more, have a sum that rounds once: they stay.
    """
    if not any(packet(node) is A.cat and _stacked(node) for node in graph.nodes):
        return
    classes = {key(shape(node)[-1]) for node in products}
    stacks = _Stacks(graph)
    for node in list(graph.nodes):
        if is_tensor(node) and len(shape(node)) > 1 and key(shape(node)[-1]) in classes:
            stacks.visit(node)
    stacks.outer.sort()
    graph.eliminate_dead_code()


class _Stacks:
    def __init__(self, graph: Graph) -> None:
        self.outer = Outer(graph)
        self.parts: dict[Node, list[Any]] = {}

    def visit(self, node: Node) -> None:
        """Replaces a node, or notes of which parts it is a stack."""
        self.outer.trace = node.meta.get("stack_trace")
        what = packet(node)
        source = node.args[0] if node.args else None
        if what is A.cat:
            if parts := _stacked(node):
                self.parts[node] = [self._one(part) for part in parts]
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()) or what in (A.clone, A.alias):
            self._each(node)
        elif source not in self.parts:
            return
        elif what is A.select and not bound(node)["dim"]:
            i: Any = bound(node)["index"]
            if isinstance(i, int):
                node.replace_all_uses_with(self.parts[source][i])  # pyright: ignore
        elif what in _REDUCED:
            self._reduced(node, self.parts[source])  # pyright: ignore[reportArgumentType]

    def _one(self, node: Node) -> Node:
        """A tensor ``[1, ...]`` without its first dimension."""
        if packet(node) is A.unsqueeze:
            return node.args[0]  # pyright: ignore[reportReturnType]
        return self.outer.call(A.select.int, node, 0, 0)

    def _each(self, node: Node) -> None:
        rank = len(shape(node))
        tensors = [a for a in node.all_input_nodes if is_tensor(a)]
        stacked = [a for a in tensors if a in self.parts]
        if not stacked or torch.Tag.nondeterministic_seeded in node.target.tags:  # pyright: ignore
            return
        others = [a for a in tensors if a not in self.parts and len(shape(a)) == rank]
        if not all(is_one(shape(a)[0]) for a in others):
            return
        of: dict[Node, Any] = {a: [self._one(a)] for a in others} | {
            a: self.parts[a] for a in stacked
        }

        def part(i: int) -> Node:
            given = map_arg(
                (node.args, node.kwargs), lambda a: of[a][i % len(of[a])] if a in of else a
            )
            return self.outer.call(node.target, *given[0], **given[1])

        self.parts[node] = [part(i) for i in range(len(self.parts[stacked[0]]))]

    def _reduced(self, node: Node, parts: list[Node]) -> None:
        named = bound(node)
        dtype = value(node).dtype
        rounds = len(parts) > 2 and dtype.itemsize < 4
        if list(named["dim"] or ()) != [0] or rounds or dtype != value(parts[0]).dtype:
            return
        total, *more = parts
        for one in more:
            total = self.outer.call(_REDUCED[packet(node)], total, one)
        if named.get("keepdim"):
            total = self.outer.call(A.unsqueeze.default, total, 0)
        node.replace_all_uses_with(total)


def _stacked(node: Node) -> Sequence[Node]:
    """The tensors ``[1, ...]`` that are joined; none for another call."""
    tensors: Any = node.args[0]
    rank = len(shape(node))
    along = bound(node)["dim"]
    whole = 1 < len(tensors) <= MOST and rank > 2 and not along % rank
    return tensors if whole and all(is_one(shape(t)[0]) for t in tensors) else ()
