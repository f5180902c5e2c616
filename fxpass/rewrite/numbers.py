"""The numbers that recipes need, such as a temperature, without an output of the graph.

torch compiles a graph again for each value of a float argument if the graph returns this number, or
no tensor of the graph needs it.

In: a graph and nodes of numbers. Out: a function that computes them from the graph's inputs::

    %item = item(%l_temperature_)         ->    (temperature,) = read(x, weight, l_temperature)
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
    """Whether a node is a number that follows from numbers among the program's arguments."""
    if is_tensor(node):
        return False
    if node.op == "placeholder" or _is_argument(node):
        return True
    return bool(node.all_input_nodes) and all(map(follows_from_inputs, node.all_input_nodes))


def reader(graph: Graph, numbers: Sequence[Node]) -> Callable[..., tuple[Any, ...]]:
    """A function from the inputs of a graph to these numbers, which follow from them."""
    read = Graph()
    known = {n: read.placeholder(n.name) for n in graph.find_nodes(op="placeholder")}
    needed = _behind(numbers)
    for node in graph.nodes:
        if node in needed and node not in known:
            known[node] = read.node_copy(node, known.__getitem__)
            known[node].meta = {}
    read.output(tuple(known[n] for n in numbers))
    return GraphModule({}, read).forward


def products(
    output: Node, results: Sequence[Node], numbers: Sequence[Node], device: torch.device
) -> list[Node]:
    """A tensor for each float argument that these numbers need and the graph's results do not."""
    used = _behind(results)
    graph = output.graph
    idle = [n for n in _behind(numbers) if _is_argument(n) and n not in used]
    with graph.inserting_before(output):
        ones = [graph.call_function(torch.ones, ((),), {"device": device}) for _ in idle]
        return [graph.call_function(operator.mul, pair) for pair in zip(ones, idle, strict=True)]


def _is_argument(node: Node) -> bool:
    """Whether a node is a float argument of the program, which Dynamo passes as a tensor."""
    # a number that the program itself reads from a tensor has no hint
    is_float = node.target == "item" and is_number(node)
    return is_float and node.meta["example_value"].node.hint is not None


def _behind(nodes: Iterable[Node]) -> dict[Node, None]:
    """The nodes, and all nodes that they need."""
    found: dict[Node, None] = {}
    left = list(nodes)
    while left:
        if (node := left.pop()) not in found:
            found[node] = None
            left += node.all_input_nodes
    return found
