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


class Coefficients:
    """The nodes from reductions to their total, as a function.

    Attributes:
        leaves: the number of reductions; a cross-entropy with label smoothing counts as two.
        others: what else the nodes read, in the order of the arguments.
    """

    def __init__(
        self, total: Total, classes: int | Node, batch: Callable[[Reduced], int | Node]
    ) -> None:
        """
        Args:
            total: the total.
            classes: their number.
            batch: the first size of the rows of a reduction.
        """
        self.__name__ = self.__qualname__ = "coefficients"
        self.__module__ = __name__
        self._classes = classes
        self._batch = {r.node: batch(r) for r in total.reductions if r.then == "batchmean"}
        graph, known = Graph(), {}
        starts = [_leaves(graph, reduced) for reduced in total.reductions]
        self.leaves = sum(map(len, starts))
        self.others = list(total.others)
        for reduced in total.reductions:
            if reduced.loss is not None:
                operands = (*reduced.loss.indices, classes)
                self.others += [n for n in operands if isinstance(n, Node)]
        self.others += [size for size in self._batch.values() if isinstance(size, Node)]
        self.others = list(dict.fromkeys(self.others))
        for node in self.others:
            known[node] = graph.placeholder(node.name)
        for reduced, leaves in zip(total.reductions, starts, strict=True):
            known[reduced.node] = self._start(graph, reduced, leaves, known)
        for node in total.tail:
            known[node] = graph.node_copy(node, lambda n: known[n])
        graph.output(known[total.node])
        self._module = GraphModule(torch.nn.Module(), graph)

    def _start(self, graph: Graph, reduced: Reduced, leaves: list[Node], known: Any) -> Node:
        """The reduction in terms of its leaves."""
        loss = reduced.loss
        if reduced.then == "batchmean":
            size = self._batch[reduced.node]
            total = graph.call_method("sum", (leaves[0],))
            return graph.call_method("div", (total, known.get(size, size)))
        if loss is None:
            return graph.call_method(reduced.then, (leaves[0],)) if reduced.then else leaves[0]
        classes = known.get(self._classes, self._classes)
        picked, smooth = leaves if len(leaves) == 2 else (leaves[0], None)
        target, weight = (n and known[n] for n in loss.indices)
        options = loss.reduction, loss.ignore_index, loss.label_smoothing, classes
        op = torch.ops.fxpass.cross_entropy_of.default
        return graph.call_function(op, (picked, smooth, target, weight, *options, ()))

    def __call__(self, *tensors: Any) -> tuple[Tensor, ...]:
        """The coefficients of each leaf, and the total of the leaves' constants.

        Args:
            tensors: for each leaf its constant, in its shape and in the dtype of the coefficients;
                then :attr:`others`.
        """
        with torch.enable_grad():
            leaves = [t.detach().clone().requires_grad_() for t in tensors[: self.leaves]]
            total = self._module(*leaves, *tensors[self.leaves :])
            # zeros for a leaf that the total does not read: an entropy that is detached later
            found = torch.autograd.grad(total, leaves, materialize_grads=True)
        return *found, total.detach()


def _leaves(graph: Graph, reduced: Reduced) -> list[Node]:
    return [graph.placeholder(f"{reduced.node.name}_{i}") for i in range(len(reduced.values))]
