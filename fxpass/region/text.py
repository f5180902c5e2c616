"""A graph as text: one operation a line; nothing is evaluated when the text is read.

In: lines. Out: a graph, and the same lines again::

    >>> lines = '''%0 = input float32[n, 97]
    ... %1 = input int64[n]
    ... %2 = aten.unsqueeze.default(%1, 1)
    ... %3 = aten.gather.default(%0, 1, %2)
    ... return %3'''.split("\\n")
    >>> graph = graph_of(lines)
    >>> next(iter(graph.nodes)).meta["input"], lines_of(graph) == lines
    (Input(dtype=torch.float32, shape=('n', 97)), True)
    >>> graph_of([line.replace("gather.default", "gather.out") for line in lines])
    Traceback (most recent call last):
    ValueError: aten.gather.out writes, is random or gives no tensors, in '%3 = aten.gather.out...
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpass.formula.dtypes import dtype_name

_DTYPES = ["float64", "float32", "bfloat16", "float16"]
_DTYPES += ["int64", "int32", "int16", "int8", "uint8", "bool"]
_WORDS: dict[str, Any] = {
    name: getattr(torch, name) for name in (*_DTYPES, "contiguous_format", "preserve_format")
} | {"inf": float("inf"), "nan": float("nan")}
_NAMES = {value: name for name, value in _WORDS.items() if not isinstance(value, float)}
# arithmetic of sizes, such as of %3 = aten.sym_size.int(%0, 0)
_SIZE_FUNCTIONS = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "eq", "ne", "lt", "le", "gt", "ge")
} | {name: getattr(torch, name) for name in ("sym_max", "sym_min", "sym_not", "sym_ite")}
_SIZE_NAMES = {function: f"size.{name}" for name, function in _SIZE_FUNCTIONS.items()}
_DEFAULT = {"layout": (None, torch.strided), "pin_memory": (None, False)}
_SIZES = ("aten.sym_size.int", "aten.sym_numel.default", "aten.sym_stride.int")
_INDEX = ("aten.index.Tensor",)  # by integers; fake tensors refuse masks
_PRIMS = ("fma", "rev")  # made by Inductor's decompositions
_ON_RANKS = "_c10d_functional"
_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
_REFUSED = {
    torch.Tag.nondeterministic_seeded,
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
}


@dataclass(frozen=True)
class Input:
    """An input of a function of rows: "n" is the number of rows, other words are other sizes."""

    dtype: torch.dtype
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"

    def actual_shape(self, sizes: Mapping[str, Any]) -> list[Any]:
        """The shape, with ``sizes`` for their names."""
        return [actual_size(size, sizes) for size in self.shape]


def actual_size(size: int | str, sizes: Mapping[str, Any]) -> Any:
    """A size of an input, from ``sizes`` by name."""
    return sizes[size] if isinstance(size, str) else size


def results_of(graph: Graph) -> list[Node]:
    """The outputs of a graph."""
    return list(graph.output_node().args[0])  # pyright: ignore[reportArgumentType, reportReturnType]


def is_collective(node: Node) -> bool:
    """Tells if a node exchanges values with other ranks, or waits for them."""
    return getattr(node.target, "namespace", "") == _ON_RANKS


def is_on_ranks(graph: Graph) -> bool:
    """Tells if a graph has collectives: all ranks of a group have to run it in step."""
    return any(map(is_collective, graph.nodes))


def lines_of(graph: Graph) -> list[str]:
    """A line for each node."""
    names: dict[Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            return [*lines, "return " + ", ".join(names[n] for n in results_of(graph))]
        names[node] = f"%{len(names)}"
        lines.append(f"{names[node]} = {_operation(node, names)}")
    raise ValueError("the graph has no output")


def _operation(node: Node, names: dict[Node, str]) -> str:
    if node.op == "placeholder":
        return f"input {node.meta['input']}"
    if node.op != "call_function":
        raise ValueError(f"a region has no {node.op}, such as {node.target}")
    parts = [_print(value, names) for value in node.args]
    for key, value in node.kwargs.items():
        # tensors are made on the device of the logits
        if key != "device" and not (key in _DEFAULT and value in _DEFAULT[key]):
            parts.append(f"{key}={_print(value, names)}")
    return f"{_name(node.target)}({', '.join(parts)})"


def _name(target: Any) -> str:
    name = str(target) if isinstance(target, torch._ops.OpOverload) else _SIZE_NAMES.get(target, "")
    name = "getitem" if target is operator.getitem else name
    if not name:
        raise ValueError(f"a region has no {target}")
    operation_named(name)  # raises as reading the text would
    return name


def _print(value: Any, names: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_print(v, names) for v in value)}]"
    if value is None or type(value) in (bool, int, float):
        return str(value)
    if isinstance(value, str) and re.fullmatch(r"\w*", value):
        return f"'{value}'"
    if isinstance(value, (torch.dtype, torch.memory_format)) and value in _NAMES:
        return _NAMES[value]
    raise ValueError(f"a region has no argument {value!r}")


@lru_cache(maxsize=4096)
def operation_named(name: str) -> Callable[..., Any]:
    """The operation that a text names.

    Raises:
        ValueError: no such operation, or one that writes or is random.
    """
    kind, _, rest = name.partition(".")
    if name == "getitem" or (kind == "size" and rest in _SIZE_FUNCTIONS):
        return _SIZE_FUNCTIONS.get(rest, operator.getitem)
    packet, _, overload = rest.partition(".")
    found: Any = getattr(torch.ops.aten, packet, None) if kind == "aten" else None
    if kind == "prims" and packet in _PRIMS:
        found = getattr(torch.ops.prims, packet, None)
    if kind == _ON_RANKS and packet in _COLLECTIVES:
        found = getattr(getattr(torch.ops, kind), packet, None)
    found = getattr(found, overload, None)
    if not isinstance(found, torch._ops.OpOverload) or str(found) != name:
        raise ValueError(f"{name} is no operation of a region")
    schema = found._schema
    tensors = {str(r.type) in ("Tensor", "List[Tensor]") for r in schema.returns} == {True}
    tags = set(found.tags) & _REFUSED if name not in _INDEX else set()
    refused = schema.is_mutable or tags or name == "aten.from_file.default"
    if refused or not (tensors or name in _SIZES):
        raise ValueError(f"{name} writes, is random or gives no tensors")
    return found


def graph_of(lines: Sequence[str]) -> Graph:
    """The graph that ``lines_of`` prints.

    Raises:
        ValueError: a line that is not understood, or an operation that is not allowed.
    """
    graph = Graph()
    nodes = []
    *lines, last = lines
    for line in lines:
        try:
            nodes.append(_node(line, nodes, graph))
        except (ValueError, SyntaxError, IndexError, RecursionError) as error:
            raise ValueError(f"{error}, in {line[:200]!r}") from error
    if not re.fullmatch(r"return (%\d+(, |$))*", last):
        raise ValueError(f"the last line is {last[:200]!r}, not what is returned")
    returned = [int(number) for number in re.findall(r"\d+", last)]
    if any(number >= len(nodes) for number in returned):
        raise ValueError(f"{last!r} returns what is not computed")
    graph.output([nodes[number] for number in returned])
    return graph


def _node(line: str, nodes: list[Node], graph: Graph) -> Node:
    """The node of a line; ``nodes`` are those of the lines before."""
    match = re.fullmatch(r"%(\d+) = (?:input (\w+)\[(.*)\]|([\w.]+)\((.*)\))", line)
    if not match or int(match[1]) != len(nodes):
        raise ValueError(f"no input or operation that gives %{len(nodes)}")
    if match[2]:
        sizes = [s for s in match[3].split(", ") if s]
        if match[2] not in _DTYPES or not all(re.fullmatch(r"\d+|[a-z]\w*", s) for s in sizes):
            raise ValueError("an input has a dtype and sizes")
        node = graph.placeholder(f"input_{len(nodes)}")
        shape = tuple(int(s) if s.isdecimal() else s for s in sizes)
        node.meta["input"] = Input(_WORDS[match[2]], shape)
        return node
    called = operation_named(match[4])
    call: Any = ast.parse(f"f({re.sub('%', '_', match[5])})", mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError("no call")
    args = [_value(a, nodes) for a in call.args]
    kwargs = {str(k.arg): _value(k.value, nodes) for k in call.keywords}
    names = []
    if isinstance(called, torch._ops.OpOverload):
        names = [a.name for a in called._schema.arguments]
    if not set(kwargs) <= set(names[len(args) :]) - {"device"} or len(args) > (len(names) or 3):
        raise ValueError(f"{match[4]} has the arguments {', '.join(names)}")
    return graph.call_function(called, tuple(args), kwargs)


def _value(tree: ast.expr, nodes: list[Node]) -> Any:
    """The argument that a text writes: a node, a number, a word or a list of these."""
    match tree:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            if isinstance(value := _value(operand, nodes), (int, float)):
                return -value
        case ast.List(elts=elements):
            return [_value(element, nodes) for element in elements]
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.Name(id=name) if re.fullmatch(r"_\d+", name):
            return nodes[int(name[1:])]
    raise ValueError(f"{ast.unparse(tree)} is no argument")
