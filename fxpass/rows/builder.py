"""Adds nodes to a graph: calls with their example values, and nodes that compute sizes.

In: a graph. Out: the same graph, with more nodes::

    builder = GraphBuilder(graph)
    made = builder.call(aten.neg.default, node)
    builder.sort()
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only
from torch.utils._sympy.functions import FloorDiv

from fxpass import messages
from fxpass.rows.aten_calls import A, P
from fxpass.rows.sizes import example, is_tensor_node, key, packet, same_size, shape
from fxpass.rows.tags import Stop


def _without_base(tensor: Tensor) -> Tensor:
    """A tensor that is no view: torch cannot store a graph whose example values are views."""
    if tensor._base is None:
        return tensor
    layout = tensor.shape, tensor.stride()
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)


class GraphBuilder:
    """Adds nodes at the end of a graph; :meth:`sort` moves them to their places.

    Args:
        graph: is changed in place.
        inside: nodes that the caller will remove: no size is read from them.

    Attributes:
        made: the added nodes.
        trace: the stack trace of the nodes that are added next.
    """

    def __init__(self, graph: Graph, inside: Collection[Node] = ()) -> None:
        self.graph = graph
        self.end = graph.output_node()
        self.made: set[Node] = set()
        self.trace: str | None = None
        self._iotas: dict[Any, Node] = {}
        self._sizes: dict[Any, Node] = {}
        tensors = [example(n) for n in graph.nodes if is_tensor_node(n)]
        self.fake_mode = next((t.fake_mode for t in tensors if hasattr(t, "fake_mode")), None)
        self.device = next(t.device for t in tensors)
        self._find_sizes(inside)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Adds a call, with its example value."""
        with self.graph.inserting_before(self.end):
            node = self.graph.call_function(target, args, kwargs)
        given, named = map_arg((args, kwargs), example)
        if target is operator.getitem:
            node.meta["val"] = given[0][given[1]]
        elif self.fake_mode is not None:
            with self.fake_mode:
                node.meta["val"] = tree_map_only(Tensor, _without_base, target(*given, **named))
        if self.trace is not None:
            node.meta["stack_trace"] = self.trace
        self.made.add(node)
        return node

    # ------------------------------------------------------------ sizes

    def _find_sizes(self, inside: Collection[Node]) -> None:
        """Finds the nodes that tell sizes: numbers, and dimensions of tensors."""
        self._sources: dict[Any, tuple[Node, int | None]] = {}
        self._symints: dict[Any, Any] = {}  # a size of the graph for each key
        for node in self.graph.nodes:
            size = example(node)
            self._symints |= {key(s): s for s in (shape(node) if is_tensor_node(node) else ())}
            if isinstance(size, torch.SymInt) and node.op == "placeholder":
                self._sources[key(size)] = node, None
        for node in self.graph.find_nodes(op="placeholder"):
            if "tangents" not in str(node.target):  # forward has no tangents
                self._add_sources(node)
        for node in self.graph.nodes:
            if node.meta.get("unbacked_bindings") and node not in inside:
                self._add_sources(node)

    def _add_sources(self, node: Node) -> None:
        for dim, size in enumerate(shape(node) if is_tensor_node(node) else ()):
            self._sources.setdefault(key(size), (node, dim))

    def size(self, size: Any) -> Any:
        """A size as an argument: an int, or a node that computes the size.

        Raises:
            Stop: no input of the graph tells the size.
        """
        return self._size_of(key(size))

    def _size_of(self, expr: Any) -> Any:
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        if expr not in self._sizes:
            self._sizes[expr] = self._new_size(expr)
        return self._sizes[expr]

    def _new_size(self, expr: Any) -> Any:
        size = self._symints.get(expr)
        if expr not in self._sources and size is not None:  # another symbol of the same size
            equal = (
                other
                for other in self._sources
                if other in self._symints and same_size(self._symints[other], size)
            )
            expr = next(equal, expr)
            if isinstance(expr, int):
                return expr
        if expr in self._sources:
            node, dim = self._sources[expr]
            return node if dim is None else self.call(A.sym_size.int, node, dim)
        operators: Any = {sympy.Add: operator.add, sympy.Mul: operator.mul, sympy.Pow: operator.pow}
        operators[FloorDiv] = operator.floordiv
        if expr.func not in operators:
            raise Stop(messages.SIZE.format(size=expr))
        first, *rest = (self._size_of(arg) for arg in expr.args)
        for other in rest:
            first = self.call(operators[expr.func], first, other)
        return first

    def product(self, sizes: Iterable[Any]) -> Any:
        """The product of sizes, as an argument: an int or a node."""
        return self._size_of(sympy.Mul(*map(key, sizes)))

    def size_carrier(self, size: Any) -> Node:
        """An empty tensor, ``[size, 0]``, from which a call reads the size."""
        return self.full([self._size_of(size), 0], False, torch.bool)

    def full(self, sizes: Sequence[Any], fill: float, dtype: torch.dtype) -> Node:
        """A tensor that is filled with a number."""
        return self.call(A.full.default, list(sizes), fill, dtype=dtype, device=self.device)

    def iota(self, count: Any) -> Node:
        """``0, 1, ..., count - 1``: Inductor decomposes ``arange`` before this pass, not after."""
        if count not in self._iotas:
            options = {"dtype": torch.int64, "device": self.device, "requires_grad": False}
            self._iotas[count] = self.call(P.iota.default, count, start=0, step=1, **options)
        return self._iotas[count]

    def scalar_tensor(self, number: Node) -> Node:
        """A symbolic number as a 0-dim tensor."""
        floating = isinstance(example(number), torch.SymFloat)
        dtype = torch.float64 if floating else torch.int64
        return self.call(A.scalar_tensor.default, number, dtype=dtype, device=self.device)

    # ------------------------------------------------------------ order

    def read_sizes_elsewhere(self, inside: set[Node]) -> None:
        """Replaces sizes that are read from tensors of a region by those of the graph's inputs."""
        for node in list(self.graph.nodes):
            source = node.args[0] if packet(node) is A.sym_size and node.args else None
            if source in inside and node not in self.made:
                size = self.size(example(node))
                put = lambda n, old=node, new=size: new if n is old else n  # noqa: E731
                for user in list(node.users):
                    user.args, user.kwargs = map_arg((user.args, user.kwargs), put)

    def sort(self) -> None:
        """Moves each node behind its arguments, in the graph's order otherwise; writes to inputs of
        the graph come last.

        Raises:
            Stop: two calls would have to run before each other.
        """
        done: dict[Node, bool] = {}
        order: list[Node] = []
        for first in sorted(self.graph.nodes, key=lambda n: (n.op == "output", _writes(n))):
            stack = [(first, False)]
            while stack:
                node, ready = stack.pop()
                if ready:
                    done[node] = True
                    order.append(node)
                    continue
                if node in done:
                    continue
                done[node] = False
                stack.append((node, True))
                for source in reversed(node.all_input_nodes):
                    if done.get(source) is False:
                        raise Stop(messages.CIRCLE)
                    if source not in done:
                        stack.append((source, False))
        for last, node in itertools.pairwise(order):
            last.append(node)


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable
