"""What is known of the nodes behind a head: tensors with classes, their bases, and reductions.

In: a head. Out: a :class:`Flow`, which :mod:`fxpass.match.flow` fills; see there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sympy import Expr, Symbol
from torch.fx import Node

from fxpass.graph.calls import first_operand
from fxpass.graph.functions import function_of, reads_values
from fxpass.graph.nodes import NoMatch, is_tensor, value
from fxpass.graph.region import Region
from fxpass.graph.source import call_name
from fxpass.match.linears import Linear
from fxpass.match.losses import Loss
from fxpass.match.views import View
from fxpass.spec.expression import Z
from fxpass.spec.reductions import LogitSum, Moment, Output

# Views that keep the order of the rows, so that they do not matter to flat rows.
_SAME_ROWS = ("", "reshape", "reshape_rows", "flatten", "unflatten", "unsqueeze", "squeeze")


@dataclass(frozen=True)
class Step:
    """One view of the logits: the node, how it rearranges rows, and the position of the class
    dimension in its output."""

    node: Node
    view: View
    dim: int


@dataclass(frozen=True)
class Classes:
    """A tensor with a class dimension.

    Attributes:
        steps: the views from the linear's output to it.
        dim: position of the class dimension.
        expr: one element.
        detached: whether no gradient flows through it.
    """

    steps: tuple[Step, ...]
    dim: int
    expr: Expr
    detached: bool = False


@dataclass(frozen=True)
class Base:
    """Logits of which a softmax, or another reduction, is taken.

    Attributes:
        steps: the views from the linear's output to them, but for those that keep the rows' order.
        transform: one logit, as an expression of ``z``.
        scale: a factor of each row, as an expression of row symbols.
        log, lse: the symbols of the log-softmax and of the log-sum-exp.
    """

    steps: tuple[Step, ...]
    transform: Expr
    scale: Expr
    log: Symbol
    lse: Symbol

    @property
    def logit(self) -> Expr:
        """The logit as an expression of ``z`` and row symbols."""
        return self.transform * self.scale


@dataclass(frozen=True)
class Picked:
    """The outputs ``pick`` or ``at``, at the classes of an index tensor.

    Attributes:
        index: class indices: one or K for each row.
        dim: position of the dimension of K in ``index``; None if it has none.
        wraps: ``all``, ``negative`` or empty: which indices outside the classes are counted from
            the end.
        ignored: an index whose rows take class 0; None if there is none.
        logit: whether the logit is picked, and not the log-softmax.
        pieces: of pieces of the rows that are joined, the picks of each, in order; ``index`` is the
            first one's.
    """

    index: Node
    dim: int | None
    wraps: str = ""
    ignored: int | None = None
    logit: bool = False
    pieces: tuple[Picked, ...] = ()

    @property
    def count(self) -> int | torch.SymInt:
        """K."""
        return 1 if self.dim is None else value(self.index).shape[self.dim]

    @property
    def indices(self) -> tuple[Node, ...]:
        """The tensors that it is made of."""
        return tuple(pick.index for pick in self.pieces or (self,))


@dataclass(frozen=True)
class Part:
    """A range of the rows, along their first dimension.

    Attributes:
        step: the view that takes it.
        start, stop: the range; None for all that follow.
    """

    step: Step
    start: int
    stop: int | None


@dataclass(frozen=True)
class Weighted:
    """A sum whose weights are the tensor of a symbol."""

    moment: Moment | LogitSum
    weight: Symbol


@dataclass(frozen=True)
class Reduced:
    """A node that reduces the logits to rows.

    Attributes:
        node: the node.
        like: the tensor with classes that it reduces.
        value: the rows, as an expression of outputs and row symbols.
        keepdim: whether the class dimension stays, with one element (or K picks).
        then: ``sum`` or ``mean`` if the rows are reduced too; ``index`` for class indices.
        loss: for a cross-entropy, whose rows are picked log-probabilities: its arguments.
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
        classes: nodes with classes.
        rows: nodes of rows whose value is known.
        cut: such nodes through which the value's gradient does not flow.
        bases: the bases.
        outputs: symbol → the base and the output that it stands for.
        tensors: symbol → the tensor of the graph that it stands for.
        dims: symbol of given values → the position of their class dimension.
        exponentials: symbols of given values that are the exponential of their tensor.
        sums: symbol → an expression of given values alone, of which it is the sum over the classes.
        reductions: the nodes that reduce the logits, in the graph's order.
        unread: such nodes that only tensors with classes read, which are not computed any more.
        pairs: nodes whose value is a tuple of tensors.
        repeated: nodes that are broadcast to the logits' shape → the tensor that is.
        same: nodes that equal another tensor, which is cut to its size after that.
        parts: symbol of an output of some rows → the symbol of this output of all rows, and which
            rows of it.
    """

    linear: Linear
    region: Region
    classes: dict[Node, Classes] = field(default_factory=dict)
    rows: dict[Node, Expr] = field(default_factory=dict)
    cut: dict[Node, Expr] = field(default_factory=dict)
    bases: list[Base] = field(default_factory=list)
    outputs: dict[Symbol, tuple[Base, Output | Picked | Weighted]] = field(default_factory=dict)
    tensors: dict[Symbol, Node] = field(default_factory=dict)
    dims: dict[Symbol, int] = field(default_factory=dict)
    exponentials: set[Symbol] = field(default_factory=set)
    sums: dict[Symbol, Expr] = field(default_factory=dict)
    reductions: list[Reduced] = field(default_factory=list)
    unread: set[Node] = field(default_factory=set)
    pairs: dict[Node, Classes] = field(default_factory=dict)
    repeated: dict[Node, Node] = field(default_factory=dict)
    same: dict[Node, Node] = field(default_factory=dict)
    parts: dict[Symbol, tuple[Symbol, Part]] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the logits."""
        return value(self.linear.node).dtype

    # ------------------------------------------------------------ symbols

    def tensor(self, node: Node, kind: str) -> Symbol:
        """The symbol of a ``row``, ``class`` or ``given`` tensor, or of the one-hot tensor of class
        indices (``hot``)."""
        symbol = Symbol(f"{kind}_{node.name}", real=True)
        self.tensors[symbol] = node
        return symbol

    def exponential(self, node: Node, given: Symbol) -> Symbol:
        """The symbol of the exponential of given values."""
        symbol = Symbol(f"given_exp({node.name})", real=True)
        self.tensors[symbol] = node
        self.dims[symbol] = self.dims[given]
        self.exponentials.add(symbol)
        return symbol

    def sum_of_given(self, expr: Expr) -> Symbol:
        """The symbol of a sum over the classes of an expression of given values."""
        symbol = Symbol(f"sum_{expr}", real=True)
        self.sums[symbol] = expr
        return symbol

    def output(self, base: Base, output: Output | Picked | Weighted) -> Symbol:
        """The symbol of a reduction of a base."""
        if output == "lse":
            self.outputs[base.lse] = base, output
            return base.lse
        name = str(output)
        if isinstance(output, Weighted):
            name = f"{output.moment}_{output.weight.name}"
        if isinstance(output, Picked):
            name = f"{'at' if output.logit else 'pick'}_{output.index.name}"
        symbol = Symbol(f"{name}_of_{base.log}", real=True)
        self.outputs[symbol] = base, output
        return symbol

    def base(self, like: Classes, transform: Expr, scale: Expr) -> Base:
        """The base of these logits."""
        steps = like.steps
        while steps and keeps_rows(steps[-1]):
            steps = steps[:-1]
        for base in self.bases:
            if (base.steps, base.transform, base.scale) == (steps, transform, scale):
                return base
        k = len(self.bases)
        log, lse = Symbol(f"log_{k}", real=True), Symbol(f"lse_{k}", real=True)
        self.bases.append(Base(steps, transform, scale, log, lse))
        self.outputs[lse] = self.bases[-1], "lse"
        return self.bases[-1]

    @property
    def computed(self) -> list[Any]:
        """The outputs that the reductions read."""
        read = {s for reduced in self.reductions for s in reduced.symbols if s in self.outputs}
        found = [self.outputs[symbol][1] for symbol in read]
        return [o.moment if isinstance(o, Weighted) else o for o in found]

    def reduce(self, node: Node, like: Classes, rows: Expr, keepdim: bool, then: str = "") -> None:
        """Notes that a node reduces a tensor with classes to these rows."""
        self.reductions.append(Reduced(node, like, rows, keepdim, then))
        trained = value(node).requires_grad
        same = not like.detached if trained else not value(self.linear.node).requires_grad
        if not then:
            (self.rows if same else self.cut)[node] = rows

    def row(self, node: Node, reader: Node) -> Expr | None:
        """The value of a node of rows as ``reader`` may use it; None for another node."""
        cut = None if value(reader).requires_grad else self.cut.get(node)
        return self.rows.get(node, cut)


