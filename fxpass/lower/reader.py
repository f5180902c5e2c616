"""Reads the graph of a row function of one head's logits.

In: a canonical ATen graph, whose first input is the logits ``[n, V]``. Out: its :class:`Reading`:
rows as expressions of outputs of :mod:`fxpass.formula.reductions`. Nodes that read rows alone stay
in the graph::

    %log = _log_softmax(%z, 1);  %a = gather(%log, 1, %c);  %b = exp(%a)
    ->  %a: pick_c;  %b = exp(%a) stays
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from fxpass.formula.expression import Z
from fxpass.lower.elementwise import VIEWS, expr_of, pointwise_classes
from fxpass.lower.hot import hot_classes, is_hot
from fxpass.lower.reading import Reading, aten_name, class_dim, operand_of, reads_sizes
from fxpass.lower.reduced import REDUCTIONS, max_item, row_values


def read_graph(graph: Graph) -> Reading:
    """Reads a graph, whose first placeholder is the logits.

    Raises:
        Unknown: no rule reads a call with logits.
    """
    reading = Reading()
    logits = next(iter(graph.nodes))
    reading.classes[logits] = Z
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function" or reads_sizes(node):
            continue
        if any(n in reading.classes or n in reading.pairs for n in inputs):
            _of_classes(reading, node)
        elif is_hot(node, logits):
            reading.classes[node] = hot_classes(reading, node, _expr_reader(reading, node))
        elif any(n in reading.opaque for n in inputs):
            reading.opaque.add(node)
        elif any(n in reading.rows for n in inputs):
            if (rows := row_values(reading, node)) is None:
                reading.opaque.add(node)
            else:
                reading.rows[node] = rows
    return reading


def _expr_reader(reading: Reading, node: Node) -> Any:
    return lambda argument: expr_of(reading, argument, 1, node.meta["val"])


def _of_classes(reading: Reading, node: Node) -> None:
    name = aten_name(node) or getattr(node.target, "__name__", "")
    args = list[Any](node.args)
    if name == "sum" and args[1:2] == [[0]] and class_dim(args[0]) == 1:
        reading.columns[node] = operand_of(reading, node)
    elif name in REDUCTIONS:
        reading.rows[node] = REDUCTIONS[name](reading, node)
    elif name == "max" and len(args) > 1:
        reading.pairs[node] = operand_of(reading, node, args[1])
    elif name == "getitem" and args[0] in reading.pairs:
        reading.rows[node] = max_item(reading, node)
    else:
        reading.classes[node] = VIEWS.get(name, pointwise_classes)(reading, node)
