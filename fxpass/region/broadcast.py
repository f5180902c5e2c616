"""Functions of rows whose inputs have one value a row, instead of copies of expanded tensors.

In: a function, and the numbers of such inputs. Out: the function of inputs ``[n, 1]``, which it
expands::

    >>> lines = ["%0 = input float32[n, 3]", "%1 = input float32[n, 3]"]
    >>> graph = graph_of([*lines, "%2 = aten.mul.Tensor(%0, %1)", "return %2"])
    >>> [str(node.target) for node in with_broadcasts(graph, (1,)).nodes]
    ['input_0', 'input_1', 'aten.expand.default', 'aten.mul.Tensor', 'output']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxpass.region.text import Input, graph_of

__all__ = ["broadcastable", "first_values", "graph_of", "is_broadcast", "with_broadcasts"]

aten: Any = torch.ops.aten


def is_broadcast(tensor: Tensor) -> bool:
    """Tells if all values of a row are one in memory."""
    inner = list(zip(tensor.shape, tensor.stride(), strict=True))[1:]
    return any(size > 1 for size, _ in inner) and all(size == 1 or not s for size, s in inner)


def first_values(tensor: Tensor) -> Tensor:
    """The first value of each row, ``[n, 1]``."""
    return tensor[(slice(None), *[slice(1)] * (tensor.dim() - 1))]


def broadcastable(function: Graph, numbers: Sequence[int]) -> tuple[int, ...]:
    """Those of these inputs of a function of rows whose sizes the other inputs have as well."""
    names = {"n", *(size.name for size in _named_sizes(function, numbers))}
    inputs = [node.meta["input"] for node in function.find_nodes(op="placeholder")]
    return tuple(
        i for i in numbers if names.issuperset(s for s in inputs[i].shape if isinstance(s, str))
    )


def with_broadcasts(function: Graph, numbers: Sequence[int]) -> Graph:
    """The function with inputs ``[n, 1]`` for ``broadcastable`` ones."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    places = function.find_nodes(op="placeholder")
    for i, node in enumerate(places):
        copy = copies[node] = graph.node_copy(node)
        copy.meta["input"] = given = node.meta["input"]
        if i in numbers:
            copy.meta["input"] = Input(given.dtype, ("n", *[1] * (len(given.shape) - 1)))
    sizes = {size.name: size for size in _named_sizes(function, numbers)}
    for i in numbers:
        shape: list[Any] = [-1]
        for size in places[i].meta["input"].shape[1:]:
            if isinstance(size, str):
                args = copies[sizes[size].node], sizes[size].dim
                size = graph.call_function(aten.sym_size.int, args)
            shape.append(size)
        copies[places[i]] = graph.call_function(aten.expand.default, (copies[places[i]], shape))
    for node in function.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return graph


class _NamedSize(NamedTuple):
    """A named size, and the dimension of an input that has it."""

    name: str
    node: Node
    dim: int


def _named_sizes(function: Graph, excluded: Sequence[int]) -> Iterator[_NamedSize]:
    """The named sizes of a function's inputs, but for the excluded inputs."""
    for i, node in enumerate(function.find_nodes(op="placeholder")):
        for dim, size in enumerate(node.meta["input"].shape if i not in excluded else ()):
            if isinstance(size, str):
                yield _NamedSize(size, node, dim)
