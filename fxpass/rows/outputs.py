"""Outputs of forward that a program may write to.

In: a graph with calls, and the graph before. Out: the graph, where such outputs are copies.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxpass.rows.aten_calls import VIEWS, A
from fxpass.rows.sizes import packet


def _is_view(node: Node) -> bool:
    return packet(node) in VIEWS - {A._unsafe_view}


def own_outputs(graph: Graph, before: Graph) -> None:
    """Copies each output of forward that is a view now and was none: the program may write to it,
    and autograd would see a write to the saved tensor.

    Args:
        graph: is changed in place; of a joint graph, the first outputs are those of forward.
        before: the graph without calls.
    """
    end = graph.output_node()
    old_outputs: Any = before.output_node().args[0]
    new_outputs: Any = end.args[0]
    rest: list[Any] | None = None
    if old_outputs and isinstance(old_outputs[0], list | tuple):
        old_outputs = old_outputs[0]
        new_outputs, *rest = new_outputs
    copies: dict[Node, Node] = {}
    for old, new in zip(tree_leaves(old_outputs), tree_leaves(new_outputs), strict=True):
        if not isinstance(new, Node) or new in copies or _is_view(old) or not _is_view(new):
            continue
        with graph.inserting_after(new):
            copies[new] = graph.call_function(A.clone.default, (new,))
        copies[new].meta = dict(new.meta)
    outputs = map_arg(new_outputs, lambda node: copies.get(node, node))
    end.args = (outputs if rest is None else (outputs, *rest),)
