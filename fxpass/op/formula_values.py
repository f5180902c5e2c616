"""Values of a function of rows without classes: operands of its formula, and results.

In: the inputs of the function, and the outputs of its formula. Out: the values of nodes and of
expressions of rows, each computed at its first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sympy import Symbol
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxpass.formula import expression
from fxpass.lower.formula import resolved
from fxpass.lower.reading import Reading
from fxpass.lower.records import ClassOperand, RowOperand, SpreadOperand
from fxpass.region.run import is_factory


class FormulaValues:
    """The values of one run.

    Args:
        reading: of the function.
        inputs: those of the function, but for the logits.
        n: the rows.
        dtype: in which expressions are computed.
        device: of all tensors.

    Attributes:
        outputs: those of the formula by symbol, ``[N, 1]`` or ``[N, K]``.
    """

    def __init__(
        self,
        reading: Reading,
        inputs: Sequence[Tensor],
        n: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.reading = reading
        self.tables = reading.tables
        self.n = n
        self.dtype = dtype
        self.device = device
        self.outputs: dict[Symbol, Tensor] = {}
        first = next(iter(reading.classes))
        places = first.graph.find_nodes(op="placeholder")[1:]
        self._nodes: dict[Node, Any] = dict(zip(places, inputs, strict=True))
        self._like = torch.empty(0, dtype=dtype, device=device)

    def node_value(self, node: Node) -> Any:
        """The value of a node that has no classes."""
        if node in self._nodes:
            return self._nodes[node]
        if node in self.reading.rows:
            value = self._reduced_value(node)
        else:
            args: Any = map_arg(node.args, self.node_value)
            kwargs: Any = map_arg(node.kwargs, self.node_value)
            options = {"device": self.device} if is_factory(node.target) else {}
            value = node.target(*args, **kwargs, **options)  # pyright: ignore[reportCallIssue]
        self._nodes[node] = value
        return value

    def _reduced_value(self, node: Node) -> Tensor:
        value = self.expression_value(resolved(self.tables, self.reading.rows[node].expr))
        value = value.expand(self.n, value.shape[1])
        like = node.meta["val"]
        if node in self.reading.totals:
            return value.sum().to(like.dtype)
        return value.reshape(self.n, *like.shape[1:]).to(like.dtype)

    def expression_value(self, expr: Any) -> Tensor:
        """An expression of rows, ``[N, 1]`` or ``[N, K]``; one of numbers has one row."""
        named = {s.name: self.symbol_value(s) for s in expr.free_symbols}
        return expression.evaluate_rows(expr, self._like, named)

    def symbol_value(self, symbol: Symbol) -> Tensor:
        """The value of a symbol of rows."""
        tables = self.tables
        if symbol in self.outputs:
            return self.outputs[symbol]
        if symbol in tables.sums:
            operand = tables.sums[symbol]
            if isinstance(operand, SpreadOperand):
                return self.symbol_value(operand).sum(1, True)
            values = self.node_value(tables.nodes[operand]).to(self.dtype)
            of_class = isinstance(operand, ClassOperand)
            return (values.reshape(1, -1) if of_class else self._column(values)).sum(1, True)
        if isinstance(symbol, SpreadOperand):
            return self.expression_value(tables.spread[symbol].value)
        if symbol in tables.chosen:
            chosen = tables.chosen[symbol]
            index = self.index_value(chosen.index)
            values = self.node_value(chosen.operand).to(self.dtype)
            if values.dim() == 2 and values.shape[0] == self.n and values.shape[1] > 1:
                return values.gather(1, index)
            return values.reshape(-1)[index]
        value = self.node_value(tables.nodes[symbol]).to(self.dtype)
        return value.reshape(1, 1) if value.numel() == 1 else self._column(value)

    def _column(self, value: Tensor) -> Tensor:
        """A tensor of rows as ``[N, K]``; for N = 0, a size of -1 would be ambiguous."""
        return value.reshape(self.n, value.shape[1:].numel())

    def index_value(self, node: Node) -> Tensor:
        """An index ``[N, K]`` int64."""
        index = self.node_value(node).to(torch.int64)
        if index.numel() == 1:
            return index.reshape(1, 1).expand(self.n, 1)
        return self._column(index)

    def given_value(self, symbol: Symbol, classes: int) -> Tensor:
        """An operand of the transform or of a moment, ``[V]`` or ``[N, V]``."""
        if isinstance(symbol, RowOperand):
            return self.symbol_value(symbol).expand(self.n, classes)
        value = self.node_value(self.tables.nodes[symbol])
        of_class = isinstance(symbol, ClassOperand)
        value = value.reshape(-1) if of_class else value.reshape(self.n, classes)
        plain = value.is_floating_point() or value.dtype == torch.bool
        return value if plain else value.to(self.dtype)
