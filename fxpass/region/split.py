"""A loop in parts: invariants, which are the same for all rows; heads; a function of rows; tails.

In: a :class:`fxpass.region.loop.Loop`. Out: a :class:`Split`. A head is the product of a row input
and a weight. A tail, or last product, multiplies a gradient by a weight or, summed over the rows,
by rows. The loop computes heads and tails with few classes at a time, and in the dtype that the
device multiplies fastest; the function of rows computes the values between them::

    >>> text = '''rows rows=0 sums=0 wide= memory_mb=0 compiled=1
    ... %0 = input float32[n, 5]
    ... %1 = input float32[5, 9]
    ... %2 = aten.mm.default(%0, %1)
    ... %3 = aten.tanh.default(%2)
    ... %4 = aten.t.default(%3)
    ... %5 = aten.mm.default(%4, %0)
    ... return %5'''
    >>> parts = split_loop(Loop.parse(text))
    >>> [str(node.target) for node in parts.function.nodes]
    ['input_0', 'aten.tanh.default', 'output']
    >>> parts.heads[0].logits, parts.groups[0].tails[0].result
    (Input(dtype=torch.float32, shape=('n', 9)), 0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from fxpass.region.loop import Loop
from fxpass.region.run import GraphValues, in_own_thread, is_view, values_of
from fxpass.region.text import Input, results_of
from fxpass.region.trace import subgraph

aten: Any = torch.ops.aten

_CASTS = {aten._to_copy.default}
_SAME = {aten.clone.default, aten.alias.default, aten.detach.default}


class HeadOperands(NamedTuple):
    """``x @ weight + bias``, by their numbers in the split's operands and invariants."""

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
        output: the output of the function of ``gᵀ @ output``, a sum.
        transposed: whether the sum is ``[K, V]``.
    """

    result: int
    weight: int | None = None
    operand: int | None = None
    output: int | None = None
    transposed: bool = False


class Group(NamedTuple):
    """The tails of one gradient."""

    output: int  # the number of the gradient in the outputs of the function
    gradient: Input
    tails: tuple[Tail, ...]


@dataclass(frozen=True, eq=False)
class Split:
    """The parts of a loop.

    Attributes:
        before: from all inputs of the loop without rows to the invariants.
        operands: from all inputs with rows to the operands of heads and sums, by views and casts.
        heads: the products of operands and invariants.
        function: from logits, then ``rows``, then ``shared``, to ``results``, then tails' operands.
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


@lru_cache(maxsize=1024)
def split_loop(loop: Loop) -> Split:
    """The parts of a loop; the same for the same loop."""
    return in_own_thread(lambda: _Splitter(loop).split())


class _HeadNodes(NamedTuple):
    x: Node
    weight: Node
    bias: Node | None


