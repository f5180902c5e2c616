"""Reads what a row function computes of one head's logits.

In: a canonical ATen graph, whose first input is the logits ``[n, V]``. Out: its :class:`Reading`:
rows as expressions of outputs of :mod:`fxpass.formula.reductions`. What reads rows alone is left to
the graph::

    %log = _log_softmax(%z, 1);  %a = gather(%log, 1, %c);  %b = exp(%a)
    ->  %a: pick_c;  %b = exp(%a) stays
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from fxpass.formula.expression import Z
from fxpass.lower.elementwise import VIEWS, expr_of, pointwise
from fxpass.lower.hot import hot, is_hot
from fxpass.lower.reading import (
    Reading,
    class_dim,
    name_of,
    operand_of,
    reads_sizes,
)
from fxpass.lower.records import Classes
from fxpass.lower.reduced import REDUCTIONS, of_pair, of_rows


def read(graph: Graph) -> Reading:
    """Reads a graph, whose first placeholder is the logits.

    Raises:
        Unknown: a call that reads logits is not known here.
    """
    found = Reading()
    logits = next(iter(graph.nodes))
    found.classes[logits] = Classes(Z)
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function" or reads_sizes(node):
            continue
        if any(n in found.classes or n in found.pairs for n in inputs):
            _of_classes(found, node)
        elif is_hot(node, logits):
            found.classes[node] = hot(found, node, _operand(found, node))
        elif any(n in found.late for n in inputs):
            found.late.add(node)
        elif any(n in found.rows for n in inputs):
            if (rows := of_rows(found, node)) is None:
                found.late.add(node)
            else:
                found.rows[node] = rows
    return found


def _operand(found: Reading, node: Node) -> Any:
    return lambda argument: expr_of(found, argument, 1, node.meta["val"])


def _of_classes(found: Reading, node: Node) -> None:
    name = name_of(node) or getattr(node.target, "__name__", "")
    args = list[Any](node.args)
    if name == "sum" and args[1:2] == [[0]] and class_dim(args[0]) == 1:
        found.columns[node] = operand_of(found, node)
    elif name in REDUCTIONS:
        found.rows[node] = REDUCTIONS[name](found, node)
    elif name == "max" and len(args) > 1:
        found.pairs[node] = operand_of(found, node, args[1])
    elif name == "getitem" and args[0] in found.pairs:
        found.rows[node] = of_pair(found, node)
    else:
        found.classes[node] = VIEWS.get(name, pointwise)(found, node)
