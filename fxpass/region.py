"""The graphs of a program that are rewritten: the whole, and the bodies of its checkpoints.

In: a Dynamo graph. Out: one :class:`Region` for it and for each checkpointed graph inside, which is
an ordinary part of the program, only computed again in backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

_CHECKPOINTS = {torch.ops.higher_order.tag_activation_checkpoint}


@dataclass(frozen=True)
class Region:
    """A graph and, for a nested one, the region that calls it and the node that does."""

    module: GraphModule
    outer: Region | None = None
    call: Node | None = None


def regions(module: GraphModule) -> Iterator[Region]:
    """The region of ``module``, then those nested in it, outer ones first."""
    yield from _regions(Region(module))


def _regions(region: Region) -> Iterator[Region]:
    yield region
    for node in region.module.graph.nodes:
        if node.target in _CHECKPOINTS:
            body = getattr(region.module, node.args[0].target)
            yield from _regions(Region(body, region, node))
