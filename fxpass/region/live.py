"""Bytes that a graph of a region has allocated for each row at its worst moment.

In: a graph, and whether Inductor compiles it. Out: bytes, counted on the graph alone: they are the
same on every machine::

    >>> lines = ["%0 = input float32[n, 1000]", "%1 = aten.exp.default(%0)"]
    >>> lines += ["%2 = aten.sum.dim_IntList(%1, [1])", "return %2"]
    >>> graph = graph_of(lines)
    >>> row_bytes(graph, 1, compiled=True), row_bytes(graph, 1, compiled=False)
    (4004, 8004)
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpass.formula.dtypes import LOW_PRECISION
from fxpass.region.run import GraphValues, is_factory, is_view, values_of
from fxpass.region.text import graph_of, results_of

__all__ = ["graph_of", "row_bytes"]

aten: Any = torch.ops.aten

# Inductor computes these where they are read, like pointwise operations and views ...
_FUSED = {aten._to_copy, aten.gather, aten.index, aten.clone, aten.where, aten.masked_fill}
_FUSED |= {aten.full_like, aten.zeros_like, aten.ones_like, aten.new_zeros, aten.new_full}
_FUSED |= {aten.new_ones, aten.fill}
# ... and does not write the operands of these
_REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.argmax, aten.argmin, aten.max}
_REDUCTIONS |= {aten.min, aten.any, aten.all, aten.prod, aten.var, aten.var_mean, aten.std}
# on CPUs, Inductor writes a value of these that is read twice: mark_reuse in its ir.py
_COSTLY = {aten.exp, aten.log, aten.log10, aten.log1p, aten.log2, aten.sigmoid, aten.tanh}
_COSTLY |= {aten._softmax_backward_data, aten.expm1, aten.logaddexp, aten.softplus, aten.elu}
# beyond these counts, Inductor writes a value: config.realize_*_threshold
_MOST_READS = 4
_MOST_OPERATIONS = 30
_SCATTERS = {aten.scatter, aten.scatter_add}  # fused if a row has one index: compile.py
# they copy their operand
_COPIES = {aten.sort, aten.topk, aten.median, aten.kthvalue, aten.mode, aten.argsort}


def row_bytes(graph: Graph, heads: int, compiled: bool) -> int:
    """Bytes of a row: the heads' logits, which are the first inputs, and all computed values.

    Other inputs are not scratch, and not counted. For compiled code, the count is an upper bound:
    Inductor may fuse more than is assumed.
    """
    values = values_of(graph)
    nodes = list(graph.nodes)
    at = {node: index for index, node in enumerate(nodes)}
    owner = {node: _owner(node) for node in nodes}
    size = {node: _bytes(node, values) if owner[node] is node else 0 for node in nodes}
    written = _written(graph, values, owner) if compiled else set(nodes)
    if compiled:  # Inductor may store 16-bit values in float32, in which it computes them
        inner = set(nodes) - set(results_of(graph)) - set(graph.find_nodes(op="placeholder"))
        low = [n for n in inner if n in values.tensors and values.dtype(n) in LOW_PRECISION]
        size |= {n: 2 * size[n] for n in low}
    last = dict.fromkeys(nodes, 0)  # the place of the last reader, fused operations skipped
    for node in reversed(nodes):
        end = at[node] if node in written or node.op == "output" else last[node]
        for read in node.all_input_nodes:
            last[read] = max(last[read], end)
            last[owner[read]] = max(last[owner[read]], last[read])
    change = [0] * (len(nodes) + 1)
    scratch = [0] * len(nodes)
    placeholders = graph.find_nodes(op="placeholder")
    for node in nodes:
        if node in placeholders[:heads]:
            change[0] += size[node]  # alive in the caller
        elif node.op == "call_function" and node in written:
            change[at[node]] += size[node]
            change[max(last[node], at[node]) + 1] -= size[node]
            copies = size[node] if _packet(node) in _COPIES else 0
            scratch[at[node]] = copies + _casts(node, values, compiled)
    now = highest = 0
    for index in range(len(nodes)):
        now += change[index]
        highest = max(highest, now + scratch[index])
    return highest


def _packet(node: Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


def _owner(node: Node) -> Node:
    """The node that allocates the memory of a node."""
    while is_view(node) or node.target is operator.getitem:
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


def _bytes(node: Node, values: GraphValues) -> int:
    """Bytes of a row of a node's value."""
    value = values.results.get(node)
    tensors = value if isinstance(value, (tuple, list)) else [value]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    return sum(values.width_of(t) * t.element_size() for t in tensors)


def _casts(node: Node, values: GraphValues, compiled: bool) -> int:
    """Bytes of a row of the casts that ATen makes within an operation on CPUs."""
    read = [values.tensors[n] for n in node.all_input_nodes if n in values.tensors]
    low = [values.width_of(t) for t in read if t.dtype in LOW_PRECISION]
    if _packet(node) in _SCATTERS or (_packet(node) is aten.mean and not compiled):
        return 4 * max(low, default=0)  # they add up in float32
    tags = getattr(node.target, "tags", ())
    if compiled or not (_packet(node) in _REDUCTIONS or torch.Tag.pointwise in tags):
        return 0
    dtypes = [t.dtype for t in (*read, values.tensors.get(node)) if t is not None and t.dim()]
    widest = reduce(torch.promote_types, dtypes, torch.bool)
    return sum(values.width_of(t) * widest.itemsize for t in read if t.dtype != widest)


def _fused(node: Node, values: GraphValues) -> bool:
    """Tells if Inductor computes a value where it is read."""
    if _packet(node) in _FUSED or node.target is operator.getitem or is_factory(node.target):
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # a size
    if _packet(node) in _SCATTERS:
        _, dim, index, *_ = node.args
        return values.tensors[index].shape[dim] == 1  # pyright: ignore
    return torch.Tag.pointwise in node.target.tags or is_view(node)


def _written(graph: Graph, values: GraphValues, owner: dict[Node, Node]) -> set[Node]:
    """The nodes whose values Inductor writes to memory."""
    written: set[Node] = set(map(owner.__getitem__, results_of(graph)))
    reads: dict[Node, set[Node]] = {}
    count: dict[Node, int] = {}
    costly: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            reads[node] = {node}
            count[node] = 0
            costly[node] = False
            continue
        before = node.all_input_nodes
        if not _fused(node, values):
            if _packet(node) not in _REDUCTIONS:
                written |= {owner[n] for n in before if n.op == "call_function"}
            written.add(node)
        reads[node] = {r for n in before for r in ({n} if owner[n] in written else reads[n])}
        count[node] = 1 + sum(0 if owner[n] in written else count[n] for n in before)
        costly[node] = any(costly[n] and owner[n] not in written for n in before)
        costly[node] |= _packet(node) in _COSTLY
        many = len(reads[node]) > _MOST_READS or costly[node]
        if (len(node.users) > 1 and many) or count[node] > _MOST_OPERATIONS:
            written.add(owner[node])
    return written