class _TailNodes(NamedTuple):
    """A tail whose other operand is a node; see :class:`Tail`."""

    gradient: Node
    other: Node
    result: int
    transposed: bool = False


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

    def split(self) -> Split:
        heads = {n: head for n in self.graph.nodes if (head := self._head(n)) is not None}
        results = results_of(self.graph)
        tails: dict[Node, list[_TailNodes]] = {}  # by their gradients
        computed = []  # results of the function
        for i, node in enumerate(results):
            found = self._tail(i, node, heads, results)
            if found is None:
                computed.append(i)
            else:
                tails.setdefault(found.gradient, []).append(found)
        others = [found.other for of_gradient in tails.values() for found in of_gradient]
        outputs = [
            n
            for n in dict.fromkeys([*tails, *others])
            if n not in self.invariant and (n in tails or self._operand(n) is None)
        ]
        ends = [*(results[i] for i in computed), *outputs]
        # an expanded tensor takes no memory in the function
        shared = (n for n in self.invariant if n.target is not aten.expand.default)
        candidates = [*heads, *self.given, *(n for n in shared if self._is_tensor(n))]
        inputs = _reads(candidates, ends)
        invariants = [n for head in heads.values() for n in (head.weight, head.bias)]
        invariants += [n for n in others if n in self.invariant]
        invariants += [n for n in inputs if n in self.invariant]
        invariants = list(dict.fromkeys(n for n in invariants if n is not None))
        operands = [head.x for head in heads.values()]
        operands += [n for n in others if n not in outputs]
        operands = list(dict.fromkeys(n for n in operands if n not in self.invariant))
        invariant_numbers = {n: i for i, n in enumerate(invariants)}
        operand_numbers = {n: i for i, n in enumerate(operands)}
        output_numbers = {n: len(computed) + i for i, n in enumerate(outputs)}

        def tail_of(found: _TailNodes) -> Tail:
            return Tail(
                found.result,
                weight=invariant_numbers.get(found.other),
                operand=operand_numbers.get(found.other),
                output=output_numbers.get(found.other),
                transposed=found.transposed,
            )

        return Split(
            before=self._subgraph(self.shared, invariants),
            operands=self._subgraph(self.given, operands),
            heads=tuple(
                HeadOperands(
                    x=operand_numbers[head.x],
                    weight=invariant_numbers[head.weight],
                    bias=None if head.bias is None else invariant_numbers[head.bias],
                    logits=self._described(node),
                    hidden=self._described(head.x).shape[1],
                )
                for node, head in heads.items()
            ),
            function=self._subgraph(inputs, ends),
            rows=tuple(i for i, n in enumerate(self.given) if n in inputs),
            shared=tuple(invariant_numbers[n] for n in inputs if n in invariant_numbers),
            results=tuple(computed),
            groups=tuple(
                Group(output_numbers[g], self._described(g), tuple(map(tail_of, of_gradient)))
                for g, of_gradient in tails.items()
            ),
        )

    def _subgraph(self, given: Iterable[Node], results: Sequence[Node]) -> Graph:
        return subgraph(self.graph, {n: self._described(n) for n in given}, results)

    def _described(self, node: Node) -> Input:
        return node.meta["input"] if node.op == "placeholder" else self.values.described(node)

    def _is_tensor(self, node: Node) -> bool:
        return node in self.values.tensors

    def _invariants(self) -> dict[Node, None]:
        """The values that read no rows, but for constants and values of other sizes."""
        invariants: dict[Node, None] = dict.fromkeys(self.shared)
        constant: set[Node] = set()
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            reads = node.all_input_nodes
            if all(n in constant for n in reads):
                constant.add(node)
            elif all(n in invariants or n in constant for n in reads):
                try:
                    _ = self._is_tensor(node) and self._described(node)
                    invariants[node] = None
                except ValueError:  # 2 * v, for example
                    continue
        return invariants

    # ------------------------------------------------------------ products

    def _head(self, node: Node) -> _HeadNodes | None:
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
        return _HeadNodes(x, weight, bias)

    def _operand(self, node: Node) -> Node | None:
        """The row input of which a value is a view or a cast."""
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
    ) -> _TailNodes | None:
        """The tail that is result ``number``."""
        transposed = False
        while node.target not in (aten.mm.default, *heads):
            if len(node.users) != 1 or results.count(node) > 1:
                return None
            source: Any = node.args[0] if node.args else None
            cast = node.target in _CASTS and self.values.is_floating(source)
            source, flips = (source, False) if cast else self._matrix_source(node)
            if source is None:
                return None
            node = source
            transposed ^= flips
        if node in heads or len(node.users) != 1 or results.count(node) > 1:
            return None
        if not self.values.is_floating(node):
            return None
        a: Any = node.args[0]
        b: Any = node.args[1]
        if number not in self.loop.sums:
            fits = a in self.values.rows and a not in self.invariant and b in self.invariant
            a, flips = self._without_views(a)
            return _TailNodes(a, b, number) if fits and not flips and not transposed else None
        a, flips = self._without_views(a)
        b, stays = self._without_views(b)
        if not flips or stays or a not in self.values.rows or b not in self.values.rows:
            return None
        swapped = self._operand(a) is not None
        if self._operand(a) is None and self._operand(b) is None:
            swapped = self.values.width(b) > self.values.width(a)
        if swapped:
            a, b = b, a
            transposed = not transposed
        return _TailNodes(a, b, number, transposed)

    def _without_views(self, node: Node) -> tuple[Node, bool]:
        """The matrix of which a node is a view, and whether the view is its transpose."""
        transposed = False
        while True:
            source, flips = self._matrix_source(node)
            if source is None:
                return node, transposed
            node = source
            transposed ^= flips

    def _matrix_source(self, node: Node) -> tuple[Node | None, bool]:
        """The source of a view of a matrix, and whether the view is its transpose; None if the node
        is no such view."""
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
    """Those of ``given`` from which the results are computed, in order."""
    seen = set[Node]()
    todo = list(results)
    inputs = dict.fromkeys(given)
    while todo:
        if (node := todo.pop()) not in seen:
            seen.add(node)
            todo += [] if node in inputs else node.all_input_nodes
    return [node for node in inputs if node in seen]
