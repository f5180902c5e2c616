"""A loop in parts: what is the same for all rows, heads, a function of rows, and last products.

In: a :class:`fxpass.region.loop.Loop`. Out: a :class:`Split`. A head is the product of a row input
and a weight; a last product, or tail, is that of a gradient and a weight or, summed over the rows,
of a gradient and rows. The loop computes both with few classes at a time, and in the dtype that the
device multiplies fastest; the function of rows is what is between them::

    >>> text = '''rows rows=0 sums=0 wide= memory_mb=0 compiled=1
    ... %0 = input float32[n, 5]
    ... %1 = input float32[5, 9]
    ... %2 = aten.mm.default(%0, %1)
    ... %3 = aten.tanh.default(%2)
    ... %4 = aten.t.default(%3)
    ... %5 = aten.mm.default(%4, %0)
    ... return %5'''
    >>> found = split(Loop.parse(text))
    >>> [str(node.target) for node in found.function.nodes]
    ['input_0', 'aten.tanh.default', 'output']
    >>> found.heads[0].logits, found.groups[0].tails[0].result
    (Input(dtype=torch.float32, shape=('n', 9)), 0)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fxpass.region.loop import Loop
from fxpass.region.run import GraphValues, apart, is_view, values_of
from fxpass.region.text import Input, results_of
from fxpass.region.trace import between

aten: Any = torch.ops.aten

_CASTS = {aten._to_copy.default}
_SAME = {aten.clone.default, aten.alias.default, aten.detach.default}


class HeadOperands(NamedTuple):
    """``x @ weight + bias``; numbers of the split's operands and invariants."""

    x: int
    weight: int  # [D, V]
    bias: int | None  # [V]
    logits: Input
    hidden: int | str  # D


class Tail(NamedTuple):
    """A product of a gradient g ``[n, V]`` that is a result of the loop.

    Attributes:
        result: the number of the result.
        weight: the invariant of ``g @ weight``; None for sums.
        operand: the operand of ``gᵀ @ operand``, a sum.
        made: the result of the function of ``gᵀ @ made``, a sum.
        turned: whether the sum is the transpose, ``[K, V]``.
    """

    result: int
    weight: int | None = None
    operand: int | None = None
    made: int | None = None
    turned: bool = False


