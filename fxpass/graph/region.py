"""The graphs of a program: the whole, and those nested in it.

In: a Dynamo graph. Out: one :class:`Region` for it and for each graph inside: the bodies of
checkpoints, of an ``autograd.Function``'s forward and backward, of ``torch.cond``'s branches.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


def return_once(region: Region) -> None:
    """No forward of an ``autograd.Function`` returns the same tensor twice, where torch 2.11 does.

    Dynamo returns every intermediate beside the function's own outputs, whose gradients are read by
    nobody. Where one of them is the tensor that is returned (``return y.mul_(2)``, or a cast that
    had nothing to do), autograd hands the gradient to the last of the two, and in every backend all
    gradients of the function are silently zero (pytorch issue 180642). Later releases leave such
    intermediates out. Here None takes their place.
    """
    for node in region.module.graph.nodes:
        if node.target not in _AUTOGRAD_FUNCTIONS:
            continue
        forward, backward = (_body(region.module, argument) for argument in node.args[:2])
        if forward is None or backward is None:
            continue
        returns = forward.graph.output_node()
        given: Any = returns.args[0]  # (outputs, what is kept for backward)
        if not isinstance(given, tuple | list) or not isinstance(given[0], tuple | list):
            continue
        outputs = list(given[0])
        # in a checkpoint, there is a getitem for each, whether it is read or not
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


def _body(module: GraphModule, argument: object) -> GraphModule | None:
    """The graph that an argument of a call names, if it names one."""
    if not isinstance(argument, Node) or argument.op != "get_attr":
        return None
    body = getattr(module, str(argument.target), None)
    return body if isinstance(body, GraphModule) else None
