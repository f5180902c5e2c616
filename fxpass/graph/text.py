"""A graph as stable text: one line per node, with dtype and shape, nested graphs indented.

In: a ``GraphModule`` of Dynamo or of AOTAutograd. Out: text without paths and addresses, which is
the same in every run and on every machine, so that a test can compare it::

    %logits: f32[4, 10] = linear(%l_x_, %l_w_, None)

The text of a loop stands below its call, a line of the loop on each line.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._dtype_abbrs import dtype_abbrs

from fxpass.graph.nodes import nested_graph


def graph_text(gm: GraphModule, indent: str = "") -> str:
    """The text of a graph and of the graphs that its nodes call."""
    lines = []
    for node in gm.graph.nodes:
        lines.append(indent + _line(node))
        nested = nested_graph(node)
        if nested is not None:
            lines.append(graph_text(nested, indent + "    "))
    return "\n".join(lines)


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    call = {"placeholder": "input", "get_attr": str(node.target)}.get(node.op)
    if call is None:
        given = node.args
        named = {**getattr(node.target, "keywords", {}), **node.kwargs}
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten":
            given = ()
            named = _operands(node)
        texts = [v for v in named.values() if isinstance(v, str) and "; %" in v]
        named = {k: v for k, v in named.items() if v not in texts}
        parts = [*map(_argument, given), *(f"{k}={_argument(v)}" for k, v in named.items())]
        call = f"{_target(node.target)}({', '.join(parts)})"
        call = "\n    ".join([call, *(line for text in texts for line in text.split("; "))])
    example = node.meta.get("example_value", node.meta.get("val"))
    return f"%{node.name}{_type(example)} = {call}"


def _operands(node: Node) -> dict[str, Any]:
    """The operands of an operator by name, without those that are None: it may have many."""
    target: Any = node.target
    names = (argument.name for argument in target._schema.arguments)
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: operand for name, operand in given.items() if operand is not None}


def _type(example: Any) -> str:
    if not isinstance(example, torch.Tensor):
        return ""
    dtype = dtype_abbrs.get(example.dtype, example.dtype)
    return f": {dtype}[{', '.join(str(s) for s in example.shape)}]"


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    module = "operator." if getattr(operator, target.__name__, None) is target else ""
    return module + target.__name__


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, tuple | list):
        return f"({', '.join(_argument(v) for v in value)}{',' * (len(value) == 1)})"
    if isinstance(value, slice):
        parts = [value.start, value.stop] + ([value.step] if value.step is not None else [])
        return ":".join("" if p is None else _argument(p) for p in parts)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_argument(v)}" for k, v in value.items()) + "}"
    if value is Ellipsis:
        return "..."
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
