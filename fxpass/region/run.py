"""Runs the graph of a region, an operation at a time, on real or fake tensors.

In: a graph and its inputs. Out: its results. A value is freed after its last reader::

    >>> lines = ["%0 = input float32[n, 3]", "%1 = aten.amax.default(%0, [1])", "return %1"]
    >>> interpreter = Interpreter(graph_of(lines), torch.device("cpu"))
    >>> interpreter([torch.tensor([[1.0, 3.0, 2.0]], device="cpu")])
    [tensor([3.])]
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import map_arg

from fxpass.region.text import Input, graph_of, results_of

__all__ = ["Fakes", "Interpreter", "graph_of", "in_own_thread", "values_of"]

_ROWS = 256  # of the fake values
T = TypeVar("T")


class Interpreter:
    """Runs a graph, whose new tensors are on ``device``."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.graph = graph
        self.device = device
        self.given = [node for node in graph.nodes if node.op == "placeholder"]
        read: set[Node] = set(results_of(graph))
        self.steps: list[tuple[Node, dict[str, Any], list[Node]]] = []
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function":
                last = [n for n in node.all_input_nodes if n not in read]
                last += [node] * (node not in read)  # an unread value
                options = {"device": device} if is_factory(node.target) else {}
                self.steps.append((node, options, last))
            read.update(node.all_input_nodes)
        self.steps.reverse()

    def __call__(self, tensors: list[Any]) -> list[Any]:
        """The graph's results. The list of inputs is emptied: they are freed as values are."""
        values = dict(zip(self.given, tensors, strict=True))
        tensors.clear()
        for node, options, last in self.steps:
            values[node] = self.step(node, values, options)
            for dead in last:
                values.pop(dead, None)
        return [values[node] for node in results_of(self.graph)]

    def step(self, node: Node, values: dict[Node, Any], options: dict[str, Any]) -> Any:
        """The value of a node."""
        target: Any = node.target
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        return target(*args, **(kwargs | options))