class Group(NamedTuple):
    """The tails of one gradient."""

    made: int  # the gradient: a result of the function
    gradient: Input
    tails: tuple[Tail, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """The parts of a loop.

    Attributes:
        before: from all inputs of the loop without rows to the invariants.
        operands: from all inputs with rows to what heads and sums multiply, by views and casts.
        heads: the products of operands and invariants.
        function: from logits, then ``rows``, then ``shared``, to ``results``, then what tails read.
        rows: the inputs that the function reads: numbers in ``loop.rows``.
        shared: the invariants that the function reads.
        results: the results of the loop that the function computes.
        groups: the tails, by their gradients.
    """

    before: Graph
    operands: Graph
    heads: tuple[HeadOperands, ...]
    function: Graph
    rows: tuple[int, ...]
    shared: tuple[int, ...]
    results: tuple[int, ...]
    groups: tuple[Group, ...]


def split(loop: Loop) -> Split:
    """The parts of a loop; the same for the same loop."""
    return _split(loop)


@lru_cache(maxsize=1024)
def _split(loop: Loop) -> Split:
    return apart(lambda: _Splitter(loop).split())


class _Splitter:
    """Finds the parts of one loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.graph = loop.graph
        self.values = values_of(loop.graph)
        places = self.graph.find_nodes(op="placeholder")
        self.given = [places[i] for i in loop.rows]
        self.shared = [p for i, p in enumerate(places) if i not in loop.rows]
        self.invariant = self._invariants()
        self.operands: list[Node] = []
        self.made: list[Node] = []

    def split(self) -> Split:
        found = {n: parts for n in self.graph.nodes if (parts := self._head(n)) is not None}
        tails: dict[Node, list[tuple[Tail, Node]]] = {}  # with their other operands
        results = results_of(self.graph)
        kept = []
        for i, node in enumerate(results):
            last = self._tail(i, node, found, results)
            if last is None:
                kept.append(i)
            else:
                tails.setdefault(last[0], []).append(last[1:])
        made = list(dict.fromkeys([*tails, *(r for t in tails.values() for _, r in t)]))
        made = [n for n in made if n in tails or self._operand(n) is None]
        made = [n for n in made if n not in self.invariant]
        ends = [*(results[i] for i in kept), *made]
        # what is repeated takes no memory in the function
        shared = (n for n in self.invariant if n.target is not aten.expand.default)
        of_function = [*found, *self.given, *(n for n in shared if self._is_tensor(n))]
        read = _reads(of_function, ends)
        function = between(self.graph, {n: self._described(n) for n in read}, ends)
        weights = [n for parts in found.values() for n in parts[1:] if n is not None]
        weights += [r for some in tails.values() for _, r in some if r in self.invariant]
        invariants = list(dict.fromkeys([*weights, *(n for n in read if n in self.invariant)]))
        operands = [parts[0] for parts in found.values()]
        operands += [r for some in tails.values() for _, r in some if r not in made]
        operands = list(dict.fromkeys(n for n in operands if n not in self.invariant))
        number = {n: i for i, n in enumerate(invariants)}
        place = {n: i for i, n in enumerate(operands)}
        at = {n: len(kept) + i for i, n in enumerate(made)}
        heads = (
            HeadOperands(
                place[x],
                number[w],
                None if b is None else number[b],
                self._described(n),
                self._described(x).shape[1],
            )
            for n, (x, w, b) in found.items()
        )

        def tail(one: Tail, other: Node) -> Tail:
            if other in number:
                return one._replace(weight=number[other])
            return one._replace(operand=place.get(other), made=at.get(other))

        groups = (
            Group(at[g], self._described(g), tuple(tail(*pair) for pair in some))
            for g, some in tails.items()
        )
        return Split(
            before=self._between(self.shared, invariants),
            operands=self._between(self.given, operands),
            heads=tuple(heads),
            function=function,
            rows=tuple(i for i, n in enumerate(self.given) if n in read),
            shared=tuple(number[n] for n in read if n in number),
            results=tuple(kept),
            groups=tuple(groups),
        )

    def _between(self, given: Iterable[Node], results: Sequence[Node]) -> Graph:
        return between(self.graph, {n: self._described(n) for n in given}, results)

    def _described(self, node: Node) -> Input:
        return node.meta["input"] if node.op == "placeholder" else self.values.described(node)

    def _is_tensor(self, node: Node) -> bool:
        return node in self.values.tensors

    def _invariants(self) -> dict[Node, None]:
        """The values that no rows are read for, but for constants and those of other sizes."""
        found: dict[Node, None] = dict.fromkeys(self.shared)
        constant: set[Node] = set()
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            reads = node.all_input_nodes
            if all(n in constant for n in reads):
                constant.add(node)
            elif all(n in found or n in constant for n in reads):
                try:
                    _ = self._is_tensor(node) and self._described(node)
                    found[node] = None
                except ValueError:  # 2 * v, for example
                    continue
        return found

    # ------------------------------------------------------------ products

    def _head(self, node: Node) -> tuple[Node, Node, Node | None] | None:
        """x, weight and bias of a head."""
        args: Any = node.args
        if node.kwargs or node.target not in (aten.mm.default, aten.addmm.default):
            return None
        bias, (x, weight) = (None, args) if len(args) == 2 else (args[0], args[1:])
        shared = [n for n in (weight, bias) if n is not None]
        if x not in self.values.rows or not self._operand(x) or len(args) > 3:
            return None
        if not all(n in self.invariant for n in shared) or not self.values.is_floating(node):
            return None
        if bias is not None and _shape(self.values, bias) != _shape(self.values, node)[1:]:
            return None
        return x, weight, bias

    def _operand(self, node: Node) -> Node | None:
        """The row input that a value is, but for views and casts."""
        while node not in self.given:
            cast = node.target in _CASTS and self.values.is_floating(node)
            if node.op != "call_function" or not (cast or is_view(node) or node.target in _SAME):
                return None
            source: Any = node.args[0]
            if cast and not self.values.is_floating(source):
                return None
            node = source
        return node

    def _tail(
        self, number: int, node: Node, heads: Mapping[Node, Any], results: list[Node]
    ) -> tuple[Node, Tail, Node] | None:
        """The gradient, the tail, and the other operand."""
        turned = False
        while node.target not in (aten.mm.default, *heads):
            if len(node.users) != 1 or results.count(node) > 1:
                return None
            source: Any = node.args[0] if node.args else None
            cast = node.target in _CASTS and self.values.is_floating(source)
            other, flips = (source, False) if cast else self._turned(node)
            if other is None:
                return None
            node = other
            turned = turned ^ flips
        if node in heads or len(node.users) != 1 or results.count(node) > 1:
            return None
        if not self.values.is_floating(node):
            return None
        a: Any = node.args[0]
        b: Any = node.args[1]
        if number not in self.loop.sums:
            fits = a in self.values.rows and a not in self.invariant and b in self.invariant
            a, flips = self._upright(a)
            return (a, Tail(number), b) if fits and not flips and not turned else None
        a, flips = self._upright(a)
        b, stays = self._upright(b)
        if not flips or stays or a not in self.values.rows or b not in self.values.rows:
            return None
        swapped = self._operand(a) is not None
        if self._operand(a) is None and self._operand(b) is None:
            swapped = self.values.width(b) > self.values.width(a)
        if swapped:
            a, b, turned = b, a, not turned
        return a, Tail(number, turned=turned), b

    def _upright(self, node: Node) -> tuple[Node, bool]:
        """The source of a view, and whether the view is its transpose."""
        turned = False
        while True:
            other, flips = self._turned(node)
            if other is None:
                return node, turned
            node = other
            turned = turned ^ flips

    def _turned(self, node: Node) -> tuple[Node | None, bool]:
        """The source of a matrix or of its transpose; None for another node."""
        source: Any = node.args[0] if node.args else None
        if not is_view(node) or self.values.tensors[source].dim() != 2:
            return None, False
        if node.target is aten.t.default:
            return source, True
        if node.target in (aten.permute.default, aten.transpose.int):
            dims: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
            if node.target is aten.permute.default:
                return source, [d % 2 for d in dims] == [1, 0]
            return source, dims[0] % 2 != dims[1] % 2
        reshaped = node.target in (
            *(aten.view.default, aten.reshape.default, aten._unsafe_view.default),
            aten.expand.default,
        )
        same = reshaped and _shape(self.values, node) == _shape(self.values, source)
        return (source, False) if same else (None, False)


def _shape(values: GraphValues, node: Node) -> tuple[str, ...]:
    return tuple(map(str, values.tensors[node].shape))


def _reads(given: Iterable[Node], results: Iterable[Node]) -> list[Node]:
    """Those of ``given`` that the results are computed from, in order."""
    found = set[Node]()
    todo = list(results)
    known = dict.fromkeys(given)
    while todo:
        if (node := todo.pop()) not in found:
            found.add(node)
            todo += [] if node in known else node.all_input_nodes
    return [node for node in known if node in found]


def narrowable(function: Graph, numbers: Sequence[int]) -> tuple[int, ...]:
    """Those of these inputs of a function of rows whose sizes the other inputs have as well."""
    known = {"n", *(name for name, *_ in _sizes(function, numbers))}
    inputs = [node.meta["input"] for node in function.find_nodes(op="placeholder")]
    return tuple(
        i for i in numbers if known.issuperset(s for s in inputs[i].shape if isinstance(s, str))
    )


def narrowed(function: Graph, numbers: Sequence[int]) -> Graph:
    """A function of rows with one value a row, ``[n, 1]``, for some of its ``narrowable`` inputs,
    whose values are all the same in a row: expanded operands need not be copied."""
    made = Graph()
    copies: dict[Node, Node] = {}
    places = function.find_nodes(op="placeholder")
    for i, node in enumerate(places):
        place = copies[node] = made.node_copy(node)
        place.meta["input"] = of = node.meta["input"]
        if i in numbers:
            place.meta["input"] = Input(of.dtype, ("n", *[1] * (len(of.shape) - 1)))
    known = {name: (node, dim) for name, node, dim in _sizes(function, numbers)}
    for i in numbers:
        sizes: list[Any] = [-1]
        for size in places[i].meta["input"].shape[1:]:
            if isinstance(size, str):
                node, dim = known[size]
                size = made.call_function(aten.sym_size.int, (copies[node], dim))
            sizes.append(size)
        copies[places[i]] = made.call_function(aten.expand.default, (copies[places[i]], sizes))
    for node in function.nodes:
        if node not in copies:
            copies[node] = made.node_copy(node, copies.__getitem__)
    return made


def _sizes(function: Graph, but: Sequence[int]) -> Iterator[tuple[str, Node, int]]:
    """The named sizes of a function's inputs, but for some."""
    for i, node in enumerate(function.find_nodes(op="placeholder")):
        for dim, size in enumerate(node.meta["input"].shape if i not in but else ()):
            if isinstance(size, str):
                yield size, node, dim
