"""What could make it wrong to compute some nodes of a graph later than where they stand.

In: the nodes, and the one at which their meaning is computed instead. Out: the first hazard, as a
node and a reason, or None::

    %z = linear(%h, %w);  %h.add_(1);  %loss = cross_entropy(%z, %t)    ->    %h.add_ changes %h
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from fxpass.graph.calls import storage, written
from fxpass.graph.nodes import is_tensor, reads_values
from fxpass.graph.source import call_name, source_line

Hazard = tuple[Node, str]


def hazard(pattern: Collection[Node], last: Node) -> Hazard | None:
    """The first reason why ``pattern`` cannot be computed at ``last`` with the same result.

    Args:
        pattern: nodes of one graph that are carried out anew at ``last``; all that they read from
            each other is computed anew as well, all else is read there.
        last: a node behind all of them, which may be one of them, or the graph's output.

    A node outside of the pattern must not write what the pattern reads or holds, from the first
    node that reads or makes it on. A node of the pattern may write to another one's memory (``z +=
    1``), as long as nobody outside reads that memory under an older name.
    """
    inside = set(pattern)
    nodes = [node for node in last.graph.nodes if node in inside]
    first: dict[int | None, Node] = {}  # memory -> the node from which on it has to stay
    for node in nodes:
        for held in (*node.all_input_nodes, node):
            if is_tensor(held):
                first.setdefault(storage(held), node)
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


def leaves(node: Node) -> bool:
    """Whether somebody outside of the graph holds a node's memory, and may write to it later."""
    ends = (*node.graph.find_nodes(op="placeholder"), *node.graph.output_node().all_input_nodes)
    return storage(node) in {None, *(storage(n) for n in ends if is_tensor(n))}


def _seen_from_outside(writer: Node, pattern: Collection[Node]) -> Hazard | None:
    """Somebody who may see what ``writer``, a node of the pattern, writes to its operand."""
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
