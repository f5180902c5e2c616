"""A Dynamo graph and the graphs nested in it.

In: a Dynamo graph. Out: a :class:`Region` for this graph and for each nested graph: checkpoints,
forward and backward of an ``autograd.Function``, the branches of ``torch.cond``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxpass.graph.nodes import nested_graph

CHECKPOINTS = {torch.ops.higher_order.tag_activation_checkpoint}
NESTED_REGIONS = {torch.ops.higher_order.invoke_subgraph}
AUTOGRAD_FUNCTIONS = {torch.ops.higher_order.autograd_function_apply}


@dataclass(frozen=True)
class Region:
    """A graph and, for a nested graph, the region and the node that call it.

    Attributes:
        module: the graph.
        outer, call: the region around the graph, and the node there that calls the graph; None for
            the outermost graph.
        plain: whether losses in the graph can be fused: it is the outermost graph, or a checkpoint
            in a plain region, which backward only recomputes.
        backward: whether the graph runs in the backward pass.
    """

    module: GraphModule
    outer: Region | None = None
    call: Node | None = None
    plain: bool = True
    backward: bool = False


def regions(module: GraphModule) -> Iterator[Region]:
    """The region of ``module``, then the nested regions, outer before inner, each graph once."""
    yield from _regions(Region(module), {id(module)})


def _regions(region: Region, seen: set[int]) -> Iterator[Region]:
    yield region
    for node in region.module.graph.nodes:
        for position, body in enumerate(map(nested_graph, node.args)):
            if body is None or id(body) in seen:
                continue
            seen.add(id(body))
            plain = region.plain and node.target in CHECKPOINTS
            backward = node.target in AUTOGRAD_FUNCTIONS and position == 1
            nested = Region(body, region, node, plain, region.backward or backward)
            yield from _regions(nested, seen)
