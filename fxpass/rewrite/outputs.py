"""Logits that leave the graph: as recipes and what they are computed from, in place of themselves.

In: a graph and the outputs that are to be deferred. Out: the graph returns, instead of each, the
tensors that it can be computed from (hidden states; weights that are inputs are not even returned),
and :meth:`Outputs.restore` makes of the compiled graph a function that returns what the graph did::

    return (%loss, %logits)    ->    return (%loss, %hidden)      logits = defer(recipe, hidden, w)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxpass.deferred import tensor as deferred
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.placements import is_dtensor, placement_name
from fxpass.graph.source import source_line
from fxpass.match.linears import LINEARS, linear_of
from fxpass.match.movements import MOVEMENTS


@dataclass(frozen=True)
class _Deferral:
    """The recipe of one output, and the nodes that it is given."""

    recipe: deferred.Recipe
    inputs: tuple[Node, ...]
    requires_grad: bool


class _Place(NamedTuple):
    """One output of the original graph: where its value is among the new outputs, or a recipe and
    where each of its inputs is: ``(is an input of the graph, position)``, and whether gradients
    reach them."""

    position: int = -1
    recipe: deferred.Recipe | None = None
    sources: tuple[tuple[bool, int], ...] = ()
    requires_grad: bool = False


class Outputs:
    """The outputs of one graph that are deferred; made before the rewrite, from whole chains."""

    def __init__(self, between: Mapping[Node, Sequence[Node]], *, drop: bool) -> None:
        """
        Args:
            between: each deferred output, with the nodes that compute it from the linears on.
            drop: whether placeholders are returned that cannot be used.
        """
        self._drop = drop
        self._deferrals = {output: _deferral(output, nodes) for output, nodes in between.items()}
        self._places: list[_Place] = []

    def apply(self, gm: GraphModule) -> None:
        """Takes the deferred outputs out of the graph, and puts in what they need."""
        if not self._deferrals:
            return
        output = gm.graph.output_node()
        old: list[Any] = list(cast(Any, output.args[0]))
        inputs = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
        needed = dict.fromkeys(n for d in self._deferrals.values() for n in d.inputs)
        kept = dict.fromkeys(n for n in old if n not in self._deferrals)
        new = list(kept | dict.fromkeys(n for n in needed if n not in inputs))
        output.args = (tuple(n if n in kept else _shape_of(n, output) for n in new),)
        results = {n: i for i, n in enumerate(new)}
        for node in old:
            deferral = self._deferrals.get(node)
            if deferral is None:
                self._places.append(_Place(results[node]))
            else:
                sources = tuple(
                    (True, inputs[n]) if n in inputs else (False, results[n])
                    for n in deferral.inputs
                )
                self._places.append(_Place(-1, deferral.recipe, sources, deferral.requires_grad))

    def restore(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled`` with the outputs that the graph had before :meth:`apply`."""
        if not self._deferrals:
            return compiled
        places = tuple(self._places)  # the compiled function holds no node of the graph
        # typed as anything: torch.compiler.disable hides the signatures
        make: Any = deferred.drop if self._drop else deferred.defer

        def run(*args: Any) -> tuple[Any, ...]:
            results = compiled(*args)
            made: dict[deferred.Recipe, Tensor] = {}
            out: list[Any] = []
            for position, recipe, sources, requires_grad in places:
                if recipe is None:
                    out.append(results[position])
                    continue
                if recipe not in made:  # the graph may return one value twice
                    given = [args[i] if is_input else results[i] for is_input, i in sources]
                    with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
                        made[recipe] = make(recipe, given)
                out.append(made[recipe])
            return tuple(out)

        return run


def _shape_of(node: Node, output: Node) -> Node:
    """What a recipe is given of a node that is no output by itself: it, or of a DTensor, whose
    logits are dropped, no more than its shape: nothing that a gradient could come to."""
    if not is_tensor(node) or not is_dtensor(value(node)):
        return node
    with node.graph.inserting_before(output):
        detached = node.graph.call_method("detach", (node,))
    detached.meta["example_value"] = value(node).detach()
    return detached


def _deferral(output: Node, nodes: Sequence[Node]) -> _Deferral:
    """The recipe of one output: its nodes in a graph of their own, with their casts written out."""
    inside = set(nodes)
    given = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in nodes:
        linear = linear_of(node) if node.target in LINEARS else None
        here = dict(copies)
        if placement_name(node.target):
            # only where logits are dropped: nothing but the shape is asked for
            copies[node] = copies[node.all_input_nodes[0]]
            continue
        if linear is not None:
            dtype = value(node).dtype
            for operand in node.all_input_nodes:
                if value(operand).dtype != dtype:
                    here[operand] = graph.call_method("to", (copies[operand], dtype))
        copies[node] = graph.node_copy(node, here.__getitem__)
        copies[node].meta = {}
    graph.output(copies[output])
    head = next(node for node in nodes if node.target in LINEARS)
    recipe = deferred.Recipe(
        GraphModule({}, graph), _row_inputs(nodes, tuple(given)), source_line(head)
    )
    return _Deferral(recipe, tuple(given), value(output).requires_grad)


def _row_inputs(nodes: Sequence[Node], given: tuple[Node, ...]) -> tuple[int, ...]:
    """The inputs that carry rows, if each row of the output comes from one row of each of them."""
    if any(node.target in MOVEMENTS for node in nodes):
        return ()
    linears = [linear_of(node) for node in nodes if node.target in LINEARS]
    rows = {linear.x for linear in linears if linear is not None}
    shape = value(nodes[-1]).shape[:-1]
    others = [n for n in given if n not in rows and is_tensor(n)]
    operands = {n for linear in linears if linear is not None for n in (linear.weight, linear.bias)}
    if not all(value(x).shape[:-1] == shape for x in rows):
        return ()
    if not all(n in operands or value(n).numel() == value(n).shape[-1:].numel() for n in others):
        return ()  # perhaps a factor per row
    return tuple(i for i, n in enumerate(given) if n in rows)
