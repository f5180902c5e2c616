"""Recipes and the calls that follow them, as a graph like Dynamo's.

In: results of calls. Out: the tensors that these are computed from, and a graph of these tensors,
whose numbers of rows are symbols::

    Drawing([CallResult(logsumexp, 0)]).drawn(varies=True)    %x, %w -> %linear -> %logsumexp

The sizes of operands may vary, and those of hidden states but for the last one; the numbers of
hidden values and classes may not. Equal sizes have one symbol.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    CallResult,
    Numbering,
    Origin,
    PlainOperand,
    calls_of,
    evaluated,
    is_operand,
    with_numbers,
)
from fxpass.deferred.run import Run
from fxpass.graph.names import name_nodes


@dataclass(frozen=True)
class Drawn:
    """A graph, and the example values of its inputs.

    Attributes:
        module: the graph; its nodes have names.
        fakes: fake tensors for its inputs.
        mode: the mode of the fake tensors.
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
    """The computation of results of calls, and the tensors that it reads.

    Args:
        wanted: the results.
        trained: whether they have gradients.
        varying: positions of ``numbers`` that are inputs of the graph.

    Attributes:
        tensors: the inputs of the graph, each once.
        numbers: the numbers among the arguments of calls that may differ from call to call.
        sizes: the sizes of inputs that may vary.
        key: equal for graphs that differ only in ``sizes`` and ``numbers``.

    Raises:
        Stop: an input of a model has lost its autograd history.
        StaleLogitsError: an input was changed.
    """

    def __init__(
        self, wanted: Sequence[CallResult], trained: bool, varying: frozenset[int] = frozenset()
    ) -> None:
        self.wanted = wanted
        self.trained = trained
        self._varying = varying
        numbering = Numbering(calls_of(wanted))
        self.origins = numbering.origins
        self.numbers = tuple(numbering.numbers)
        self.runs = [origin for origin in self.origins if isinstance(origin, Run)]
        self.tensors: list[Tensor] = []
        self.sizes: list[int] = []
        self._layouts: list[_InputLayout] = []
        self._at: dict[int, int] = {}  # positions by the tensor's identity
        self._alive: list[Tensor] = []  # their identities are in use
        self._inputs: dict[Origin, list[Any]] = {}  # positions of tensors; other values as they are
        widths = {run.like.shape[-1] for run in self.runs}
        for run in self.runs:
            given = run.linked(trained)
            rows = run.recipe.rows
            widths |= {given[i].shape[-1] for i in rows}
            self._inputs[run] = [
                self._position(a, range(a.dim() - 1) if i in rows else ())
                if isinstance(a, Tensor)
                else (self._float_position(a) if isinstance(a, float) else a)
                for i, a in enumerate(given)
            ]
        for origin in self.origins:
            if isinstance(origin, PlainOperand):
                value = origin.value(self.runs[0].recipe.source)
                tensor = origin.tensor if trained and origin.tensor.requires_grad else value
                dims = [d for d, size in enumerate(value.shape) if size not in widths]
                self._inputs[origin] = [self._position(tensor, dims)]
        self._given = {i: self._number_position(self.numbers[i]) for i in sorted(varying)}
        recipes = tuple(run.recipe for run in self.runs)
        inputs = tuple(tuple(map(repr, self._inputs[origin])) for origin in self.origins)
        self.key = (numbering.key, recipes, inputs, trained, tuple(self._layouts))

    @property
    def fixed(self) -> tuple[float | None, ...]:
        """The numbers that are constants of the graph; None for its inputs."""
        return tuple(None if i in self._varying else x for i, x in enumerate(self.numbers))

    def _position(self, tensor: Tensor, dims: Sequence[int]) -> _InputAt:
        """The position of a tensor, of which some sizes may vary."""
        if id(tensor) in self._at:
            return _InputAt(self._at[id(tensor)])
        at = self._at[id(tensor)] = len(self.tensors)
        expanded = tensor.numel() > 0 and 0 in tensor.stride()  # a copy would take memory
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
        self._layouts.append(
            _InputLayout(
                dtype=given.dtype,
                device=given.device,
                requires_grad=self.trained and given.requires_grad,
                shape=tuple(shape),
                strides=strides,
            )
        )
        self.tensors.append(given)
        self._alive.append(tensor)
        return _InputAt(at)

    def _number_position(self, number: float) -> _InputAt:
        """The position of a number: a tensor without dimensions, or an int as the size of one."""
        if isinstance(number, float):
            return self._float_position(number)
        return self._position(torch.empty(number, 0, device=self.runs[0].device), (0,))

    def _float_position(self, number: float) -> _InputAt:
        double = any(run.like.dtype == torch.float64 for run in self.runs)
        dtype = torch.float64 if double else torch.get_default_dtype()
        tensor = torch.full((), number, dtype=dtype, device=self.runs[0].device)
        return self._position(tensor, ())

    # ------------------------------------------------------------ the graph

    def drawn(self, varies: bool, line: str) -> Drawn:
        """The graph.

        Args:
            varies: whether sizes are symbols.
            line: the user's line, for the stack traces of nodes.
        """
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        names, sizes = self._symbols(mode.shape_env) if varies else ([], self.sizes)
        fakes = [self._fake(mode, layout, sizes) for layout in self._layouts]
        graph = Graph()
        inputs = [graph.placeholder(f"t{i}") for i in range(len(fakes))]
        for node, fake in zip(inputs, fakes, strict=True):
            node.meta["example_value"] = fake
        values = {origin: self._origin_node(graph, origin, inputs) for origin in self.origins}
        positions = itertools.count()

        def input_or_constant(number: Any) -> Any:
            given = self._given.get(next(positions))
            if given is None:
                return number
            node = inputs[given.at]
            return node if isinstance(number, float) else graph.call_method("size", (node, 0))

        def apply(call: Call, args: Any, kwargs: Any) -> _Items:
            args, kwargs = with_numbers((args, kwargs), input_or_constant, _is_leaf)
            return _Items(graph.call_function(call.function_in_modes(), args, kwargs))

        clone = lambda node: graph.call_function(torch.clone, (node,))  # noqa: E731
        graph.output(tuple(evaluated(self.wanted, values, apply, clone)))
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
    def _fake(mode: FakeTensorMode, layout: _InputLayout, sizes: Sequence[Any]) -> Tensor:
        shape = [sizes[int(s[1:])] if isinstance(s, str) else s for s in layout.shape]
        dtype = layout.dtype
        device = layout.device
        with mode:
            if layout.strides is None:
                fake = torch.empty(shape, dtype=dtype, device=device)
            else:
                fake = torch.empty_strided(shape, layout.strides, dtype=dtype, device=device)
        return fake.requires_grad_(layout.requires_grad)

    def _origin_node(self, graph: Graph, origin: Origin, inputs: Sequence[Node]) -> Any:
        """The node of a plain operand, or of the logits of a run."""
        given = [inputs[a.at] if isinstance(a, _InputAt) else a for a in self._inputs[origin]]
        if isinstance(origin, PlainOperand):
            return given[0]
        copies: dict[Node, Any] = {}
        todo = iter(given)
        for node in origin.recipe.graph.graph.nodes:
            if node.op == "placeholder":
                copies[node] = next(todo)
            elif node.op == "output":
                return map_arg(node.args[0], copies.__getitem__)
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        raise AssertionError("a graph has an output")


def _is_leaf(argument: Any) -> bool:
    return isinstance(argument, Node) or is_operand(argument)


@dataclass(frozen=True)
class _InputAt:
    at: int


class _InputLayout(NamedTuple):
    """The layout of a graph's input."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    shape: tuple[int | str, ...]  # "s0": the first of the sizes that may vary
    strides: tuple[int, ...] | None  # None: contiguous


@dataclass(frozen=True)
class _Items:
    """The results of a call, each a node."""

    node: Node

    def __getitem__(self, at: int) -> Node:
        return self.node.graph.call_function(operator.getitem, (self.node, at))
