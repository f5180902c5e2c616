"""Computes functions of stacked logits part by part, and then reduces the parts.

In: a graph. Out: the graph, changed in place. The rows of a part are rows of logits, which can be
chosen (:mod:`fxpass.rows.chosen`); the rows of a stack are not::

    logsumexp(cat([unsqueeze(a, 0), unsqueeze(b, 0)]) * 2, [0])    logaddexp(a * 2, b * 2)
    select(exp(cat([unsqueeze(a, 0), unsqueeze(b, 0)])), 0, 1)     exp(b)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxpass.rows.aten_calls import A, call_arguments
from fxpass.rows.builder import GraphBuilder
from fxpass.rows.sizes import example, is_one, is_tensor_node, key, packet, shape

_REDUCED = {A.logsumexp: A.logaddexp.default, A.sum: A.add.Tensor}
_REDUCED |= {A.amax: A.maximum.default, A.amin: A.minimum.default}
_MAX_PARTS = 8


def unstack(graph: Graph, products: Iterable[Node]) -> None:
    """Replaces reductions and selections of stacked tensors that have the classes of ``products``.

    Sums of three or more 16-bit parts stay: eager rounds such a sum once.
    """
    if not any(packet(node) is A.cat and _stacked(node) for node in graph.nodes):
        return
    classes = {key(shape(node)[-1]) for node in products}
    stacks = _Stacks(graph)
    for node in list(graph.nodes):
        if is_tensor_node(node) and len(shape(node)) > 1 and key(shape(node)[-1]) in classes:
            stacks.visit(node)
    stacks.builder.sort()
    graph.eliminate_dead_code()


class _Stacks:
    def __init__(self, graph: Graph) -> None:
        self.builder = GraphBuilder(graph)
        self.parts: dict[Node, list[Any]] = {}

    def visit(self, node: Node) -> None:
        """Replaces a node, or notes the parts of which it is a stack."""
        self.builder.trace = node.meta.get("stack_trace")
        target = packet(node)
        source = node.args[0] if node.args else None
        if target is A.cat:
            if parts := _stacked(node):
                self.parts[node] = [self._squeezed(part) for part in parts]
        elif torch.Tag.pointwise in getattr(node.target, "tags", ()) or target in (
            A.clone,
            A.alias,
        ):
            self._compute_parts(node)
        elif source not in self.parts:
            return
        elif target is A.select and not call_arguments(node)["dim"]:
            i: Any = call_arguments(node)["index"]
            if isinstance(i, int):
                node.replace_all_uses_with(self.parts[source][i])  # pyright: ignore
        elif target in _REDUCED:
            self._reduce(node, self.parts[source])  # pyright: ignore[reportArgumentType]

    def _squeezed(self, node: Node) -> Node:
        """A tensor ``[1, ...]`` without its first dimension."""
        if packet(node) is A.unsqueeze:
            return node.args[0]  # pyright: ignore[reportReturnType]
        return self.builder.call(A.select.int, node, 0, 0)

    def _compute_parts(self, node: Node) -> None:
        """Computes an elementwise call of stacks part by part."""
        rank = len(shape(node))
        tensors = [a for a in node.all_input_nodes if is_tensor_node(a)]
        stacked = [a for a in tensors if a in self.parts]
        if not stacked or torch.Tag.nondeterministic_seeded in node.target.tags:  # pyright: ignore
            return
        others = [a for a in tensors if a not in self.parts and len(shape(a)) == rank]
        if not all(is_one(shape(a)[0]) for a in others):
            return
        squeezed = {a: self._squeezed(a) for a in others}

        def part(i: int) -> Node:
            own = squeezed | {a: self.parts[a][i] for a in stacked}
            args, kwargs = map_arg((node.args, node.kwargs), lambda a: own.get(a, a))
            return self.builder.call(node.target, *args, **kwargs)

        self.parts[node] = [part(i) for i in range(len(self.parts[stacked[0]]))]

    def _reduce(self, node: Node, parts: list[Node]) -> None:
        named = call_arguments(node)
        dtype = example(node).dtype
        rounds = len(parts) > 2 and dtype.itemsize < 4
        if list(named["dim"] or ()) != [0] or rounds or dtype != example(parts[0]).dtype:
            return
        total, *rest = parts
        for part in rest:
            total = self.builder.call(_REDUCED[packet(node)], total, part)
        if named.get("keepdim"):
            total = self.builder.call(A.unsqueeze.default, total, 0)
        node.replace_all_uses_with(total)


def _stacked(node: Node) -> Sequence[Node]:
    """The tensors ``[1, ...]`` that are joined; none for another call."""
    tensors: Any = node.args[0]
    rank = len(shape(node))
    along = call_arguments(node)["dim"]
    fits = 1 < len(tensors) <= _MAX_PARTS and rank > 2 and not along % rank
    return tensors if fits and all(is_one(shape(t)[0]) for t in tensors) else ()
