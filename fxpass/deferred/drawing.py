"""A graph of recipes and of the calls that follow them, as Dynamo would have drawn it.

In: what calls make of deferred logits. Out: the tensors that it is computed from, and a graph of
them, whose numbers of rows are symbols::

    Drawing([Made(logsumexp, 0)]).drawn(varies=True)    %x, %w -> %linear -> %logsumexp

Sizes of hidden states but for the last one, and of operands, may vary; not the numbers of hidden
values and classes. Sizes that are equal have one symbol.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_arg
from torch.utils._sympy.printers import PythonPrinter

from fxpass.deferred.records import (
    Call,
    Leaf,
    Made,
    Numbering,
    PlainOperand,
    calls_of,
    evaluated,
    is_source,
    with_numbers,
)
from fxpass.deferred.run import Run
from fxpass.graph.names import name_nodes


@dataclass(frozen=True)
class Drawn:
    """A graph, and the example values of its inputs.

    Attributes:
        module: the graph; its nodes have names.
        fakes: its inputs.
        mode: their mode.
        symbols: the names of the sizes that vary.
    """

    module: GraphModule
    fakes: list[Tensor]
    mode: FakeTensorMode
    symbols: list[str]

    def guard(self) -> str:
        """The decisions on sizes, as Python."""
        guards = self.mode.shape_env.guards if self.mode.shape_env else ()
        terms = dict.fromkeys(PythonPrinter().doprint(guard.expr) for guard in guards)
        return " and ".join(f"({term})" for term in terms) or "True"


class Drawing:
    """A computation of deferred logits, and the tensors that it reads.

    Args:
        wanted: what calls make.
        trained: whether it has gradients.
        varying: positions of ``numbers`` that are inputs of the graph.

    Attributes:
        tensors: what it is computed from, each once.
        numbers: those among the arguments of calls that may differ.
        sizes: those that may vary.
        alike: equal for graphs that are equal, but for sizes that vary, and for ``numbers``.

    Raises:
        Stop: autograd does not know an input of a model any more.
        StaleLogitsError: something was changed.
    """

    def __init__(
        self, wanted: Sequence[Made], trained: bool, varying: frozenset[int] = frozenset()
    ) -> None:
        self.wanted = wanted
        self.trained = trained
        self._varying = varying
        numbering = Numbering(calls_of(wanted))
        self.leaves = numbering.leaves
        self.numbers = tuple(numbering.numbers)
        self.runs = [leaf for leaf in self.leaves if isinstance(leaf, Run)]
        self.tensors: list[Tensor] = []
        self.sizes: list[int] = []
        self._layouts: list[Any] = []
        self._at: dict[int, int] = {}
        self._inputs: dict[Leaf, list[Any]] = {}  # positions of tensors, or what is none
        widths = {run.like.shape[-1] for run in self.runs}
        for run in self.runs:
            given = run.linked(trained)
            rows = run.recipe.rows
            widths |= {given[i].shape[-1] for i in rows}
            self._inputs[run] = [
                self._position(a, range(a.dim() - 1) if i in rows else ())
                if isinstance(a, Tensor)
                else self._number(a)
                for i, a in enumerate(given)
            ]
        for leaf in self.leaves:
            if isinstance(leaf, PlainOperand):
                value = leaf.value(self.runs[0].recipe.source)
                known = leaf.tensor if trained and leaf.tensor.requires_grad else value
                dims = [d for d, size in enumerate(value.shape) if size not in widths]
                self._inputs[leaf] = [self._position(known, dims)]
        self._given = {i: self._number(self.numbers[i], True) for i in sorted(varying)}
        recipes = tuple(run.recipe for run in self.runs)
        # a number of a recipe that is no position is in it by its value
        inputs = tuple(tuple(map(repr, self._inputs[leaf])) for leaf in self.leaves)
        self.alike = (numbering.key, recipes, inputs, trained, tuple(self._layouts))

    @property
    def fixed(self) -> tuple[float | None, ...]:
        """The numbers that are written in the graph."""
        return tuple(None if i in self._varying else x for i, x in enumerate(self.numbers))

    def _position(self, tensor: Tensor, dims: Sequence[int]) -> _InputAt:
        """The position of a tensor, of which some sizes may vary."""
        if id(tensor) in self._at:
            return _InputAt(self._at[id(tensor)])
        at = self._at[id(tensor)] = len(self.tensors)
        expanded = tensor.numel() > 0 and 0 in tensor.stride()  # stays as it is
        dims = () if expanded else [d for d in dims if tensor.shape[d] > 1]
        given = tensor.contiguous() if dims else tensor
        if self.trained and given.is_inference():
            given = given.clone()  # autograd saves no such tensor
        shape: list[Any] = list(given.shape)
        for d in dims:
            if shape[d] not in self.sizes:
                self.sizes.append(shape[d])
            shape[d] = f"s{self.sizes.index(shape[d])}"
        strides = None if dims else given.stride()
        needs = self.trained and given.requires_grad
        self._layouts.append((given.dtype, given.device, needs, tuple(shape), strides))
        self.tensors.append(given)
        self._keep = [*getattr(self, "_keep", ()), tensor]  # its identity
        return _InputAt(at)

    def _number(self, number: Any, is_size: bool = False) -> Any:
        """A float, or a size, is a tensor of the graph."""
        device = self.runs[0].device
        if isinstance(number, int):
            size = torch.empty(number if is_size else 0, 0, device=device)
            return self._position(size, (0,)) if is_size else number
        double = any(run.like.dtype == torch.float64 for run in self.runs)
        dtype = torch.float64 if double else torch.get_default_dtype()
        return self._position(torch.full((), number, dtype=dtype, device=device), ())

    # ------------------------------------------------------------ the graph

    def drawn(self, varies: bool, line: str) -> Drawn:
        """The graph.

        Args:
            varies: whether sizes are symbols.
            line: the user's, for what is said of its nodes.
        """
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        names, sizes = self._symbols(mode.shape_env) if varies else ([], self.sizes)
        fakes = [self._fake(mode, layout, sizes) for layout in self._layouts]
        graph = Graph()
        inputs = [graph.placeholder(f"t{i}") for i in range(len(fakes))]
        for node, fake in zip(inputs, fakes, strict=True):
            node.meta["example_value"] = fake
        known = {leaf: self._leaf(graph, leaf, inputs) for leaf in self.leaves}
        positions = itertools.count()

        def number(known: Any) -> Any:
            at = self._given.get(next(positions))
            if at is None:
                return known
            node = inputs[at.at]
            return node if isinstance(known, float) else graph.call_method("size", (node, 0))

        def call(of: Call, args: Any, kwargs: Any) -> _Items:
            is_leaf = lambda x: isinstance(x, Node) or is_source(x)  # noqa: E731
            given = with_numbers((args, kwargs), number, is_leaf)
            return _Items(graph.call_function(of.applied(), *given))

        clone = lambda node: graph.call_function(torch.clone, (node,))  # noqa: E731
        graph.output(tuple(evaluated(self.wanted, known, call, clone)))
        file, _, code = line.partition(" ")
        name, _, number_of = file.rpartition(":")
        for node in graph.nodes:
            node.meta["stack_trace"] = f'File "{name}", line {number_of or 0}, in f\n    {code}'
        module = GraphModule({}, graph)
        name_nodes(module)
        return Drawn(module, fakes, mode, names)

    def _symbols(self, env: Any) -> tuple[list[str], list[Any]]:
        names = []
        sizes = []
        for i, size in enumerate(self.sizes):
            source = ConstantSource(f"size{i}")
            symbol = env.create_symbol(size, source, DimDynamic.DYNAMIC, None)
            names.append(str(symbol))
            sizes.append(env.create_symintnode(symbol, hint=size, source=source))
        return names, sizes

    @staticmethod
    def _fake(mode: FakeTensorMode, layout: Any, sizes: Sequence[Any]) -> Tensor:
        dtype, device, needs, shape, strides = layout
        shape = [sizes[int(s[1:])] if isinstance(s, str) else s for s in shape]
        with mode:
            if strides is None:
                fake = torch.empty(shape, dtype=dtype, device=device)
            else:
                fake = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return fake.requires_grad_(needs)

    def _leaf(self, graph: Graph, leaf: Leaf, inputs: Sequence[Node]) -> Any:
        """The node of an operand, or of logits."""
        given = [inputs[a.at] if isinstance(a, _InputAt) else a for a in self._inputs[leaf]]
        if isinstance(leaf, PlainOperand):
            return given[0]
        copies: dict[Node, Any] = {}
        todo = iter(given)
        for node in leaf.recipe.graph.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(todo)
            elif node.op == "output":
                return map_arg(node.args[0], copies.__getitem__)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        raise AssertionError("a graph has an output")


@dataclass(frozen=True)
class _InputAt:
    at: int


@dataclass(frozen=True)
class _Items:
    """The results of a call."""

    node: Node

    def __getitem__(self, at: int) -> Node:
        return self.node.graph.call_function(operator.getitem, (self.node, at))
