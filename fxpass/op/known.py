"""Values of a function of rows beside its logits: what a formula reads, and what is made of it.

In: the inputs of the function, and the outputs of its formula. Out: the values of nodes, and of
expressions of rows, each computed when it is first asked for.
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
from fxpass.region.run import makes


class KnownValues:
    """The known values of one run.

    Args:
        found: the reading of the function.
        inputs: those of the function, but for the logits.
        n: the rows.
        dtype: in which expressions are computed.
        device: of all tensors.

    Attributes:
        outputs: those of the formula by symbol, ``[N, 1]`` or ``[N, K]``.
    """

    def __init__(
        self,
        found: Reading,
        inputs: Sequence[Tensor],
        n: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.found = found
        self.tables = found.tables
        self.n = n
        self.dtype = dtype
        self.device = device
        self.outputs: dict[Symbol, Tensor] = {}
        first = next(iter(found.classes))
        places = first.graph.find_nodes(op="placeholder")[1:]
        self._nodes: dict[Node, Any] = dict(zip(places, inputs, strict=True))
        self._like = torch.empty(0, dtype=dtype, device=device)

    def node(self, node: Node) -> Any:
        """The value of a node that has no classes."""
        if node in self._nodes:
            return self._nodes[node]
        if node in self.found.rows:
            made = self._of_rows(node)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), self.node)
            more = {"device": self.device} if makes(node.target) else {}
            made = node.target(*args, **kwargs, **more)  # pyright: ignore[reportCallIssue]
        self._nodes[node] = made
        return made

    def _of_rows(self, node: Node) -> Tensor:
        made = self.expr(resolved(self.tables, self.found.rows[node].expr))
        like = node.meta["val"]
        if node in self.found.totals:
            made = made.expand(self.n, made.shape[1]).sum()
            return made.to(like.dtype)
        inner = list(like.shape[1:])
        return made.expand(self.n, made.shape[1]).reshape(self.n, *inner).to(like.dtype)

    def expr(self, expr: Any) -> Tensor:
        """An expression of rows, ``[N, 1]`` or ``[N, K]``; one of numbers has one row."""
        named = {s.name: self.symbol(s) for s in expr.free_symbols}
        return expression.of_rows(expr, self._like, named)

    def symbol(self, symbol: Symbol) -> Tensor:
        """The value of a symbol of rows."""
        tables = self.tables
        if symbol in self.outputs:
            return self.outputs[symbol]
        if symbol in tables.sums:
            operand = tables.sums[symbol]
            if isinstance(operand, SpreadOperand):
                return self.symbol(operand).sum(1, True)
            values = self.node(tables.nodes[operand]).to(self.dtype)
            of_class = isinstance(operand, ClassOperand)
            return (values.reshape(1, -1) if of_class else self._column(values)).sum(1, True)
        if isinstance(symbol, SpreadOperand):
            return self.expr(tables.spread[symbol][1])
        if symbol in tables.chosen:
            chosen = tables.chosen[symbol]
            index = self.index(chosen.index)
            values = self.node(chosen.operand).to(self.dtype)
            if values.dim() == 2 and values.shape[0] == self.n and values.shape[1] > 1:
                return values.gather(1, index)
            return values.reshape(-1)[index]
        value = self.node(tables.nodes[symbol]).to(self.dtype)
        return value.reshape(1, 1) if value.numel() == 1 else self._column(value)

    def _column(self, value: Tensor) -> Tensor:
        """``[N, K]`` of a tensor of rows; without rows, -1 would be any number."""
        return value.reshape(self.n, value.shape[1:].numel())

    def index(self, node: Node) -> Tensor:
        """An index ``[N, K]`` int64."""
        made = self.node(node).to(torch.int64)
        if made.numel() == 1:
            return made.reshape(1, 1).expand(self.n, 1)
        return self._column(made)

    def given(self, symbol: Symbol, classes: int) -> Tensor:
        """An operand of the transform or of a moment, ``[V]`` or ``[N, V]``."""
        value = self.node(self.tables.nodes[symbol])
        if isinstance(symbol, RowOperand):
            made = self.symbol(symbol)
            return made.expand(self.n, classes)
        of_class = isinstance(symbol, ClassOperand)
        value = value.reshape(-1) if of_class else value.reshape(self.n, classes)
        plain = value.is_floating_point() or value.dtype == torch.bool
        return value if plain else value.to(self.dtype)
