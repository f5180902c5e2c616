"""Deferred outputs: a graph returns the inputs of logits instead of the logits.

In: a graph and the outputs to defer. Out: a graph that returns instead of each such output the
tensors from which it can be computed (hidden states; an input of the graph, such as a weight, is
not returned, nor is a number), and a function that restores the outputs that the program expects::

    return (%loss, %logits)    ->    return (%loss, %hidden)      logits = defer(recipe, hidden, w)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxpass.deferred import tensor
from fxpass.deferred.tensor import Recipe
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.placements import is_dtensor, placement_name
from fxpass.graph.source import source_line
from fxpass.rewrite import numbers
from fxpass.rewrite.heads import factors
from fxpass.rewrite.leaving import CAST, PRODUCT, VIEW, does

Compiled = Callable[..., Any]
Restore = Callable[[Compiled], Compiled]


@dataclass(frozen=True)
class Deferral:
    """How an output of a graph is deferred.

    Attributes:
        recipe: computes logits.
        given: the nodes that the recipe reads.
        chain: computes the output from the deferred logits, and from ``beside``; None if they are
            the output.
        beside: the nodes that the chain reads beside the logits.
    """

    recipe: Recipe
    given: tuple[Node, ...]
    chain: GraphModule | None = None
    beside: tuple[Node, ...] = ()

    def then(self, root: Node, nodes: Sequence[Node]) -> Deferral:
        """The recipe of some nodes that read the logits ``root``; the last one is an output."""
        inside = {root, *nodes}
        beside = dict.fromkeys(n for m in nodes for n in m.all_input_nodes if n not in inside)
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in (root, *beside)}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
        graph.output(copies[nodes[-1]])
        return replace(self, chain=GraphModule({}, graph), beside=tuple(beside))


def recipe_of(
    output: Node, nodes: Sequence[Node], products: Collection[Node], alone: bool, programs: Any
) -> Deferral:
    """The recipe that computes an output from the inputs of its products, and these inputs.

    Args:
        output: an output of a graph.
        nodes: the products and all nodes from them to ``output``, in the graph's order; the recipe
            has copies of them.
        products: those that multiply.
        alone: whether the graph reduces nothing of them.
        programs: makes programs of what the user's program reads of the output's rows.
    """
    inside = set(nodes)
    products = [node for node in nodes if node in products]
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
        if node in products:
            dtype = value(node).dtype
            for operand in node.all_input_nodes:
                if value(operand).dtype != dtype:  # the cast that autocast does
                    operands[operand] = graph.call_method("to", (copies[operand], dtype))
        copies[node] = graph.node_copy(node, operands.__getitem__)
        copies[node].meta = {}
    graph.output(copies[output])
    kinds = {does(node, products) for node in nodes}
    rows = VIEW not in kinds
    whole = kinds <= {VIEW, CAST, PRODUCT}
    hidden = set[Node]()
    others = set[Node]()
    for product in products:
        of = factors(product)
        hidden |= {n for n in given if n is of.x}
        others |= {n for n in (of.weight, of.bias) if n is not None}
        rows = rows and of.shared
    # of linear(x, x), all rows are read
    hidden = hidden if hidden.isdisjoint(others) else set()
    beside = [n for n in given if is_tensor(n) and n not in hidden | others]
    rows = rows and bool(hidden) and _have_rows(hidden, beside, value(output))
    recipe = Recipe(
        GraphModule({}, graph),
        tuple(i for i, n in enumerate(given) if n in hidden and rows),
        source_line(products[0]),
        value(output).requires_grad,
        # the hidden states, if the gradients of all other inputs read nothing else
        tuple(i for i, n in enumerate(given) if n in hidden and whole),
        alone,
        programs,
    )
    return Deferral(recipe, given)


def defer_outputs(gm: GraphModule, recipes: Mapping[Node, Deferral], *, drop: bool) -> Restore:
    """Replaces the graph's outputs that have a recipe by the inputs of the recipes.

    Returns a function that wraps the compiled graph, so that it returns the original outputs.

    Args:
        gm: the graph; changed in place.
        recipes: output → how it is deferred.
        drop: whether the returned tensors raise an error when their values are read.
    """
    if not recipes:
        return as_compiled
    output = gm.graph.output_node()
    old: list[Any] = list(cast(Any, output.args[0]))
    inputs = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    returned = dict.fromkeys(n for n in old if n not in recipes)
    of_recipes = (n for deferral in recipes.values() for n in (*deferral.given, *deferral.beside))
    needed = dict.fromkeys(n for n in of_recipes if n not in inputs)
    read = [n for n in needed if n not in returned and numbers.follows_from_inputs(n)]
    new = [n for n in returned | needed if n not in read]
    results = [n if n in returned else _shape_of(n, output) for n in new]
    device = value(next(iter(recipes))).device
    output.args = ((*results, *numbers.products(output, results, read, device)),)
    read_from = numbers.reader(gm.graph, read)
    count = len(results)
    # Positions in (*inputs, *numbers, *results, *deferred), not nodes: restore must not keep the
    # graph alive.
    at = inputs | {n: len(inputs) + i for i, n in enumerate((*read, *new))}
    deferrals = {d.recipe: [at[n] for n in d.given] for d in recipes.values()}
    made_of = [
        (d.recipe, d.chain, [at[n] for n in d.beside], value(node).requires_grad)
        for node, d in recipes.items()
    ]
    at |= {n: len(at) + i for i, n in enumerate(recipes)}
    places = [at[n] for n in old]
    trained = any(recipe.requires_grad for recipe in deferrals)
    switches = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    ends = bool(switches[-1].args[0]) if switches else None  # in the mode of the last one

    def restore(compiled: Compiled) -> Compiled:
        def run(*args: Any) -> tuple[Any, ...]:
            # AOTAutograd makes views of inputs anew, which have a history as in the graph
            before = torch.is_grad_enabled()
            with torch.set_grad_enabled(before or trained):
                results = compiled(*args)[:count]
            torch._C._set_grad_enabled(before if ends is None else ends)
            known = [*args, *read_from(*args), *results]
            made = {}
            for recipe, given in deferrals.items():
                # as where the program computes the logits
                with torch.set_grad_enabled(recipe.requires_grad):
                    made[recipe] = tensor.defer(recipe, [known[i] for i in given], drop=drop)
            for recipe, chain, beside, needs in made_of:
                result = made[recipe]
                if chain is not None:
                    with torch.set_grad_enabled(needs), torch._C._DisableAutocast():
                        result = chain.forward(result, *(known[p] for p in beside))
                known.append(result)
            return tuple(known[p] for p in places)

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


def _shape_of(node: Node, output: Node) -> Node:
    """The node that the graph returns for a recipe: ``node``, or a detached DTensor. DTensors occur
    in dropped logits only: the recipe reads the shape, and no gradient flows through it."""
    if not is_tensor(node) or not is_dtensor(value(node)):
        return node
    with node.graph.inserting_before(output):
        detached = node.graph.call_method("detach", (node,))
    detached.meta["example_value"] = value(node).detach()
    return detached


def _have_rows(hidden: Collection[Node], beside: Collection[Node], output: Tensor) -> bool:
    """Whether each row of an output depends on the same row of the hidden states, and on what all
    rows share."""
    alike = all(value(x).shape[:-1] == output.shape[:-1] for x in hidden)
    # not torch.Size.numel(), which makes a number of a symbolic one; perhaps a factor per row
    return alike and all(math.prod(value(n).shape[:-1]) == 1 for n in beside)