def keeps_rows(step: Step) -> bool:
    """Whether flat rows are the same before and after a view. The class dimension is the last one,
    before it and after it."""
    before, after = value(operand_of_step(step)), value(step.node)
    last = step.view.dim == before.dim() - 1 and step.dim == after.dim() - 1
    return last and step.view.function in _SAME_ROWS


def operand_of_step(step: Step) -> Node:
    """The tensor of which a view is taken; a part's is that of the tuple."""
    first = step.node.args[0] if step.node.args else None
    found = isinstance(first, Node) and not is_tensor(first)
    return first_operand(first if found else step.node)  # type: ignore[arg-type]


def viewed(flow: Flow, like: Classes, step: Step) -> Classes:
    """A view of a tensor with classes. The log-softmax of other rows is one of another base.

    Raises:
        NoMatch: it rearranges rows whose values depend on tensors or reductions of these rows.
    """
    found = replace(like, steps=(*like.steps, step), dim=step.dim)
    if keeps_rows(step):
        return found
    logs = {base.log: base for base in flow.bases if like.expr.has(base.log)}
    read = symbols_of(like.expr).union(*(symbols_of(base.scale) for base in logs.values()))
    for symbol in read:
        tensor = flow.tensors.get(symbol)
        alike = tensor is None or symbol.name.startswith("class_") or value(tensor).numel() == 1
        if not alike or symbol in flow.outputs:
            node = step.node
            raise NoMatch(node, f"%{node.name} ({call_name(node)}) rearranges `{like.expr}`")
    others: Any = {
        log: flow.base(found, base.transform, base.scale).log for log, base in logs.items()
    }
    return replace(found, expr=like.expr.xreplace(others))


