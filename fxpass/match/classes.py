"""What is known of the nodes behind a head: tensors with classes, their bases, and reductions.

In: a head. Out: a :class:`Flow`, which :mod:`fxpass.match.flow` fills; see there.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.calls import others_of, storage
from fxpass.graph.functions import reads_values
from fxpass.graph.hazards import Writers
from fxpass.graph.nodes import NoMatch, is_tensor, value
from fxpass.graph.region import Region
from fxpass.match.edits import (
    Edit,
    Step,
    is_one_number,
    keeps_rows,
    symbols_of,
    trimmed,
)
from fxpass.match.linears import Linear
from fxpass.match.losses import Loss
from fxpass.match.outputs import Base, OfBase, Picked, Summed, given_of
from fxpass.spec.expression import Z


@dataclass(frozen=True)
class Classes:
    """A tensor with a class dimension.

    Attributes:
        steps: the views from the linear's output to it.
        dim: position of the class dimension.
        expr: one element; ``z`` is the linear's output after the edits.
        detached: whether no gradient flows through it.
        edits: changes of the linear's operands.
    """

    steps: tuple[Step, ...]
    dim: int
    expr: Expr
    detached: bool = False
    edits: tuple[Edit, ...] = ()

    @property
    def place(self) -> tuple[Any, ...]:
        """Equal for tensors whose elements are of the same rows and classes."""
        return self.steps, self.dim, self.edits


@dataclass(frozen=True)
class Reduced:
    """A node that reduces the logits to rows.

    Attributes:
        node: the node.
        like: the tensor with classes that it reduces.
        value: the rows, as an expression of outputs and row symbols.
        keepdim: whether the class dimension stays, with one element (or K picks).
        then: ``sum`` or ``mean`` if the rows are reduced too; ``index`` for class indices.
        loss: for a cross-entropy, its arguments. Its rows are log-probabilities, picked or weighted
            with the target's probabilities.
        mean_log: for a cross-entropy with label smoothing, the sum of the log-probabilities.
    """

    node: Node
    like: Classes
    value: Expr
    keepdim: bool = False
    then: str = ""
    loss: Loss | None = None
    mean_log: Expr | None = None

    @property
    def is_scalar(self) -> bool:
        """Whether the rows are reduced too."""
        reduction = self.then if self.loss is None else self.loss.reduction
        return reduction in ("sum", "mean")

    @property
    def values(self) -> tuple[Expr, ...]:
        """Its rows: with label smoothing, those of the mean too."""
        return (self.value,) if self.mean_log is None else (self.value, self.mean_log)

    @property
    def symbols(self) -> set[Any]:
        """The symbols of its values."""
        return set().union(*(rows.free_symbols for rows in self.values))


@dataclass
class Flow:
    """What was read of one head.

    Attributes:
        linear: the head's linear.
        region: the region of the graph.
        writers: its nodes that write.
        trained: its nodes that gradients may reach.
        classes: nodes with classes.
        rows: nodes of rows whose value is known.
        cut: such nodes through which the value's gradient does not flow.
        bases: the bases.
        outputs: symbol → the base and the output that it stands for.
        tensors: symbol → the tensor of the graph that it stands for.
        repeated_rows: symbol of a tensor that is broadcast to the rows → a tensor with these rows.
        dims: symbol of given values → the position of their class dimension.
        reductions: the nodes that reduce the logits, in the graph's order.
        unread: reductions, and their views, that only tensors with classes read, which are not
            computed any more.
        pairs: nodes whose value is a tuple of tensors.
        sharding: how its classes and rows are distributed over ranks; None on one rank.
        stops: why readers of the logits are not understood.
        left: tensors with classes among the outputs of the graph.
    """

    linear: Linear
    region: Region
    writers: Writers
    trained: Collection[Node]
    classes: dict[Node, Classes] = field(default_factory=dict)
    rows: dict[Node, Expr] = field(default_factory=dict)
    cut: dict[Node, Expr] = field(default_factory=dict)
    bases: list[Base] = field(default_factory=list)
    outputs: dict[Symbol, tuple[Base, OfBase]] = field(default_factory=dict)
    tensors: dict[Symbol, Node] = field(default_factory=dict)
    repeated_rows: dict[Symbol, Classes] = field(default_factory=dict)
    dims: dict[Symbol, int] = field(default_factory=dict)
    reductions: list[Reduced] = field(default_factory=list)
    unread: set[Node] = field(default_factory=set)
    pairs: dict[Node, Classes] = field(default_factory=dict)
    sharding: Any = None
    stops: list[NoMatch] = field(default_factory=list)
    left: tuple[Node, ...] = ()

    @property
    def inside(self) -> set[Node]:
        """The linear and all nodes with values of logits."""
        return set().union(self.classes, self.pairs, self.unread)

    @property
    def replaced(self) -> set[Node]:
        """The nodes that reduce the logits."""
        return {reduced.node for reduced in self.reductions}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return value(self.linear.node).dtype

    def writes(
        self, nodes: Iterable[Node], after: Node | None = None, before: Node | None = None
    ) -> list[Node]:
        """The nodes, between two others, that may write to the memory of one of ``nodes``."""
        memory = {storage(n) for n in nodes if is_tensor(n)}
        some = self.writers if None in memory else {None, *memory}
        found = {writer for one in some for writer in self.writers.get(one, ())}
        late = (w for w in found if after is None or after < w)
        return [w for w in late if before is None or w < before]

    # ------------------------------------------------------------ symbols

    def tensor(self, node: Node, kind: str) -> Symbol:
        """The symbol of a ``row``, ``class`` or ``given`` tensor."""
        symbol = Symbol(f"{kind}_{node.name}", real=True)
        self.tensors[symbol] = node
        return symbol

    def varies(self, symbol: Symbol) -> bool:
        """Whether the tensor of a symbol differs from row to row."""
        tensor = self.tensors.get(symbol)
        alike = tensor is None or symbol.name.startswith("class_") or is_one_number(tensor)
        return not alike or symbol in self.outputs

    def is_computed_from_logits(self, node: Node) -> bool:
        """Whether the values of a node depend on those of the linear."""
        todo, found = [node], set[Node]()
        while todo:
            one = todo.pop()
            if one is self.linear.node:
                return True
            if one not in found and one > self.linear.node:
                found.add(one)
                todo += [n for n in one.all_input_nodes if reads_values(one, n)]
                todo += self.writes([one])
        return False

    def given(self, node: Node, dim: int) -> Symbol:
        """The symbol of given values."""
        symbol = self.tensor(node, "given")
        if self.dims.get(symbol, dim) != dim:  # beside other logits its classes are elsewhere
            symbol = self.tensor(node, f"given_{dim}:")
        self.dims[symbol] = dim
        return symbol

    def repeated_row(self, node: Node, like: Classes) -> Symbol:
        """The symbol of a tensor that is broadcast to the rows of ``like``."""
        symbols = (self.tensor(node, f"row_{i}:") for i in itertools.count())
        known = self.repeated_rows
        return next(s for s in symbols if known.setdefault(s, like).place == like.place)

    def output(self, base: Base, output: OfBase) -> Symbol:
        """The symbol of a reduction of a base."""
        if output == "lse":
            self.outputs[base.lse] = base, output
            return base.lse
        known = [s for s, of in self.outputs.items() if of == (base, output)]
        if known:
            return known[0]
        name = str(output)
        if isinstance(output, Summed):
            name = f"sum({output.function})"
        if isinstance(output, Picked):
            name = f"{'at' if output.logit else 'pick'}_{output.index.name}{output.wraps}"
        name = f"{name}_of_{base.log}"
        while (symbol := Symbol(name, real=True)) in self.outputs:
            name += "'"  # the same index, of which other rows are ignored
        self.outputs[symbol] = base, output
        return symbol

    def base(self, like: Classes, transform: Expr, scale: Expr) -> Base:
        """The base of these logits."""
        steps = trimmed(like.steps)
        for base in self.bases:
            known = base.steps, base.edits, base.transform, base.scale
            if known == (steps, like.edits, transform, scale):
                return base
        k = len(self.bases)
        log, lse = Symbol(f"log_{k}", real=True), Symbol(f"lse_{k}", real=True)
        self.bases.append(Base(steps, like.edits, transform, scale, log, lse))
        self.outputs[lse] = self.bases[-1], "lse"
        return self.bases[-1]

    def reduce(self, node: Node, like: Classes, rows: Expr, keepdim: bool, then: str = "") -> None:
        """Notes that a node reduces a tensor with classes to these rows."""
        self.reductions.append(Reduced(node, like, rows, keepdim, then))
        trained = value(node).requires_grad
        same = not like.detached if trained else not value(self.linear.node).requires_grad
        if not then:
            (self.rows if same else self.cut)[node] = rows

    def row(self, node: Node, reader: Node) -> Expr | None:
        """The value of a node of rows as ``reader`` may use it; None for another node, and for one
        that is written to, or whose operands are: ``reader`` would read them again."""
        cut = None if value(reader).requires_grad else self.cut.get(node)
        rows = self.rows.get(node, cut)
        if rows is None:
            return None
        read = [node, *(n for symbol in symbols_of(rows) for n in self._read_by(symbol))]
        return None if self.writes(read, node, reader) else rows

    def _read_by(self, symbol: Symbol) -> list[Node]:
        """The tensors that the value of a symbol is computed from."""
        if symbol in self.outputs:
            return self.operands(self.outputs[symbol][0], [symbol])
        return [self.tensors[symbol]]

    def operands(self, base: Base, symbols: Iterable[Symbol]) -> list[Node]:
        """The tensors that a call reads for these outputs of a base."""
        linear = self.linear
        nodes = [n for n in (linear.x, linear.weight, linear.bias) if n is not None]
        nodes += [n for step in base.steps for n in others_of(step.node)]
        nodes += [self.tensors[s] for s in symbols_of(base.scale)]
        nodes += [self.tensors[s] for s in (*base.biases, *base.given)]
        nodes += base.indices
        for symbol in symbols:
            output = self.outputs[symbol][1]
            if isinstance(output, Picked):
                nodes.append(output.index)
            nodes += [self.tensors[s] for s in given_of(output)]
        return nodes


# The names of symbols of what is given at a class.
OF_CLASS = ("class_", "given_")


def has_classes(expr: Expr) -> bool:
    return any(s == Z or s.name.startswith(("log_", *OF_CLASS)) for s in symbols_of(expr))


def of_classes_alone(expr: Any, *, rows: bool = False) -> bool:
    """Whether an expression is one of a logit and of what is given at its class, without a softmax;
    ``rows``: or of what is given for its row."""
    names = (*OF_CLASS, "row_") if rows else OF_CLASS
    return all(s == Z or s.name.startswith(names) for s in expr.free_symbols)


def rest_of(base: Base, like: Classes) -> tuple[Step, ...] | None:
    """The views from a tensor with classes to the logits of a base; None if there are none."""
    common = min(len(base.steps), len(like.steps))
    same = base.steps[:common] == like.steps[:common]
    return base.steps[common:] if same and all(map(keeps_rows, like.steps[common:])) else None
