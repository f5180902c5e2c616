"""Deferred outputs: a graph returns the inputs of logits instead of the logits.

In: a graph and the outputs to defer. Out: a graph that returns instead of each such output the
tensors from which it can be computed (hidden states; an input of the graph, such as a weight, is
not returned, nor is a number), and a function that restores the outputs that the program expects::

    return (%loss, %logits)    ->    return (%loss, %hidden)      logits = defer(recipe, hidden, w)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from fxpass.deferred import tensor
from fxpass.deferred.tensor import Recipe
from fxpass.graph.functions import CASTS, function_of
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.placements import is_dtensor, placement_name
from fxpass.graph.source import source_line
from fxpass.match.linears import linear_of
from fxpass.match.views import VIEWS
from fxpass.rewrite import numbers

Compiled = Callable[..., Any]
Restore = Callable[[Compiled], Compiled]


def recipe_of(output: Node, nodes: Sequence[Node]) -> tuple[Recipe, tuple[Node, ...]]:
    """The recipe that computes an output from the inputs of its linears, and these inputs.

    Args:
        output: an output of a graph.
        nodes: the linears and all nodes from them to ``output``, in the graph's order; the recipe
            has copies of them.
    """
    inside = set(nodes)
    given = tuple(
        dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    )
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in given}
    for node in nodes:
        if placement_name(node.target):
            # only in dropped logits, of which only the shape is computed
            copies[node] = copies[node.all_input_nodes[0]]
            continue
        operands = dict(copies)
        if linear_of(node) is not None:
            dtype = value(node).dtype
            for operand in node.all_input_nodes:
                if value(operand).dtype != dtype:  # the cast that autocast does
                    operands[operand] = graph.call_method("to", (copies[operand], dtype))
        copies[node] = graph.node_copy(node, operands.__getitem__)
        copies[node].meta = {}
    graph.output(copies[output])
    head = next(node for node in nodes if linear_of(node) is not None)
    recipe = Recipe(
        GraphModule({}, graph),
        _row_inputs(nodes, given),
        source_line(head),
        value(output).requires_grad,
        _hidden(nodes, given),
    )
    return recipe, given


def defer_outputs(
    gm: GraphModule, recipes: Mapping[Node, tuple[Recipe, tuple[Node, ...]]], *, drop: bool
) -> Restore:
    """Replaces the graph's outputs that have a recipe by the inputs of the recipes.

    Returns a function that wraps the compiled graph, so that it returns the original outputs.

    Args:
        gm: the graph; changed in place.
        recipes: output → its recipe and inputs, from :func:`recipe_of`.
        drop: whether the returned tensors raise an error when their values are read.
    """
    if not recipes:
        return as_compiled
    output = gm.graph.output_node()
    old: list[Any] = list(cast(Any, output.args[0]))
    inputs = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    returned = dict.fromkeys(n for n in old if n not in recipes)
    needed = dict.fromkeys(n for _, given in recipes.values() for n in given if n not in inputs)
    read = [n for n in needed if n not in returned and numbers.follows_from_inputs(n)]
    new = [n for n in returned | needed if n not in read]
    results = [n if n in returned else _shape_of(n, output) for n in new]
    device = value(next(iter(recipes))).device
    output.args = ((*results, *numbers.products(output, results, read, device)),)
    read_from = numbers.reader(gm.graph, read)
    # Positions in (*inputs, *numbers, *results): restore must not keep the graph's nodes alive.
    at = inputs | {n: len(inputs) + i for i, n in enumerate((*read, *new))}
    deferrals = [(recipe, [at[n] for n in given]) for recipe, given in recipes.values()]
    places = [recipes[n][0] if n in recipes else at[n] for n in old]

    def restore(compiled: Compiled) -> Compiled:
        def run(*args: Any) -> tuple[Any, ...]:
            known = (*args, *read_from(*args), *compiled(*args))
            made = {}
            for recipe, given in deferrals:
                # as where the program computes the logits
                with torch.set_grad_enabled(recipe.requires_grad):
                    made[recipe] = tensor.defer(recipe, [known[i] for i in given], drop=drop)
            return tuple(made[p] if isinstance(p, Recipe) else known[p] for p in places)

        return run

    return restore


def plain_inputs(examples: Sequence[Any]) -> tuple[list[Any], Restore]:
    """The example inputs of a graph with plain tensors in place of deferred logits, and a function
    that wraps the compiled graph so that it gets plain tensors too.

    Dynamo passes plain tensors; the parts of a graph that DDP splits hand deferred logits on.
    """
    places = {i for i, example in enumerate(examples) if isinstance(example, tensor.DeferredLogits)}

    def plain(args: Sequence[Any]) -> list[Any]:
        return [a.plain if i in places else a for i, a in enumerate(args)]

    def take(compiled: Compiled) -> Compiled:
        return lambda *args: compiled(*plain(args))

    return plain(examples), take if places else as_compiled


def as_compiled(compiled: Compiled) -> Compiled:
    """The restoring function of a graph without deferred outputs."""
    return compiled


def both(first: Restore, second: Restore) -> Restore:
    """The restoring function of a graph whose outputs were changed twice."""
    return lambda compiled: first(second(compiled))


def _shape_of(node: Node, output: Node) -> Node:
    """The node that the graph returns for a recipe: ``node``, or a detached DTensor. DTensors occur
    in dropped logits only: the recipe reads the shape, and no gradient flows through it."""
    if not is_tensor(node) or not is_dtensor(value(node)):
        return node
    with node.graph.inserting_before(output):
        detached = node.graph.call_method("detach", (node,))
    detached.meta["example_value"] = value(node).detach()
    return detached


def _hidden(nodes: Sequence[Node], given: tuple[Node, ...]) -> tuple[int, ...]:
    """The hidden states, if the gradients of all other inputs read nothing else."""
    linears = [linear for node in nodes if (linear := linear_of(node))]
    others = {function_of(node) for node in nodes if linear_of(node) is None}
    hidden = {linear.x for linear in linears}
    weights = {n for linear in linears for n in (linear.weight, linear.bias)}
    if not (others <= VIEWS | CASTS | {"stack"} and hidden <= {*given} - weights):
        return ()
    return tuple(i for i, n in enumerate(given) if n in hidden)


def _row_inputs(nodes: Sequence[Node], given: tuple[Node, ...]) -> tuple[int, ...]:
    """The inputs with rows, if each row of the output depends on the same row of these inputs."""
    if any(function_of(node) in VIEWS for node in nodes):
        return ()
    linears = [linear for node in nodes if (linear := linear_of(node))]
    rows = {linear.x for linear in linears}
    shape = value(nodes[-1]).shape[:-1]
    if not all(value(x).shape[:-1] == shape for x in rows):
        return ()
    weights = {n for linear in linears for n in (linear.weight, linear.bias)}
    if not rows.isdisjoint(weights):
        return ()  # of x @ x.T, all rows are read
    operands = {n for linear in linears for n in linear.node.all_input_nodes}
    others = [n for n in given if n not in operands and is_tensor(n)]
    # not torch.Size.numel(), which makes a number of a symbolic one
    if not all(math.prod(value(n).shape[:-1]) == 1 for n in others):
        return ()  # perhaps a factor per row
    return tuple(i for i, n in enumerate(given) if n in rows)
