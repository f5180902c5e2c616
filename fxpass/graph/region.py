"""A Dynamo graph and the graphs nested in it.

In: a Dynamo graph. Out: a :class:`Region` for this graph and for each nested graph: checkpoints,
forward and backward of an ``autograd.Function``, the branches of ``torch.cond``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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
        outer, call: the region around it and the node there that calls it; None for the outermost.
        plain: whether losses in it can be fused: it is the outermost graph, or in a plain region a
            checkpoint, which backward only recomputes.
        backward: whether it runs in the backward pass.
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


def return_once(region: Region) -> None:
    """Makes the forward of every ``autograd.Function`` return each tensor once, also in torch 2.11.

    Dynamo returns all intermediates beside the function's outputs, and nothing reads the gradients
    of intermediates. If an intermediate is also an output (``return y.mul_(2)``, or a cast without
    effect), autograd gives the gradient to the later of the two, and with any backend all gradients
    of the function are silently zero (pytorch issue 180642). Later releases omit such
    intermediates. This function replaces them by None.
    """
    for node in region.module.graph.nodes:
        if node.target not in AUTOGRAD_FUNCTIONS:
            continue
        forward, backward = map(nested_graph, node.args[:2])
        if forward is None or backward is None:
            continue
        returns = forward.graph.output_node()
        given: Any = returns.args[0]  # (outputs, tensors saved for backward)
        if not isinstance(given, tuple | list) or not isinstance(given[0], tuple | list):
            continue
        outputs = list(given[0])
        # in a checkpoint, every output has a getitem node, read or not
        read = {u.args[1] for u in node.users if u.target is operator.getitem and u.users}
        gradients = backward.graph.find_nodes(op="placeholder")
        read |= {i for i, gradient in enumerate(gradients) if gradient.users}
        returned = {id(_example(output)) for i, output in enumerate(outputs) if i in read}
        for i, output in enumerate(outputs):
            if i not in read and id(_example(output)) in returned:
                outputs[i] = None
        if outputs != list(given[0]):
            returns.args = ((tuple(outputs), *given[1:]),)
            forward.recompile()


def _example(output: object) -> object:
    return output.meta.get("example_value", output) if isinstance(output, Node) else output
