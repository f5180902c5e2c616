"""The tables of one reading: the meaning of the symbols of its expressions.

In: nodes, and outputs of a base. Out: their symbols, always the same for the same node or output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.lower.records import (
    Base,
    BaseOutput,
    Chosen,
    LogSoftmax,
    OfBase,
    Operand,
    Picked,
    RowOperand,
    Spread,
    Summed,
)


@dataclass
class Tables:
    """The meaning of symbols.

    Attributes:
        bases: the bases.
        nodes: operands by their symbols.
        chosen: operands' values at picked classes, by their symbols.
        outputs: outputs by their symbols.
        spread: values at the classes of an index, by their symbols.
        sums: the symbols of operands, by the symbols of their sums in each row.
    """

    bases: list[Base] = field(default_factory=list)
    nodes: dict[Symbol, Node] = field(default_factory=dict)
    chosen: dict[Symbol, Chosen] = field(default_factory=dict)
    outputs: dict[Symbol, BaseOutput] = field(default_factory=dict)
    spread: dict[Symbol, Spread] = field(default_factory=dict)
    sums: dict[Symbol, Symbol] = field(default_factory=dict)

    @property
    def cancelling(self) -> dict[Any, Any]:
        """The lse of each base by the symbol of the lse that has to cancel."""
        return {base.cancelling_lse: base.lse for base in self.bases}

    def operand_symbol(self, node: Node, kind: type[Operand]) -> Symbol:
        """The symbol of an operand."""
        symbol = kind(f"{kind.label}_{node.name}", real=True)
        self.nodes[symbol] = node
        return symbol

    def choice_symbol(self, operand: Node, index: Node) -> Symbol:
        """The symbol of an operand's values at picked classes."""
        symbol = RowOperand(f"row_{operand.name}_at_{index.name}", real=True)
        self.chosen[symbol] = Chosen(operand, index)
        return symbol

    def sum_symbol(self, operand: Symbol) -> Symbol:
        """The symbol of the sum of an operand over the classes, or over an index's classes."""
        symbol = RowOperand(f"sum_of_{operand}", real=True)
        self.sums[symbol] = operand
        return symbol

    def base_with(self, transform: Expr, scale: Expr) -> Base:
        """The base of these logits."""
        for base in self.bases:
            if (base.transform, base.scale) == (transform, scale):
                return base
        count = len(self.bases)
        log = LogSoftmax(f"log_{count}", real=True)
        lse = Symbol(f"lse_{count}", real=True)
        base = Base(transform, scale, log, lse, Symbol(f"cancelling_lse_{count}", real=True))
        self.bases.append(base)
        self.outputs[base.lse] = BaseOutput(base, "lse")
        return base

    def output_symbol(self, base: Base, output: OfBase) -> Symbol:
        """The symbol of an output of a base."""
        if output == "lse":
            return base.lse
        name = str(output)
        if isinstance(output, Summed):
            name = f"{output.moment}{output.weight or ''}"
        if isinstance(output, Picked):
            name = f"{'at' if output.logit else 'pick'}_{output.index.name}"
        symbol = Symbol(f"{name}_of_{base.log}", real=True)
        self.outputs[symbol] = BaseOutput(base, output)
        return symbol
