"""The numbers that recipes need, such as a temperature, without an output of the graph.

torch recompiles a graph for each value of a float argument if the graph returns this number, or no
tensor of the graph needs it.

In: a graph and nodes of numbers. Out: a function that computes them from the graph's inputs::

    %item = item(%l_temperature_)         ->    (temperature,) = numbers(x, weight, l_temperature)
    %logits = truediv(%linear, %item)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fxpass.graph.nodes import is_number, is_tensor


def follows_from_inputs(node: Node) -> bool:
    """True if a node is a number that follows from numbers among the program's arguments."""
    if is_tensor(node):
        return False
    if node.op == "placeholder" or _is_argument(node):
        return True
    return bool(node.all_input_nodes) and all(map(follows_from_inputs, node.all_input_nodes))


def function_of_inputs(graph: Graph, numbers: Sequence[Node]) -> Callable[..., tuple[Any, ...]]:
    """The function that computes numbers from the inputs of a graph."""
    function = Graph()
    copies = {n: function.placeholder(n.name) for n in graph.find_nodes(op="placeholder")}
    needed = _with_sources(numbers)
    for node in graph.nodes:
        if node in needed and node not in copies:
            copies[node] = function.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
    function.output(tuple(copies[n] for n in numbers))
    return GraphModule({}, function).forward


def tensors_of_arguments(
    output: Node, results: Sequence[Node], numbers: Sequence[Node], device: torch.device
) -> list[Node]:
    """A tensor for each float argument that these numbers need and the graph's results do not."""
    used = _with_sources(results)
    graph = output.graph
    idle = [n for n in _with_sources(numbers) if _is_argument(n) and n not in used]
    with graph.inserting_before(output):
        ones = [graph.call_function(torch.ones, ((),), {"device": device}) for _ in idle]
        return [graph.call_function(operator.mul, pair) for pair in zip(ones, idle, strict=True)]


def _is_argument(node: Node) -> bool:
    """True if a node is a float argument of the program, which Dynamo passes as a tensor."""
    # a number that the program itself reads from a tensor has no hint
    is_float = node.target == "item" and is_number(node)
    return is_float and node.meta["example_value"].node.hint is not None


def _with_sources(nodes: Iterable[Node]) -> dict[Node, None]:
    """The nodes, and all nodes that they need."""
    found: dict[Node, None] = {}
    todo = list(nodes)
    while todo:
        if (node := todo.pop()) not in found:
            found[node] = None
            todo += node.all_input_nodes
    return found
