"""The tables of one reading: what the symbols of its expressions stand for.

In: nodes, and outputs of a base. Out: the symbol of each, always the same one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.lower.records import (
    Base,
    Chosen,
    LogSoftmax,
    OfBase,
    Operand,
    Picked,
    RowOperand,
    Summed,
)


@dataclass
class Tables:
    """The meaning of symbols.

    Attributes:
        bases: the bases.
        nodes: symbols of operands.
        chosen: symbols of what operands have at picked classes.
        outputs: symbols of outputs.
        spread: symbols of what stands at the classes of an index: the index, and the rows.
        sums: symbols of sums of operands, by row.
    """

    bases: list[Base] = field(default_factory=list)
    nodes: dict[Symbol, Node] = field(default_factory=dict)
    chosen: dict[Symbol, Chosen] = field(default_factory=dict)
    outputs: dict[Symbol, tuple[Base, OfBase]] = field(default_factory=dict)
    spread: dict[Symbol, tuple[Node, Expr]] = field(default_factory=dict)
    sums: dict[Symbol, Symbol] = field(default_factory=dict)

    def node(self, node: Node, kind: type[Operand]) -> Symbol:
        """The symbol of an operand."""
        symbol = kind(f"{kind.label}_{node.name}", real=True)
        self.nodes[symbol] = node
        return symbol

    def choice(self, operand: Node, index: Node) -> Symbol:
        """The symbol of what an operand has at picked classes."""
        symbol = RowOperand(f"row_{operand.name}_at_{index.name}", real=True)
        self.chosen[symbol] = Chosen(operand, index)
        return symbol

    def sum_of(self, operand: Symbol) -> Symbol:
        """The symbol of the sum of an operand over the classes, or over those of an index."""
        symbol = RowOperand(f"sum_of_{operand}", real=True)
        self.sums[symbol] = operand
        return symbol

    def base(self, transform: Expr, scale: Expr) -> Base:
        """The base of these logits."""
        for base in self.bases:
            if (base.transform, base.scale) == (transform, scale):
                return base
        count = len(self.bases)
        log = LogSoftmax(f"log_{count}", real=True)
        lse, loose = (Symbol(f"{name}_{count}", real=True) for name in ("lse", "loose"))
        base = Base(transform, scale, log, lse, loose)
        self.bases.append(base)
        self.outputs[base.lse] = base, "lse"
        return base

    def output(self, base: Base, output: OfBase) -> Symbol:
        """The symbol of an output of a base."""
        if output == "lse":
            return base.lse
        name = str(output)
        if isinstance(output, Summed):
            name = f"{output.moment}{output.weight or ''}"
        if isinstance(output, Picked):
            name = f"{'at' if output.logit else 'pick'}_{output.index.name}"
        symbol = Symbol(f"{name}_of_{base.log}", real=True)
        self.outputs[symbol] = base, output
        return symbol
