"""Returned logits: a graph returns what they are computed from, in place of them.

In: a graph and the outputs that are to be deferred. Out: the graph returns, instead of each, the
tensors that it can be computed from (hidden states; weights that are inputs are not even returned),
and a function that gives the compiled graph the outputs that the program expects::

    return (%loss, %logits)    ->    return (%loss, %hidden)      logits = defer(recipe, hidden, w)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch.fx import Graph, GraphModule, Node

from fxpass.deferred import tensor as deferred
from fxpass.deferred.tensor import Recipe
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.placements import is_dtensor, placement_name
from fxpass.graph.source import source_line
from fxpass.match.linears import LINEARS, linear_of
from fxpass.match.views import VIEWS

Compiled = Callable[..., Any]
Restore = Callable[[Compiled], Compiled]


def recipe_of(output: Node, nodes: Sequence[Node]) -> tuple[Recipe, tuple[Node, ...]]:
    """How an output is computed from the linears on, and the nodes whose values that takes.

    Args:
        output: an output of a graph.
        nodes: those that compute it, in the graph's order; they are copied.
    """
    inside = set(nodes)
    given = tuple(
        dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    )
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in nodes:
        if placement_name(node.target):
            # only where logits are dropped: nothing but the shape is asked for
            copies[node] = copies[node.all_input_nodes[0]]
            continue
        operands = dict(copies)
        if node.target in LINEARS and linear_of(node) is not None:
            dtype = value(node).dtype
            for operand in node.all_input_nodes:
                if value(operand).dtype != dtype:  # the cast that autocast does
                    operands[operand] = graph.call_method("to", (copies[operand], dtype))
        copies[node] = graph.node_copy(node, operands.__getitem__)
        copies[node].meta = {}
    graph.output(copies[output])
    head = next(node for node in nodes if node.target in LINEARS)
    recipe = Recipe(
        GraphModule({}, graph),
        _row_inputs(nodes, given),
        source_line(head),
        value(output).requires_grad,
    )
    return recipe, given


def defer_outputs(
    gm: GraphModule, recipes: Mapping[Node, tuple[Recipe, tuple[Node, ...]]], *, drop: bool
) -> Restore:
    """Takes the outputs that have a recipe out of the graph, and puts in what their recipes need.

    Returns a function that makes of the compiled graph one that returns what the graph did.

    Args:
        gm: the graph; it changes in place.
        recipes: of its outputs, from :func:`recipe_of`.
        drop: whether tensors are returned whose values cannot be used.
    """
    if not recipes:
        return as_compiled
    output = gm.graph.output_node()
    old: list[Any] = list(cast(Any, output.args[0]))
    inputs = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    returned = dict.fromkeys(n for n in old if n not in recipes)
    needed = dict.fromkeys(n for _, given in recipes.values() for n in given if n not in inputs)
    new = list(returned | needed)
    output.args = (tuple(n if n in returned else _shape_of(n, output) for n in new),)
    # Positions among the inputs and then the results: the compiled function holds no node.
    results = {n: len(inputs) + i for i, n in enumerate(new)}
    deferrals = [
        (recipe, [(results | inputs)[n] for n in given]) for recipe, given in recipes.values()
    ]
    places = [recipes[n][0] if n in recipes else results[n] for n in old]
    # typed as anything: torch.compiler.disable hides the signatures
    make: Any = deferred.drop if drop else deferred.defer

    def restore(compiled: Compiled) -> Compiled:
        def run(*args: Any) -> tuple[Any, ...]:
            known = (*args, *compiled(*args))
            made = {recipe: make(recipe, [known[i] for i in given]) for recipe, given in deferrals}
            return tuple(made[at] if isinstance(at, Recipe) else known[at] for at in places)

        return run

    return restore


def as_compiled(compiled: Compiled) -> Compiled:
    """What restores the outputs of a graph that returns them itself."""
    return compiled


def _shape_of(node: Node, output: Node) -> Node:
    """What a recipe is given of a node that is no output by itself: it, or of a DTensor, whose
    logits are dropped, no more than its shape: nothing that a gradient could come to."""
    if not is_tensor(node) or not is_dtensor(value(node)):
        return node
    with node.graph.inserting_before(output):
        detached = node.graph.call_method("detach", (node,))
    detached.meta["example_value"] = value(node).detach()
    return detached


def _row_inputs(nodes: Sequence[Node], given: tuple[Node, ...]) -> tuple[int, ...]:
    """The inputs that carry rows, if each row of the output comes from one row of each of them."""
    if any(node.target in VIEWS for node in nodes):
        return ()
    linears = [linear for node in nodes if node.target in LINEARS if (linear := linear_of(node))]
    rows = {linear.x for linear in linears}
    shape = value(nodes[-1]).shape[:-1]
    if not all(value(x).shape[:-1] == shape for x in rows):
        return ()
    operands = {n for linear in linears for n in (linear.weight, linear.bias)} | rows
    others = [n for n in given if n not in operands and is_tensor(n)]
    if not all(value(n).numel() == value(n).shape[-1:].numel() for n in others):
        return ()  # perhaps a factor per row
    return tuple(i for i, n in enumerate(given) if n in rows)
