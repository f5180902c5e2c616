"""A function of rows with collectives, in steps: operations between two collectives are compiled.

In: a graph. Out: its steps, in order; each is a graph from values of the steps before::

    >>> lines = ["%0 = input float32[n, 9]", "%1 = aten.amax.default(%0, [1], True)"]
    >>> lines += ["%2 = _c10d_functional.all_reduce.default(%1, 'max', '0')"]
    >>> lines += ["%3 = _c10d_functional.wait_tensor.default(%2)", "%4 = aten.sub.Tensor(%0, %3)"]
    >>> steps = steps_of(graph_of([*lines, "return %4"]))
    >>> [[str(node.target) for node in step.graph.nodes][-2] for step in steps]
    ['aten.amax.default', '_c10d_functional.wait_tensor.default', 'aten.sub.Tensor']

Pointwise values of the logits are not handed from step to step, but recomputed, which costs nothing
in a kernel that reads the logits. Reductions over the classes of a row are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fxpass.region.run import GraphValues, is_view, values_of
from fxpass.region.text import graph_of, is_collective, results_of
from fxpass.region.trace import subgraph

__all__ = ["Step", "graph_of", "steps_of"]

aten: Any = torch.ops.aten

_CHEAP = {aten._to_copy, aten.clone, aten.full, aten.full_like, aten.zeros_like, aten.scatter}
_CHEAP |= {aten.reshape, aten.where, aten.masked_fill, aten.arange}


class Step(NamedTuple):
    """Consecutive operations of a graph.

    Attributes:
        graph: from ``inputs`` to ``results``.
        inputs, results: nodes of the whole graph.
    """

    graph: Graph
    inputs: tuple[Node, ...]
    results: tuple[Node, ...]


def steps_of(graph: Graph) -> list[Step]:
    """The steps of a graph.

    Raises:
        ValueError: a value that is handed on has a size that is no size of an input.
    """
    values = values_of(graph)
    calls = [n for n in graph.nodes if n.op == "call_function" and not _is_size(n, values)]
    groups = [list(group) for _, group in groupby(calls, is_collective)]
    place = {node: i for i, group in enumerate(groups) for node in group}
    order = {node: i for i, node in enumerate(graph.nodes)}
    needed = set(results_of(graph))
    steps = list[Step]()
    for i in reversed(range(len(groups))):
        results = [node for node in groups[i] if node in needed]
        if not results:
            continue

        def is_input(node: Node, now: int = i) -> bool:
            earlier = node in place and place[node] < now
            return node.op == "placeholder" or (earlier and _is_handed_on(node, values))

        inputs = sorted(_inputs_of(results, is_input), key=order.__getitem__)
        needed.update(inputs)
        given = {n: n.meta.get("input") or values.described(n) for n in inputs}
        steps.append(Step(subgraph(graph, given, results), tuple(inputs), tuple(results)))
    return steps[::-1]


def _is_size(node: Node, values: GraphValues) -> bool:
    """Tells if a node gives a number; steps read sizes of their own tensors."""
    return not isinstance(values.results[node], torch.Tensor | list | tuple)


def _is_handed_on(node: Node, values: GraphValues) -> bool:
    """Tells if later steps read a value, and do not recompute it."""
    if node not in values.tensors or is_view(node):
        return False
    narrow = node in values.rows and values.width(node) == 1
    cheap = torch.Tag.pointwise in getattr(node.target, "tags", ())
    cheap = cheap or getattr(node.target, "overloadpacket", None) in _CHEAP
    return narrow or not cheap or any(map(is_collective, node.users))


def _inputs_of(results: Iterable[Node], is_input: Callable[[Node], bool]) -> set[Node]:
    """The inputs from which results are computed."""
    seen = set[Node]()
    todo = list(results)
    inputs = set[Node]()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_input(node):
            inputs.add(node)
        else:
            todo += node.all_input_nodes
    return inputs
