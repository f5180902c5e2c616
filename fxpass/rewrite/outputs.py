"""Deferred outputs: a graph returns the inputs of logits instead of the logits.

In: a graph and the outputs to defer. Out: a graph that returns the inputs of their recipes instead
(hidden states, but neither inputs of the graph, such as a weight, nor numbers), and a function that
restores the outputs that the program expects::

    return (%loss, %logits)    ->    return (%loss, %hidden)      logits = defer(recipe, hidden, w)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from fxpass.deferred import tensor
from fxpass.deferred.tensor import Recipe
from fxpass.graph.nodes import is_tensor, value
from fxpass.graph.placements import is_dtensor, placement_name
from fxpass.graph.source import source_line
from fxpass.rewrite import numbers
from fxpass.rewrite.heads import product_operands
from fxpass.rewrite.paths import CAST, PRODUCT, VIEW, SplitPath, kind_of

Compiled = Callable[..., Any]
Restore = Callable[[Compiled], Compiled]


@dataclass(frozen=True)
class Deferral:
    """The recipe of a deferred output, and its inputs.

    Attributes:
        recipe: computes logits.
        inputs: the nodes that the recipe reads.
        tail: computes the output from the deferred logits and ``tail_inputs``; None if the output
            is the logits.
        tail_inputs: the nodes that the tail reads besides the logits.
    """

    recipe: Recipe
    inputs: tuple[Node, ...]
    tail: GraphModule | None = None
    tail_inputs: tuple[Node, ...] = ()

    def with_tail(self, path: SplitPath) -> Deferral:
        """The deferral of an output that the tail of a path computes."""
        inside = {path.logits, *path.tail}
        inputs = dict.fromkeys(n for m in path.tail for n in m.all_input_nodes if n not in inside)
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in (path.logits, *inputs)}
        for node in path.tail:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
        graph.output(copies[path.tail[-1]])
        return replace(self, tail=GraphModule({}, graph), tail_inputs=tuple(inputs))


def recipe_of(
    output: Node, nodes: Sequence[Node], products: Collection[Node], alone: bool, programs: Any
) -> Deferral:
    """The recipe that computes an output from the inputs of its products, and these inputs.

    Args:
        output: an output of a graph.
        nodes: the nodes of the output's path, which the recipe copies, in the graph's order.
        products: the nodes that multiply.
        alone: whether the graph does not reduce their results.
        programs: compiles the user's reductions of the output's rows.
    """
    inside = set(nodes)
    products = [node for node in nodes if node in products]
    inputs = tuple(
        dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    )
    kinds = {kind_of(node, products) for node in nodes}
    rows = VIEW not in kinds
    whole = kinds <= {VIEW, CAST, PRODUCT}
    hidden = set[Node]()
    others = set[Node]()
    for product in products:
        operands = product_operands(product)
        hidden |= {n for n in inputs if n is operands.x}
        others |= {n for n in (operands.weight, operands.bias) if n is not None}
        rows = rows and operands.shared
    # a row of linear(x, x) reads all rows
    hidden = hidden if hidden.isdisjoint(others) else set()
    factors = [n for n in inputs if is_tensor(n) and n not in hidden | others]
    rows = rows and bool(hidden) and _have_rows(hidden, factors, value(output))
    recipe = Recipe(
        _recipe_graph(output, nodes, products, inputs),
        rows=tuple(i for i, n in enumerate(inputs) if n in hidden and rows),
        source=source_line(products[0]),
        requires_grad=value(output).requires_grad,
        # the hidden states, if the gradients of all other inputs read nothing else
        hidden=tuple(i for i, n in enumerate(inputs) if n in hidden and whole),
        alone=alone,
        programs=programs,
    )
    return Deferral(recipe, inputs)


def _recipe_graph(
    output: Node, nodes: Sequence[Node], products: Collection[Node], inputs: Sequence[Node]
) -> GraphModule:
    """Copies of nodes, as a function of their inputs, with autocast's casts of their operands."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in inputs}
    for node in nodes:
        if placement_name(node.target):
            # only in dropped logits, which have a shape and no values
            copies[node] = copies[node.all_input_nodes[0]]
            continue
        operands = dict(copies)
        if node in products:
            dtype = value(node).dtype
            for operand in node.all_input_nodes:
                if value(operand).dtype != dtype:
                    operands[operand] = graph.call_method("to", (copies[operand], dtype))
        copies[node] = graph.node_copy(node, operands.__getitem__)
        copies[node].meta = {}
    graph.output(copies[output])
    return GraphModule({}, graph)


class _DeferredOutput(NamedTuple):
    """A deferred output without nodes: :func:`defer_outputs` must not keep the graph alive.

    Attributes:
        recipe, tail: as of :class:`Deferral`.
        tail_inputs: the positions of the tail's inputs among the values of a call.
        requires_grad: whether the output needs a gradient.
    """

    recipe: Recipe
    tail: GraphModule | None
    tail_inputs: list[int]
    requires_grad: bool


