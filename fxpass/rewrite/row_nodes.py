"""The nodes of a row function, of all rows of a program.

In: a :class:`fxpass.lower.normal.Normal`, nodes of its operands and of the operator's outputs. Out:
nodes of the program's graph: operands, arithmetic on outputs, and what stays of the row function::

    %b = exp(pick - %old)    ->    %sub = sub(%rows, %old_rows);  %b = exp(%sub)
"""

from __future__ import annotations

import functools
import math
from typing import Any

import sympy
import torch
from sympy import Symbol
from torch.fx import Node

from fxpass.graph.nodes import hint, value
from fxpass.lower.normal import Normal
from fxpass.lower.reading import same
from fxpass.lower.records import Chosen
from fxpass.region.run import makes
from fxpass.spec.dtypes import LOW_PRECISION, compute_dtype
from fxpass.spec.functions import FUNCTIONS, Where

A: Any = torch.ops.aten


class RowNodes:
    """Inserts nodes of a row function, with an emitter.

    Attributes:
        emitter: a :class:`fxpass.rewrite.regions.Emitter`.
        ranks: what it inserts for a sharded head.
        normal: the normal form of the row function.
        x, weight: the hidden states ``[N, D]`` and the weight ``[V, D]``.
        dtype: of the logits.
        symbols: what outputs have become: ``[N]``, or ``[N, K]`` of K picks.
        trains: whether a result has a gradient.
        shared: results whose memory others read, too.
    """

    x: Node
    weight: Node
    trains: bool

    def __init__(self, emitter: Any, normal: Normal, leaves: list[list[Node]]) -> None:
        self.emitter, self.normal, self.call = emitter, normal, emitter.call
        self.ranks: Any = emitter.ranks
        places = normal.graph.find_nodes(op="placeholder")
        self.x, self.weight = leaves[0][:2]
        self.dtype = value(self.x).dtype
        self.symbols: dict[Symbol, Node] = {}
        self.shared: list[Node] = []
        self._logits = places[0]
        self._known: dict[Node, Any] = {
            place: tensors[0] for place, tensors in zip(places[1:], leaves[1:], strict=True)
        }

    def rows(self) -> Any:
        """N."""
        return self.emitter.size(value(self.x).shape[0])

    def cut(self, node: Node) -> Node:
        """A node through which no gradient flows."""
        return self.call(torch.detach, node)

    def operand(self, node: Node) -> Node:
        """A node that no logits are read for, of all rows."""
        return self._copied(node, self.operand)

    def index(self, node: Node) -> Node:
        """Class indices ``[N, K]``."""
        index, count = self.operand(node), math.prod(node.meta["val"].shape[1:])
        same = value(index).dim() == 2
        return index if same else self.call(torch.reshape, index, [self.rows(), count])

    def operands_first(self) -> None:
        """Inserts the operands that what stays of the row function reads: the operator's call, with
        coefficients computed of them, may stand after them alone."""
        todo, seen = list(self.normal.results), set(self.normal.results)
        while todo:
            node = todo.pop()
            if node in self.normal.late:
                new = [n for n in node.all_input_nodes if n not in seen]
                seen.update(new)
                todo += new
            elif node not in self.normal.rows:
                self.operand(node)

    def _copied(self, node: Node, of: Any) -> Node:
        if node not in self._known and _is_size(node, self._logits):
            size = value(self.x if node.args[1] == 0 else self.weight).shape[0]
            if node.args[1] == 1 and self.ranks.sharding is not None:
                size = self.ranks.sharding.classes
            self._known[node] = self.emitter.size(size)
        if node not in self._known:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), of)
            if makes(node.target):
                kwargs = {**kwargs, "device": value(self.x).device}
            self._known[node] = self._run(node, args, kwargs)
        return self._known[node]

    def _run(self, node: Node, args: Any, kwargs: Any) -> Node:
        packet = getattr(node.target, "overloadpacket", None)
        if packet is A.detach:
            return self.cut(args[0])
        if packet is A.scalar_tensor:  # whose example value would be no fake one
            more = {k: kwargs[k] for k in ("dtype", "device") if k in kwargs}
            return self.call(A.full.default, [], args[0], **more)
        alike = packet in _SAME and isinstance(node.meta["val"], torch.Tensor)
        if alike and _is_same(node.all_input_nodes[0].meta["val"], node.meta["val"]):
            return args[0]
        return self.call(node.target, *args, **kwargs)

    def _row(self, node: Node) -> Node:
        """A node of rows, or of an operand; in the dtype of the sums where it was rounded."""
        if node in self._known:
            return self._known[node]
        if node in self.normal.rows:
            self._known[node] = self._of_outputs(node)
            return self._known[node]
        exact = torch.Tag.pointwise in getattr(node.target, "tags", ())

        def of(source: Node) -> Node:
            made = self._row(source)
            example = source.meta["val"]
            rounded = isinstance(example, torch.Tensor) and isinstance(made, Node)
            if rounded and not exact and value(made).dtype != example.dtype:
                made = self.call(A._to_copy.default, made, dtype=example.dtype)
            return made

        if self._rounds(node):
            self._known[node] = self._row(node.all_input_nodes[0])
        return self._copied(node, of)

    def _rounds(self, node: Node) -> bool:
        """Whether a cast rounds rows to 16 bits, which only results are."""
        (source, *_) = node.all_input_nodes or (node,)
        is_cast = str(node.target).startswith("aten._to_copy")
        return is_cast and node.meta["val"].dtype in LOW_PRECISION and _is_float(source)

    def _of_outputs(self, node: Node) -> Node:
        """The rows of a node, by arithmetic on outputs."""
        new = self.arithmetic(self.normal.rows[node])
        if not self.normal.is_attached(node) and self.trains:
            new = self.cut(new)
        example = node.meta["val"]
        inside = [hint(s) for s in example.shape[1:]]
        if not isinstance(new, Node) or value(new).dim() == 0:
            raise ValueError("rows that read no output")
        if [*value(new).shape[1:]] != inside:
            new = self.call(torch.reshape, new, [self.rows(), *inside])
        return new

    def result(self, node: Node) -> Node:
        new = self._row(node)
        if value(new).dtype != node.meta["val"].dtype:
            new = self.call(A._to_copy.default, new, dtype=node.meta["val"].dtype)
        return new

    def arithmetic(self, expr: Any) -> Any:
        """An expression of outputs and operands, as nodes of flat rows."""
        tables = self.normal.tables
        if isinstance(expr, Symbol):
            if expr in self.symbols:
                return self.symbols[expr]
            if expr in tables.cut:
                return self.cut(self.arithmetic(tables.cut[expr]))
            if expr in tables.chosen:
                return self._chosen(tables.chosen[expr])
            node = self.wide(self.operand(tables.nodes[expr]))
            one = all(size == 1 for size in tables.nodes[expr].meta["val"].shape)
            return self.call(torch.reshape, node, [] if one else [-1])
        if expr.is_number:
            number = float(expr)
            return int(number) if expr.is_Integer and abs(number) < 2**63 else number
        if isinstance(expr, sympy.Mul):
            # of exp(lse) * exp(-max), the first factor may be infinite and the second 0
            expr = sympy.powsimp(expr, combine="exp")
        parts = [self.arithmetic(part) for part in expr.args]
        if any(isinstance(p, Node) and value(p).dim() == 2 for p in parts):  # [N, K]
            parts = [self.column(p) for p in parts]
        if isinstance(expr, sympy.Add | sympy.Mul):
            function = torch.add if isinstance(expr, sympy.Add) else torch.mul
            parts.sort(key=lambda p: not isinstance(p, Node))
            return functools.reduce(lambda a, b: self.call(function, a, b), parts)
        if isinstance(expr, sympy.Pow):
            base, power = parts
            if power != -1:
                return self.call(torch.pow, base, power)
            return self.saved(self.call(torch.reciprocal, base))
        if isinstance(expr, Where):
            x, y, *branches = parts
            return self.call(torch.where, self.call(type(expr).holds, x, y), *branches)
        return self.saved(self.call(FUNCTIONS[type(expr).__name__].tensor, *parts))

    def saved(self, result: Node) -> Node:
        """A result that autograd may save, and which the program must not write to."""
        self.shared.append(result)
        return result

    def _chosen(self, chosen: Chosen) -> Node:
        """What an operand has at picked classes, ``[N]`` or ``[N, K]``."""
        operand, index = self.operand(chosen.operand), self.index(chosen.index)
        if value(operand).dim() > 2:  # dimensions of one, behind the classes or before them
            first = 1 if value(operand).shape[0] == 1 else self.rows()
            operand = self.call(torch.reshape, operand, [first, -1])
        sizes = [self.rows(), -1]
        rows = self.call(A.expand.default, operand, sizes)
        found = self.wide(self.call(A.gather.default, rows, 1, index))
        return self.call(A.squeeze.dim, found, 1) if value(index).shape[1] == 1 else found

    def wide(self, node: Node) -> Node:
        """A tensor in the dtype of the outputs at least: the program promotes it to that."""
        dtype = compute_dtype(self.dtype)
        wide = value(node).dtype.itemsize >= dtype.itemsize
        if value(node).is_floating_point() and wide:  # integers would wrap
            return node
        return self.call(A._to_copy.default, node, dtype=dtype)

    def column(self, part: Any) -> Any:
        """A row ``[N]`` as ``[N, 1]``, beside K picks of each row."""
        is_row = isinstance(part, Node) and value(part).dim() == 1
        return self.call(A.unsqueeze.default, part, 1) if is_row else part


# Views and copies that are left out if they change nothing.
_SAME = (A.expand, A.slice, A.view, A._unsafe_view, A.alias, A.clone, A._to_copy)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    sizes = zip(one.shape, other.shape, strict=False)
    alike = one.dim() == other.dim() and all(same(a, b) for a, b in sizes)
    return alike and one.dtype == other.dtype


def _is_size(node: Node, of: Node) -> bool:
    return str(node.target).startswith("aten.sym_size") and node.args[0] is of


def _is_float(node: Node) -> bool:
    example = node.meta["val"]
    return isinstance(example, torch.Tensor) and example.is_floating_point()
