"""The names of Dynamo's nodes in AOTAutograd's graphs.

In: a Dynamo graph. Out: the same graph, whose nodes pass their names on to the nodes that
AOTAutograd makes of them::

    %z = linear(%x, %w)    ->    %view, %mm, %view_1 have the name z
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from fxpass.graph.region import regions

_KEY = "fxpass"


def name_nodes(gm: GraphModule) -> dict[str, Node]:
    """Names the nodes of a graph and of its nested graphs; the nodes by these names."""
    found: dict[str, Node] = {}
    for i, region in enumerate(regions(gm)):
        for node in region.module.graph.nodes:
            if node.op in ("call_function", "call_method"):
                name = f"{i}.{node.name}" if i else node.name
                # torch copies this field when it traces
                node.meta["custom"] = {**(node.meta.get("custom") or {}), _KEY: name}
                found[name] = node
    return found


def name_of(node: Node) -> str | None:
    """The name of the node in Dynamo's graph from which AOTAutograd made a node."""
    return (node.meta.get("custom") or {}).get(_KEY)
