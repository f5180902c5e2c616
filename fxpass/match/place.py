"""Where an operator call stands: after its operands, some of which are moved to it.

In: the nodes that a call reads, and the first node that it replaces. Out: the node after which the
call stands, and the operands that are moved::

    %lp = log_softmax(%z, -1);  %e = entropy(%lp);  %t = labels[1:];  %a = gather(%lp, -1, %t)
    ->  the call stands before %e, and %t is moved to it
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from fxpass.graph.moving import movable
from fxpass.graph.nodes import NoMatch
from fxpass.match.classes import Flow


def place(flow: Flow, operands: Collection[Node], first: Node) -> tuple[Node, tuple[Node, ...]]:
    """The node after which the call stands, and the operands that are moved to it; not those that
    calls replace."""
    moved: dict[Node, None] = {}
    for operand in operands:
        nodes = movable([operand], first, flow.replaced)
        if nodes is None:
            reason = f"%{operand.name} is an operand, and is computed after %{first.name}"
            raise NoMatch(operand, reason)
        moved |= dict.fromkeys(nodes)
    # what is moved may copy a tensor that has been written to
    read = {*operands, *(n for node in moved for n in node.all_input_nodes)} - moved.keys()
    writes = flow.writes({*read, *operands}, before=first)
    return max(flow.linear.node, *read, *writes), tuple(sorted(moved))
