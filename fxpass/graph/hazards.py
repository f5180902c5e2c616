"""Finds writes that make it wrong to recompute nodes at a later node of the graph.

In: the nodes, and the later node. Out: the first hazard, as a node and a reason, or None::

    %z = linear(%h, %w);  %h.add_(1);  %loss = cross_entropy(%z, %t)    ->    %h.add_ changes %h
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from fxpass.graph.calls import storage, written
from fxpass.graph.functions import reads_values
from fxpass.graph.nodes import is_tensor
from fxpass.graph.source import call_name, source_line

Hazard = tuple[Node, str]


def hazard(pattern: Collection[Node], last: Node) -> Hazard | None:
    """The first reason why ``pattern``, recomputed at ``last``, would give another result.

    Args:
        pattern: nodes of one graph. They are recomputed from each other's recomputed values, and
            from the values that all other operands have at ``last``.
        last: the last node of the pattern, a node after it, or the graph's output.

    A node outside the pattern must not write to an operand or a result of a pattern node, between
    this node and ``last``. A pattern node may write to its operand (``z += 1``) if no node outside
    the pattern reads an earlier alias of the operand.
    """
    inside = set(pattern)
    nodes = [node for node in last.graph.nodes if node in inside]
    first: dict[int | None, Node] = {}  # memory -> the first pattern node that uses it
    for node in nodes:
        for tensor in (*node.all_input_nodes, node):
            if is_tensor(tensor):
                first.setdefault(storage(tensor), node)
    ends = last.op == "output"
    when = "before the end of the graph" if ends else "between the linear and the loss"
    node = nodes[0]
    while node is not last:
        if node in inside:
            found = _seen_from_outside(node, inside)
            if found:
                return found
        else:
            for operand in written(node):
                at = storage(operand)
                if at is None or (at in first and first[at] < node):
                    call = f"%{node.name} ({call_name(node)})"
                    return node, f"{call} may change %{operand.name} in place {when}"
        node = node.next
    return None


def _seen_from_outside(writer: Node, pattern: Collection[Node]) -> Hazard | None:
    """The hazard that an input, or a user outside the pattern, sees the write of ``writer``."""
    changed = {storage(n) for n in written(writer)}
    if not changed:
        return None
    for alias in (n for n in writer.graph.nodes if n < writer and is_tensor(n)):
        if storage(alias) not in changed:
            continue
        reader = next((u for u in alias.users if u not in pattern and reads_values(u, alias)), None)
        if reader is not None or alias.op in ("placeholder", "get_attr"):
            seen = f"also read by %{reader.name} ({source_line(reader)})" if reader else "an input"
            return writer, (
                f"%{writer.name} ({call_name(writer)}) changes %{alias.name} in place, which is "
                f"{seen}"
            )
    return None
