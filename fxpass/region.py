"""The graphs of a program: the whole, and those nested in it.

In: a Dynamo graph. Out: one :class:`Region` for it and for each graph inside: the bodies of
checkpoints, of an ``autograd.Function``'s forward and backward, of ``torch.cond``'s branches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

_CHECKPOINTS = {torch.ops.higher_order.tag_activation_checkpoint}
_AUTOGRAD_FUNCTIONS = {torch.ops.higher_order.autograd_function_apply}


@dataclass(frozen=True)
class Region:
    """A graph and, for a nested one, the region that calls it and the node that does.

    Attributes:
        module: the graph.
        outer, call: the region around it and the node there that runs it; None for the whole.
        plain: whether it is an ordinary part of the program: the whole, or a checkpoint in a plain
            region, which is only computed again in backward. Losses are fused in these.
        backward: whether it runs in the backward pass.
    """

    module: GraphModule
    outer: Region | None = None
    call: Node | None = None
    plain: bool = True
    backward: bool = False


def regions(module: GraphModule) -> Iterator[Region]:
    """The region of ``module``, then those nested in it, outer ones first, each graph once."""
    yield from _regions(Region(module), {id(module)})


def _regions(region: Region, seen: set[int]) -> Iterator[Region]:
    yield region
    for node in region.module.graph.nodes:
        bodies = [_body(region.module, argument) for argument in node.args]
        for position, body in enumerate(bodies):
            if body is None or id(body) in seen:
                continue
            seen.add(id(body))
            backward = node.target in _AUTOGRAD_FUNCTIONS and position == 1
            yield from _regions(
                Region(
                    module=body,
                    outer=region,
                    call=node,
                    plain=region.plain and node.target in _CHECKPOINTS,
                    backward=region.backward or backward,
                ),
                seen,
            )


def _body(module: GraphModule, argument: object) -> GraphModule | None:
    """The graph that an argument of a call names, if it names one."""
    if not isinstance(argument, Node) or argument.op != "get_attr":
        return None
    body = getattr(module, str(argument.target), None)
    return body if isinstance(body, GraphModule) else None
