"""Reads what a row function computes of one head's logits.

In: a canonical ATen graph, whose first input is the logits ``[n, V]``. Out: its :class:`Reading`:
rows as expressions of outputs of :mod:`fxpass.spec.reductions`. What reads rows alone is left to
the graph::

    %log = _log_softmax(%z, 1);  %a = gather(%log, 1, %c);  %b = exp(%a)
    ->  %a: pick_c;  %b = exp(%a) stays
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch.fx import Graph, Node

from fxpass.lower.elementwise import VIEWS, pointwise
from fxpass.lower.reading import Reading, is_float, name_of, operand_of, reads_sizes
from fxpass.lower.records import Classes
from fxpass.lower.reduced import REDUCTIONS, of_pair, of_rows
from fxpass.spec.expression import Z


def read(
    graph: Graph, trained: dict[Node, bool], ends: Collection[Node], large: bool = False
) -> Reading:
    """Reads a graph.

    Args:
        graph: the graph; its first placeholder is the logits.
        trained: for each placeholder whether it needs a gradient.
        ends: the results that a gradient may come from.
        large: whether an operand as large as the logits may be made of others.

    Raises:
        Unknown: a call that reads logits is not known here.
    """
    found = Reading(large=large)
    tables, logits = found.tables, next(iter(graph.nodes))
    found.reached = _reached(graph, ends)
    found.classes[logits] = Classes(Z)
    for node in graph.nodes:
        if node.op == "output":
            continue
        inputs = node.all_input_nodes
        known = any(tables.attached[n] for n in inputs)
        tables.attached[node] = trained.get(node, known and is_float(node))
        if name_of(node) == "detach" or reads_sizes(node):
            tables.attached[node] = False
        if node.op == "placeholder" or reads_sizes(node):
            continue
        if any(n in found.classes or n in found.pairs for n in inputs):
            _of_classes(found, node)
        elif any(n in found.late for n in inputs):
            found.late.add(node)
        elif any(n in found.rows for n in inputs):
            if (rows := of_rows(found, node)) is None:
                found.late.add(node)
            else:
                found.rows[node] = rows
    return found


def _reached(graph: Graph, ends: Collection[Node]) -> set[Node]:
    """The nodes that a gradient of some results may reach: through no comparison, no ``detach``."""
    found = {*ends}
    for node in reversed(graph.nodes):
        cut = name_of(node) == "detach" or reads_sizes(node)
        if node.op != "output" and is_float(node) and not found.isdisjoint(node.users) and not cut:
            found.add(node)
    return found


def _of_classes(found: Reading, node: Node) -> None:
    name, args = name_of(node) or getattr(node.target, "__name__", ""), list[Any](node.args)
    if name in REDUCTIONS:
        found.rows[node] = REDUCTIONS[name](found, node)
    elif name == "max" and len(args) > 1:
        found.pairs[node] = operand_of(found, node, args[1])
    elif name == "getitem" and args[0] in found.pairs:
        found.rows[node] = of_pair(found, node)
    else:
        found.classes[node] = VIEWS.get(name, pointwise)(found, node)
