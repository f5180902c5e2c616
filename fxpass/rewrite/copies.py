"""A copy of a graph, to which a rewrite that fails goes back.

In: a graph. Out: its copy, with the attributes that Dynamo has set on its nodes.
"""

from __future__ import annotations

import copy

from torch.fx import Graph


def copied(graph: Graph) -> Graph:
    """A copy of a graph, with Dynamo's attributes on its nodes."""
    copied = copy.deepcopy(graph)
    for old, new in zip(graph.nodes, copied.nodes, strict=True):
        if (dynamo_source := getattr(old, "_dynamo_source", None)) is not None:
            new._dynamo_source = dynamo_source
    return copied
