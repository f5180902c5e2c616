"""Expressions of a head's outputs as nodes of a graph.

In: an expression of outputs, rows and given values. Out: the nodes that compute it, flat ``[N]``::

    lse_0 - moment(1,1)    ->    %add = add(%lse, %mul);  %mul = mul(%moment, -1)
"""

from __future__ import annotations

import functools
from typing import Any

import sympy
import torch
from sympy import Symbol
from torch.fx import Graph, Node

from fxpass.graph.nodes import is_number, value
from fxpass.match.classes import Classes, Flow
from fxpass.match.edits import Step
from fxpass.rewrite.builder import Builder
from fxpass.spec.dtypes import compute_dtype
from fxpass.spec.functions import FUNCTIONS, Where


class Arithmetic(Builder):
    """Inserts arithmetic on the outputs of a head.

    Attributes:
        flow: what was read of the head.
        dtype: of its logits.
        hidden: the hidden states of which views are taken.
        known: the outputs, flat: ``[N]``, or ``[N, K]``.
        results: nodes whose result autograd may save.
        replaced: reductions, of all heads, and what has taken their place: they may be operands.
    """

    def __init__(self, graph: Graph, site: Node, flow: Flow, replaced: dict[Node, Node]) -> None:
        super().__init__(graph, site, flow.sharding)
        self.flow, self.linear = flow, flow.linear
        self.dtype = value(self.linear.node).dtype
        self.known: dict[Symbol, Node] = {}
        self.results: list[Node] = []
        self.hidden = self.linear.x
        if self.sharding is not None:
            with graph.inserting_before(self.linear.node):
                x = self.cast(self.linear.x, self.dtype, self.linear.node)
                self.hidden = self.hidden_here(x)
        self.replaced = replaced

    def current(self, node: Node) -> Node:
        """The node that has taken the place of a node."""
        return self.replaced.get(node, node)

    def _viewed(self, tensor: Node, steps: tuple[Step, ...]) -> Node:
        for step in steps:
            if step.view.target == "to_local":
                tensor = self.x_to_local(tensor)
                continue
            size = self.size(tensor, step.view.before)
            op, target, args = step.view.replayed(size)
            tensor = self.call(op, target, tensor, *args)
        return tensor

    def _flat(self, tensor: Node, dim: int) -> Node:
        rank = value(tensor).dim()
        if rank == 1:
            return self.method("unsqueeze", tensor, 0)
        if dim != rank - 1:
            tensor = self.method("movedim", tensor, dim, -1)
        return tensor if rank == 2 else self.method("flatten", tensor, 0, -2)

    def _values(self, symbol: Symbol) -> Node:
        """The tensor of a symbol as ``[V]`` or ``[N, V]``, with this rank's classes."""
        node, dim = self.current(self.flow.tensors[symbol]), self.flow.dims.get(symbol)
        node = self.method("reshape", node, -1) if dim is None else self._flat(node, dim)
        return self.classes_here(node)

    def _arithmetic(self, expr: Any) -> Any:
        """An expression of outputs and row symbols, as nodes of flat rows."""
        if isinstance(expr, Symbol):
            if expr in self.known:
                return self.known[expr]
            # computed anew by each reader: one of them may be under no_grad
            tensor = self._wide(self.current(self.flow.tensors[expr]))
            if is_number(tensor):
                dtype = compute_dtype(self.dtype)
                one = self.method("new_ones", self.linear.x, (), dtype=dtype)
                return self.method("mul", one, tensor)
            if value(tensor).numel() == 1:
                return self.method("reshape", self.whole(tensor), ())
            if expr in self.flow.repeated_rows:
                tensor = self._repeated(tensor, self.flow.repeated_rows[expr])
            return self.rows_here(self.method("flatten", tensor))
        if expr.is_number:
            number = float(expr)
            return int(number) if expr.is_Integer and abs(number) < 2**63 else number
        if isinstance(expr, sympy.Mul):
            # of exp(lse) * exp(-max), the first factor may be infinite and the second 0
            expr = sympy.powsimp(expr, combine="exp")
        args = expr.args
        if isinstance(expr, Where):  # of a number and a row, the difference is a row
            x, y, *branches = args
            args = (x - y, *branches)
        parts = [self._arithmetic(part) for part in args]
        if any(isinstance(p, Node) and value(p).dim() == 2 for p in parts):  # [N, K]
            parts = [self._column(p) for p in parts]
        if isinstance(expr, sympy.Add | sympy.Mul):
            name = "add" if isinstance(expr, sympy.Add) else "mul"
            parts.sort(key=lambda p: not isinstance(p, Node))
            return functools.reduce(lambda a, b: self.method(name, a, b), parts)
        if isinstance(expr, sympy.Pow):
            base, power = parts
            if power != -1:
                return self.method("pow", base, power)
            return self._kept(self.method("reciprocal", base))
        if isinstance(expr, Where):
            difference, *branches = parts
            condition = self.function(type(expr).holds, difference, 0)
            return self.function(torch.where, condition, *branches)
        return self._kept(self.function(FUNCTIONS[type(expr).__name__].tensor, *parts))

    def _kept(self, result: Node) -> Node:
        """A result that autograd may save."""
        self.results.append(result)
        return result

    def _wide(self, tensor: Node) -> Node:
        """A tensor in the dtype of the outputs at least: the program promotes it to that."""
        dtype = compute_dtype(self.dtype)
        if is_number(tensor):
            return tensor
        wide = value(tensor).dtype.itemsize >= dtype.itemsize
        if value(tensor).is_floating_point() and wide:  # integers would wrap
            return tensor
        return self.method("to", tensor, dtype)

    def _repeated(self, tensor: Node, like: Classes) -> Node:
        """A tensor that is broadcast to the rows of logits."""
        x = self._viewed(self.hidden, like.steps)
        sizes = self.sizes(x)
        sizes[like.dim] = 1
        return self.method("expand", tensor, *sizes)

    def _column(self, part: Any) -> Any:
        """A row ``[N]`` as ``[N, 1]``, beside K picks of each row."""
        is_row = isinstance(part, Node) and value(part).dim() == 1
        return self.method("unsqueeze", part, 1) if is_row else part
