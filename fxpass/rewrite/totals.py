"""The coefficients of a total: its derivative with respect to what it adds up.

In: a :class:`fxpass.match.totals.Total`. Out: a function from what its nodes read to coefficients,
which a rewritten graph calls before the logits are computed. The total is linear, so that autograd
gives them, whatever the nodes are::

    %masked = mul(%lp, %mask);  %loss = sum(%masked)    ->    coefficients(like, %mask) = %mask
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import fxpass.op.losses  # noqa: F401, registers the operators
from fxpass.match.classes import Reduced
from fxpass.match.totals import Total


def coefficients_of_total(
    total: Total, classes: int | Node
) -> tuple[Callable[..., tuple[Tensor, ...]], list[Node]]:
    """A function to the coefficients of a total, and the nodes that are its last arguments.

    Args:
        total: the total.
        classes: their number.

    Returns:
        the function and the nodes. Its first arguments are constants of what the total adds up, in
        the shape of each of the ``values`` of its reductions and in the dtype of the coefficients.
        It returns the coefficients of each, and the total of the constants.
    """
    graph = Graph()
    starts = [
        [graph.placeholder(f"{reduced.node.name}_{i}") for i in range(len(reduced.values))]
        for reduced in total.reductions
    ]
    losses = [reduced.loss for reduced in total.reductions if reduced.loss is not None]
    of_losses = (n for loss in losses for n in (*loss.indices, classes))
    read = dict.fromkeys((*total.others, *of_losses))
    others = [n for n in read if isinstance(n, Node)]
    known: dict[Any, Any] = {node: graph.placeholder(node.name) for node in others}
    for reduced, leaves in zip(total.reductions, starts, strict=True):
        known[reduced.node] = _finished(graph, reduced, leaves, known, known.get(classes, classes))
    for node in total.tail:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(known[total.node])
    module, count = GraphModule(torch.nn.Module(), graph), sum(map(len, starts))

    def coefficients(*tensors: Any) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [t.detach().clone().requires_grad_() for t in tensors[:count]]
            whole = module(*leaves, *tensors[count:])
            # zeros for a leaf that the total does not read: an entropy that is detached later
            found = torch.autograd.grad(whole, leaves, materialize_grads=True)
        return *found, whole.detach()

    return coefficients, others


def _finished(graph: Graph, reduced: Reduced, leaves: list[Node], known: Any, classes: Any) -> Node:
    """A reduction in terms of its rows."""
    loss = reduced.loss
    if loss is None:
        return graph.call_method(reduced.then, (leaves[0],)) if reduced.then else leaves[0]
    picked, smooth = leaves if len(leaves) == 2 else (leaves[0], None)
    target, weight = (n and known[n] for n in loss.indices)
    options = loss.reduction, loss.ignore_index, loss.label_smoothing, classes
    op = torch.ops.fxpass.cross_entropy_of.default
    return graph.call_function(op, (picked, smooth, target, weight, *options, ()))
