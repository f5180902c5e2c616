"""Rows of a loop that change none of its results: masked ones, and those with an ignored label.

In: a loop. Out: the values that are 0 where a row of a result is 0, known without the logits; a
row adds nothing to the loop if that holds for each of its results::

    >>> text = '''rows rows=0,1 sums=0 wide= memory_mb=0 compiled=1
    ... %0 = input float32[n, 9]
    ... %1 = input float32[n, 1]
    ... %2 = aten.exp.default(%0)
    ... %3 = aten.mul.Tensor(%2, %1)
    ... %4 = aten.sum.dim_IntList(%3, [0])
    ... return %4'''
    >>> found = zeros(Loop.parse(text))
    >>> found.results, found.counted([torch.ones(3, 9), torch.tensor([[1.0], [0.0], [2.0]])])
    (((((0, False),),),), tensor([ True, False,  True]))

A product with 0 counts as 0, also where the other factor is inf or nan.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxpass.region.loop import Loop
from fxpass.region.run import Interpreter, apart, is_view, values_of
from fxpass.region.text import results_of
from fxpass.region.trace import between

aten: Any = torch.ops.aten

# 0 where their first argument is
_KEEP = {aten._to_copy, aten.clone, aten.neg, aten.sum, aten.mean, aten.cumsum, aten.abs, aten.tanh}
_KEEP |= {aten.gather, aten.index_select, aten.div, aten.sqrt, aten.square, aten.relu, aten.sign}
_KEEP |= {aten._softmax_backward_data, aten._log_softmax_backward_data, aten.expm1, aten.flip}
_KEEP |= {aten.reshape, aten.view, aten._unsafe_view, aten.expand, aten.permute, aten.t}
_ALL = {
    aten.select_scatter,
    aten.slice_scatter,
    aten.add,
    aten.sub,
    aten.maximum,
    aten.minimum,
    aten.logical_or,
    aten.bitwise_or,
}
_ANY = {aten.mul, aten.logical_and, aten.bitwise_and}
_ZEROS = {aten.zeros, aten.zeros_like, aten.new_zeros}


# Each clause is a set of values, negated or not, that are all 0 only where a row is 0; None of what
# is always 0.
_Clause = frozenset[tuple[Node, bool]]
_Set = frozenset[_Clause] | None
_MOST = 8  # clauses of a value


@dataclass(frozen=True, eq=False)
class Zeros:
    """Values of inputs that make a row of each result 0.

    Attributes:
        graph: from the inputs of the loop to values.
        results: for each result clauses. Where all values of a clause are 0 (of those that are
            negated, True), the row is 0.
    """

    graph: Graph
    results: tuple[tuple[tuple[tuple[int, bool], ...], ...], ...]

    def counted(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """Which rows may change a result ``[N]``; None if all of them may.

        An operand whose rows have several values is not looked at, unless it is expanded.
        """
        values = Interpreter(self.graph, tensors[0].device)(list(tensors))
        known = [_of_rows(value) for value in values]
        found = None
        for clauses in self.results:
            each = [_any([(known[i], negated) for i, negated in clause]) for clause in clauses]
            some = [counts for counts in each if counts is not None]
            if not some:
                return None
            counts = functools.reduce(operator.and_, some)
            found = counts if found is None else found | counts
        return found


def _any(clause: Sequence[tuple[Tensor | None, bool]]) -> Tensor | None:
    """Where a row may be another value than 0; None if that is not known."""
    found = None
    for value, negated in clause:
        if value is None:
            return None
        value = ~value if negated else value
        found = value if found is None else found | value
    return found


def _of_rows(value: Tensor) -> Tensor | None:
    """Whether each row is another value than 0, ``[N]``."""
    for dim in range(value.dim() - 1, 0, -1):
        if not value.shape[dim] or (value.shape[dim] > 1 and value.stride(dim)):
            return None
        value = value.select(dim, 0)
    return value != 0


def zeros(loop: Loop) -> Zeros | None:
    """The inputs that are 0 where the results of a loop are; None if some result is never known to
    be, and of a loop with collectives: which rows count may differ between ranks."""
    return None if loop.on_ranks else _zeros(loop)


@lru_cache(maxsize=1024)
def _zeros(loop: Loop) -> Zeros | None:
    return apart(lambda: _Finder(loop).found())


class _Finder:
    """Finds the factors of the values of one loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.values = values_of(loop.graph)
        self.places = places = loop.graph.find_nodes(op="placeholder")
        self.given = {places[i] for i in loop.rows}
        # values that no logits are read for, nor rows of several values
        self.simple = {p for p in places if p not in self.given or self._is_narrow(p)}
        self.sets: dict[Node, _Set] = {}
        for node in loop.graph.nodes:
            if node.op == "output":
                break
            if node.op == "call_function" and self._is_simple(node):
                self.simple.add(node)
            self.sets[node] = self._of(node)

    def found(self) -> Zeros | None:
        sets = [self.sets[node] for node in results_of(self.loop.graph)]
        if all(some is None for some in sets) or any(some == frozenset() for some in sets):
            return None
        ordered = [_ordered(some) for some in sets if some is not None]
        nodes = dict.fromkeys(n for clauses in ordered for clause in clauses for n, _ in clause)
        number = {node: i for i, node in enumerate(nodes)}
        given = {node: node.meta["input"] for node in self.places}
        results = (
            tuple(tuple((number[n], negated) for n, negated in clause) for clause in clauses)
            for clauses in ordered
        )
        return Zeros(between(self.loop.graph, given, list(nodes)), tuple(results))

    def _is_narrow(self, node: Node) -> bool:
        """Whether a row has one value."""
        return node in self.values.rows and self.values.width(node) == 1

    def _is_simple(self, node: Node) -> bool:
        if not all(n in self.simple for n in node.all_input_nodes):
            return False
        return (
            node not in self.values.tensors or node not in self.values.rows or self._is_narrow(node)
        )

    def _mask(self, node: Any, negated: bool) -> frozenset[_Clause]:
        """The set of what is 0 where a condition does not hold."""
        usable = isinstance(node, Node) and node in self.simple and self._is_narrow(node)
        return frozenset({frozenset({(node, negated)})} if usable else ())

    def _of(self, node: Node) -> _Set:
        what = getattr(node.target, "overloadpacket", None)
        args: Any = node.args
        filled = what in (aten.full, aten.scalar_tensor) and args[what is aten.full] == 0
        same = bool(args) and isinstance(args[0], Node) and (what in _KEEP or is_view(node))
        if what in _ZEROS or filled or (same and self.sets[args[0]] is None):
            return None
        if node in self.given or (node in self.simple and self._is_narrow(node)):
            return frozenset({frozenset({(node, False)})})
        if node.op != "call_function":
            return frozenset()
        if what in (aten.where, aten.masked_fill):
            return self._chosen(what, args)
        if what in _ANY:
            return _union([self._arg(a) for a in args[:2]])
        if what in _ALL:
            return _both([self._arg(a) for a in args[:2]])
        if what is aten.cat:
            return _both([self._arg(a) for a in args[0]])
        if what in (aten.scatter_add, aten.scatter):
            return _both([self._arg(args[0]), self._arg(args[3])])
        if what is aten.mm:  # of rows, or a sum over them
            return _union([self._arg(a) for a in args])
        if (what in _KEEP or is_view(node)) and self._keeps(node):
            return self._arg(args[0])
        return frozenset()

    def _keeps(self, node: Node) -> bool:
        """Whether the rows of a value are those of its first argument, or summed."""
        shape, source = (self.values.tensors.get(n) for n in (node, node.args[0]))  # pyright: ignore
        if shape is None or source is None:
            return False
        rows = [[self.values.name(s) for s in t.shape] for t in (shape, source)]
        what = getattr(node.target, "overloadpacket", None)
        if what in (aten.sum, aten.mean) or is_view(node) or what in (aten.permute, aten.t):
            turned = what in (aten.permute, aten.t) or what in (aten.sum, aten.mean)
            return turned or (rows[0][:1] == rows[1][:1]) or rows[0] == rows[1]
        return rows[0].index("n") == rows[1].index("n") if all("n" in r for r in rows) else False

    def _chosen(self, what: Any, args: Any) -> _Set:
        if what is aten.masked_fill:
            yes = self._arg(args[2])
            no = self._arg(args[0])
            condition = args[1]
        else:
            condition = args[0]
            yes = self._arg(args[1])
            no = self._arg(args[2])
        if no is None:
            return None if yes is None else yes | self._mask(condition, False)
        if yes is None:
            return no | self._mask(condition, True)
        return _both([yes, no])

    def _arg(self, value: Any) -> _Set:
        if isinstance(value, Node):
            return self.sets[value]
        return None if value == 0 else frozenset()


def _union(sets: Sequence[_Set]) -> _Set:
    """One of several is 0."""
    if any(some is None for some in sets):
        return None
    return frozenset().union(*(some for some in sets if some is not None))


def _both(sets: Sequence[_Set]) -> _Set:
    """All of several are 0."""
    known = [some for some in sets if some is not None]
    if not known:
        return None
    found = known[0]
    for some in known[1:]:
        found = frozenset(a | b for a in found for b in some)
        found = frozenset(frozenset(clause) for clause in _ordered(found)[:_MOST])
    return found


def _ordered(clauses: frozenset[_Clause]) -> list[list[tuple[Node, bool]]]:
    """The shortest first."""
    listed = [sorted(clause, key=str) for clause in clauses]
    return sorted(listed, key=lambda clause: (len(clause), str(clause)))