def symbols_of(expr: Any) -> set[Symbol]:
    """The symbols of an expression."""
    return expr.free_symbols


def has_classes(expr: Expr) -> bool:
    names = ("log_", "class_", "given_", "hot_")
    return any(s == Z or s.name.startswith(names) for s in symbols_of(expr))


# ---------------------------------------------------------------- arguments


def operand_of(flow: Flow, node: Node) -> Classes:
    operand = first_operand(node)
    if operand not in flow.classes:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) reads logits in another place")
    others = [n for n in node.all_input_nodes if n is not operand and n in flow.classes]
    if any(reads_values(node, n) for n in others):
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) reads logits in two places")
    return flow.classes[operand]


def check_dim(node: Node, like: Classes, dim: Any) -> None:
    if isinstance(dim, tuple | list) and len(dim) == 1:
        (dim,) = dim
    rank = len(value(first_operand(node)).shape)
    if not isinstance(dim, int) or dim % rank != like.dim:
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) is not over the classes alone")


def check_dtype(node: Node, given: dict[str, Any]) -> None:
    if (given.get("dtype") == torch.float64) != (
        value(first_operand(node)).dtype == torch.float64 and given.get("dtype") is not None
    ):
        raise NoMatch(node, f"%{node.name} ({call_name(node)}) casts to float64")


def picks_rows_and_classes(node: Node) -> bool:
    index = node.args[1] if len(node.args) == 2 else None
    return (
        isinstance(index, tuple)
        and len(index) == 2
        and all(map(is_tensor, index))
        and function_of(index[0]) == "arange"  # type: ignore[arg-type]
    )