def is_factory(target: Any) -> bool:
    """Tells if an operation makes a tensor from numbers, on a device that is an argument."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    kinds = {a.name: str(a.type) for a in target._schema.arguments}
    return "device" in kinds and not any("Tensor" in kind for kind in kinds.values())


class Fakes:
    """Fake ``tensors`` for the inputs of a region, in a ``mode`` and a shape environment ``env`` of
    their own; their ``sizes``, by name, are symbols."""

    def __init__(
        self, inputs: Sequence[Input], hints: Mapping[str, int], device: torch.device
    ) -> None:
        self.env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.device = device
        self.sizes: dict[str, Any] = {}
        names = dict.fromkeys(s for i in inputs for s in i.shape if isinstance(s, str))
        for name in names:
            source = ConstantSource(name)
            symbol = self.env.create_symbol(hints[name], source, DimDynamic.DYNAMIC, None)
            size = self.env.create_symintnode(symbol, hint=hints[name], source=source)
            self.sizes[name] = size
        self.symbols = {size.node.expr: name for name, size in self.sizes.items()}
        self.hints = {size.node.expr: hints[name] for name, size in self.sizes.items()}
        self.tensors = [self.tensor(i) for i in inputs]

    def tensor(self, given: Input) -> torch.Tensor:
        with self.mode:
            shape = given.actual_shape(self.sizes)
            return torch.empty(shape, dtype=given.dtype, device=self.device)

    def at_hints(self, size: Any) -> int:
        return int(size.node.expr.subs(self.hints))

    def described(self, tensor: torch.Tensor) -> Input:
        """Dtype and shape of a tensor, with the names of the sizes.

        Raises:
            ValueError: a size that is neither a number nor one of the symbols, such as 2 * n.
        """
        shape = []
        for size in tensor.shape:
            name = size if isinstance(size, int) else self.symbols.get(size.node.expr)
            if name is None:
                raise ValueError(f"a result has the size {size}")
            shape.append(name)
        return Input(tensor.dtype, tuple(shape))

    def check(self, probes: Sequence[int] = (2, 3, 64, 1_000_003)) -> None:
        """Raises ValueError if the operations that were run fit some numbers of rows only."""
        for expr in self.symbols:
            if expr in self.env.replacements:
                name = self.symbols[expr]
                value = self.env.replacements[expr]
                raise ValueError(f"the size {name} can be {value} only")
        for guard in self.env.guards:
            for number in probes if "n" in self.sizes else ():
                at = self.hints | {self.sizes["n"].node.expr: number}
                if guard.expr.subs(at) == False:  # noqa: E712
                    raise ValueError(f"not for {number} rows: {guard.expr}")


class _Recorder(Interpreter):
    """Records every value."""

    results: dict[Node, Any]

    def step(self, node: Node, values: dict[Node, Any], options: dict[str, Any]) -> Any:
        self.results[node] = super().step(node, values, options)
        return self.results[node]


class GraphValues:
    """Shapes and dtypes of the values of a graph: ``tensors`` are fake, ``rows`` are the nodes of
    those that are [n, ...]."""

    def __init__(self, graph: Graph) -> None:
        inputs = [n.meta["input"] for n in graph.find_nodes(op="placeholder")]
        names = {s for i in inputs for s in i.shape if isinstance(s, str)}
        hints = {name: 2**15 + k for k, name in enumerate(sorted(names))} | {"n": _ROWS}
        device = torch.device("cpu")
        self.graph = graph
        self.fakes = Fakes(inputs, hints, device)
        recorder = _Recorder(graph, device)
        self.results = dict(zip(recorder.given, self.fakes.tensors, strict=True))
        recorder.results = self.results
        with self.fakes.mode, enable_python_dispatcher():  # composites in C++ fix sizes
            recorder(list(self.fakes.tensors))
        self.tensors = {n: v for n, v in self.results.items() if isinstance(v, torch.Tensor)}
        self.rows = {
            n for n, v in self.tensors.items() if v.shape and self.name_of_size(v.shape[0]) == "n"
        }

    def name_of_size(self, size: Any) -> str | None:
        return None if isinstance(size, int) else self.fakes.symbols.get(size.node.expr)

    def described(self, node: Node) -> Input:
        return self.fakes.described(self.tensors[node])

    def dtype(self, node: Node) -> torch.dtype:
        return self.tensors[node].dtype

    def is_floating(self, node: Node) -> bool:
        return node in self.tensors and self.tensors[node].is_floating_point()

    def width(self, node: Node) -> int:
        """Values in a row of a tensor [n, ...]; see ``width_of``."""
        return self.width_of(self.tensors[node])

    def width_of(self, tensor: torch.Tensor) -> int:
        """Values of a tensor for each row; 0 if their number does not depend on the rows."""
        number: Any = tensor.numel()
        return 0 if isinstance(number, int) else self.fakes.at_hints(number) // _ROWS


@lru_cache(maxsize=64)
def values_of(graph: Graph) -> GraphValues:
    """The shapes and dtypes of a graph, which must not change afterwards."""
    return in_own_thread(lambda: GraphValues(graph))


def is_view(node: Node) -> bool:
    """Tells if a node returns a view of its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


# of each process: a thread does not outlive a fork
_workers: dict[int, ThreadPoolExecutor] = {}
_NAME = "fxpass-region"


def in_own_thread(function: Callable[[], T]) -> T:
    """Runs ``function`` in a thread of its own; returns its result, and raises its errors.

    The thread has neither the modes, the autocast nor the grad mode of the caller, no tracing
    context of a graph that is compiled around the call and, from torch 2.12 on, no configuration
    that was patched for that graph. A process has one such thread: calls run one after the other,
    and torch 2.11 without a GPU crashes where a thread that had fake tensors has ended.
    """
    if threading.current_thread().name.startswith(_NAME):
        return function()
    process = os.getpid()
    worker = _workers.get(process) or _workers.setdefault(process, ThreadPoolExecutor(1, _NAME))
    return worker.submit(function).result()