def defer_outputs(gm: GraphModule, recipes: Mapping[Node, Deferral], *, drop: bool) -> Restore:
    """Replaces the graph's outputs that have a recipe by the inputs of the recipes.

    Returns a function that wraps the compiled graph, so that it returns the original outputs.

    Args:
        gm: the graph; changed in place.
        recipes: the deferral of each output.
        drop: whether the returned tensors raise an error when their values are read.
    """
    output = gm.graph.output_node()
    old: list[Any] = list(cast(Any, output.args[0]))
    inputs = dict.fromkeys(gm.graph.find_nodes(op="placeholder"))
    returned = dict.fromkeys(n for n in old if n not in recipes)
    of_recipes = (n for d in recipes.values() for n in (*d.inputs, *d.tail_inputs))
    needed = dict.fromkeys(n for n in of_recipes if n not in inputs)
    computed = [n for n in needed if n not in returned and numbers.follows_from_inputs(n)]
    new = [n for n in returned | needed if n not in computed]
    results = [n if n in returned else _shape_of(n, output) for n in new]
    device = value(next(iter(recipes))).device
    output.args = ((*results, *numbers.tensors_of_arguments(output, results, computed, device)),)
    numbers_of = numbers.function_of_inputs(gm.graph, computed)
    count = len(results)
    # the positions of nodes among the values of a call
    at = {n: i for i, n in enumerate((*inputs, *computed, *new, *recipes))}
    recipe_inputs = {d.recipe: [at[n] for n in d.inputs] for d in recipes.values()}
    deferred = [
        _DeferredOutput(d.recipe, d.tail, [at[n] for n in d.tail_inputs], value(n).requires_grad)
        for n, d in recipes.items()
    ]
    places = [at[n] for n in old]
    trained = any(recipe.requires_grad for recipe in recipe_inputs)
    switches = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    ends = bool(switches[-1].args[0]) if switches else None  # in the mode of the last one

    def restore(compiled: Compiled) -> Compiled:
        def restored(*args: Any) -> tuple[Any, ...]:
            # AOTAutograd recreates views of inputs, which have a grad_fn as in the graph
            before = torch.is_grad_enabled()
            with torch.set_grad_enabled(before or trained):
                results = compiled(*args)[:count]
            torch._C._set_grad_enabled(before if ends is None else ends)
            call_values = [*args, *numbers_of(*args), *results]
            logits = {}
            for recipe, positions in recipe_inputs.items():
                # as where the program computes the logits
                with torch.set_grad_enabled(recipe.requires_grad):
                    operands = [call_values[i] for i in positions]
                    logits[recipe] = tensor.defer(recipe, operands, drop=drop)
            for one in deferred:
                result = logits[one.recipe]
                if one.tail is not None:
                    with torch.set_grad_enabled(one.requires_grad), torch._C._DisableAutocast():
                        result = one.tail.forward(
                            result, *(call_values[i] for i in one.tail_inputs)
                        )
                call_values.append(result)
            return tuple(call_values[i] for i in places)

        return restored

    return restore


def plain_inputs(examples: Sequence[Any]) -> tuple[list[Any], Restore]:
    """The example inputs of a graph with plain tensors in place of deferred logits, and a function
    that wraps the compiled graph so that it gets plain tensors too.

    Dynamo passes plain tensors; the parts of a graph that DDP splits pass deferred logits on.
    """
    places = {i for i, example in enumerate(examples) if isinstance(example, tensor.DeferredLogits)}

    def plain(args: Sequence[Any]) -> list[Any]:
        return [a.plain if i in places else a for i, a in enumerate(args)]

    def with_plain_inputs(compiled: Compiled) -> Compiled:
        return lambda *args: compiled(*plain(args))

    return plain(examples), with_plain_inputs if places else as_compiled


def as_compiled(compiled: Compiled) -> Compiled:
    """Returns the compiled graph unchanged: nothing is deferred."""
    return compiled


def _shape_of(node: Node, output: Node) -> Node:
    """The node that the graph returns for a recipe: ``node``, or a detached DTensor. DTensors occur
    in dropped logits only: the recipe reads the shape, and its gradient is not needed."""
    if not is_tensor(node) or not is_dtensor(value(node)):
        return node
    with node.graph.inserting_before(output):
        detached = node.graph.call_method("detach", (node,))
    detached.meta["example_value"] = value(node).detach()
    return detached


def _have_rows(hidden: Collection[Node], factors: Collection[Node], output: Tensor) -> bool:
    """True if each row of an output depends on the same row of the hidden states, and otherwise on
    operands that all rows share."""
    alike = all(value(x).shape[:-1] == output.shape[:-1] for x in hidden)
    # not torch.Size.numel(), which replaces a symbolic size by a number
    return alike and all(math.prod(value(n).shape[:-1]) == 1 for n in factors)
