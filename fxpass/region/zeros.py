"""Rows of a loop that change none of its results: masked ones, and those with an ignored label.

In: a loop. Out: conditions on its inputs, which do not read the logits, under which a row of a
result is 0. A row contributes nothing if they hold for each result::

    >>> text = '''rows rows=0,1 sums=0 wide= memory_mb=0 compiled=1
    ... %0 = input float32[n, 9]
    ... %1 = input float32[n, 1]
    ... %2 = aten.exp.default(%0)
    ... %3 = aten.mul.Tensor(%2, %1)
    ... %4 = aten.sum.dim_IntList(%3, [0])
    ... return %4'''
    >>> zero_rows = zero_rows_of(Loop.parse(text))
    >>> zero_rows.results
    ((((0, False),),),)
    >>> zero_rows.contributing([torch.ones(3, 9), torch.tensor([[1.0], [0.0], [2.0]])])
    tensor([ True, False,  True])

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
from fxpass.region.run import Interpreter, in_own_thread, is_view, values_of
from fxpass.region.text import results_of
from fxpass.region.trace import subgraph

aten: Any = torch.ops.aten

# 0 where their first argument is 0
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


# A clause is a set of values, negated or not: where all are 0, a row is 0. None stands for a value
# that is always 0.
_Clause = frozenset[tuple[Node, bool]]
_Set = frozenset[_Clause] | None
_MOST = 8  # clauses of a value


@dataclass(frozen=True, eq=False)
class ZeroRows:
    """Conditions under which a row of each result is 0.

    Attributes:
        graph: from the inputs of the loop to values.
        results: for each result, clauses: where all values of a clause are 0 (negated ones: True),
            the row is 0.
    """

    graph: Graph
    results: tuple[tuple[tuple[tuple[int, bool], ...], ...], ...]

    def contributing(self, tensors: Sequence[Tensor]) -> Tensor | None:
        """The mask of the rows that may change a result, ``[N]``; None if all of them may.

        Operands whose rows have several values are not read, unless they are expanded.
        """
        values = Interpreter(self.graph, tensors[0].device)(list(tensors))
        masks = [_nonzero_rows(value) for value in values]
        contributing = None
        for clauses in self.results:
            of_clauses = (_any([(masks[i], negated) for i, negated in c]) for c in clauses)
            nonzero = [mask for mask in of_clauses if mask is not None]
            if not nonzero:
                return None
            mask = functools.reduce(operator.and_, nonzero)
            contributing = mask if contributing is None else contributing | mask
        return contributing


def _any(clause: Sequence[tuple[Tensor | None, bool]]) -> Tensor | None:
    """The mask of the rows in which a value of a clause is not 0; None if a mask is None."""
    mask = None
    for value, negated in clause:
        if value is None:
            return None
        value = ~value if negated else value
        mask = value if mask is None else mask | value
    return mask


def _nonzero_rows(value: Tensor) -> Tensor | None:
    """The mask of the rows that are not 0, ``[N]``; None if a row has several values in memory."""
    for dim in range(value.dim() - 1, 0, -1):
        if not value.shape[dim] or (value.shape[dim] > 1 and value.stride(dim)):
            return None
        value = value.select(dim, 0)
    return value != 0


@lru_cache(maxsize=1024)
def zero_rows_of(loop: Loop) -> ZeroRows | None:
    """The conditions under which rows of a loop are 0; None if there are none for some result, for
    a loop that merges results, and for a loop with collectives: ranks may differ in the rows that
    contribute."""
    every = loop.on_ranks or loop.merges
    return None if every else in_own_thread(lambda: _Finder(loop).zero_rows())


class _Finder:
    """Finds the clauses of the values of one loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.values = values_of(loop.graph)
        self.places = places = loop.graph.find_nodes(op="placeholder")
        self.given = {places[i] for i in loop.rows}
        # values that read neither logits nor rows of several values
        self.simple = {p for p in places if p not in self.given or self._is_narrow(p)}
        self.sets: dict[Node, _Set] = {}
        for node in loop.graph.nodes:
            if node.op == "output":
                break
            if node.op == "call_function" and self._is_simple(node):
                self.simple.add(node)
            self.sets[node] = self._clauses(node)

    def zero_rows(self) -> ZeroRows | None:
        sets = [self.sets[node] for node in results_of(self.loop.graph)]
        if all(clauses is None for clauses in sets) or frozenset() in sets:
            return None
        ordered = [_ordered(clauses) for clauses in sets if clauses is not None]
        nodes = dict.fromkeys(n for clauses in ordered for clause in clauses for n, _ in clause)
        number = {node: i for i, node in enumerate(nodes)}
        given = {node: node.meta["input"] for node in self.places}
        results = (
            tuple(tuple((number[n], negated) for n, negated in clause) for clause in clauses)
            for clauses in ordered
        )
        return ZeroRows(subgraph(self.loop.graph, given, list(nodes)), tuple(results))

    def _is_narrow(self, node: Node) -> bool:
        """Tells if a row has one value."""
        return node in self.values.rows and self.values.width(node) == 1

    def _is_simple(self, node: Node) -> bool:
        if not all(n in self.simple for n in node.all_input_nodes):
            return False
        return (
            node not in self.values.tensors or node not in self.values.rows or self._is_narrow(node)
        )

    def _mask(self, node: Any, negated: bool) -> frozenset[_Clause]:
        """The clauses of a value that is 0 where a condition does not hold."""
        usable = isinstance(node, Node) and node in self.simple and self._is_narrow(node)
        return frozenset({frozenset({(node, negated)})} if usable else ())

    def _clauses(self, node: Node) -> _Set:
        packet = getattr(node.target, "overloadpacket", None)
        args: Any = node.args
        filled = packet in (aten.full, aten.scalar_tensor) and args[packet is aten.full] == 0
        same = bool(args) and isinstance(args[0], Node) and (packet in _KEEP or is_view(node))
        if packet in _ZEROS or filled or (same and self.sets[args[0]] is None):
            return None
        if node in self.given or (node in self.simple and self._is_narrow(node)):
            return frozenset({frozenset({(node, False)})})
        if node.op != "call_function":
            return frozenset()
        if packet in (aten.where, aten.masked_fill):
            return self._chosen(packet, args)
        if packet in _ANY:
            return _union([self._arg(a) for a in args[:2]])
        if packet in _ALL:
            return _both([self._arg(a) for a in args[:2]])
        if packet is aten.cat:
            return _both([self._arg(a) for a in args[0]])
        if packet in (aten.scatter_add, aten.scatter):
            return _both([self._arg(args[0]), self._arg(args[3])])
        if packet is aten.mm:  # of rows, or a sum over them
            return _union([self._arg(a) for a in args])
        if (packet in _KEEP or is_view(node)) and self._keeps(node):
            return self._arg(args[0])
        return frozenset()

    def _keeps(self, node: Node) -> bool:
        """Tells if the rows of a value are those of its first argument, or summed."""
        tensors = [self.values.tensors.get(n) for n in (node, node.args[0])]  # pyright: ignore
        if any(tensor is None for tensor in tensors):
            return False
        packet = getattr(node.target, "overloadpacket", None)
        if packet in (aten.sum, aten.mean, aten.permute, aten.t):
            return True
        shape, source = ([self.values.name_of_size(s) for s in t.shape] for t in tensors)  # pyright: ignore
        if is_view(node):
            return shape[:1] == source[:1]
        return "n" in shape and "n" in source and shape.index("n") == source.index("n")

    def _chosen(self, packet: Any, args: Any) -> _Set:
        if packet is aten.masked_fill:
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
    """The clauses of a value that is 0 where one of several is 0."""
    if any(clauses is None for clauses in sets):
        return None
    return frozenset().union(*(clauses for clauses in sets if clauses is not None))


def _both(sets: Sequence[_Set]) -> _Set:
    """The clauses of a value that is 0 where all of several are 0."""
    all_zero = None
    for clauses in sets:
        if all_zero is not None and clauses is not None:
            joined = frozenset(a | b for a in all_zero for b in clauses)
            all_zero = frozenset(frozenset(clause) for clause in _ordered(joined)[:_MOST])
        else:
            all_zero = clauses if all_zero is None else all_zero
    return all_zero


def _ordered(clauses: frozenset[_Clause]) -> list[list[tuple[Node, bool]]]:
    """The clauses as lists, the shortest first."""
    lists = [sorted(clause, key=str) for clause in clauses]
    return sorted(lists, key=lambda clause: (len(clause), str(clause)))
