"""The chain of nodes from the linear to each loss in Dynamo's graphs, as text.

In: the graphs of one call, in order. Out: one :class:`Chain` per loss. It does not use fxpass, so
that the table is independent of the matcher::

    linear(mul:f32[2, 12, 64], param:f32[131, 64], None):f32[2, 12, 131]
    .float(_):f32[2, 12, 131]
    .view(_, -1, V):f32[24, 131]
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

_LOSSES = ("cross_entropy", "nll_loss", "linear_cross_entropy", "kl_div", "ctc_loss")
# torch 2.11 has no linear_cross_entropy
LOSSES = {getattr(F, name): name for name in _LOSSES if hasattr(F, name)}
LINEARS = {
    F.linear: "linear",
    torch.matmul: "matmul",
    operator.matmul: "@",
    torch.mm: "mm",
    torch.bmm: "bmm",
    torch.addmm: "addmm",
    torch.baddbmm: "baddbmm",
    torch.einsum: "einsum",
    "matmul": ".matmul",
    "mm": ".mm",
    "bmm": ".bmm",
}
STEPS = 60


@dataclass
class Chain:
    """The chain of one loss.

    Attributes:
        steps: the calls from the linear on, each with its arguments and shape.
        loss: the call of the loss.
        end: where the chain starts: "linear", "graph break" or another reason.
        readers: other nodes that read or write tensors of the chain.
        source: the user's line of the loss.
    """

    steps: list[str]
    loss: str
    end: str
    readers: list[str] = field(default_factory=list)
    source: str = ""


def chains(modules: list[GraphModule], classes: int) -> list[Chain]:
    """The chains of all losses; ``classes`` is written as V where it is an argument."""
    return [
        _chain(loss, classes)
        for module in modules
        for graph in _graphs(module)
        for loss in graph.nodes
        if loss.op == "call_function" and loss.target in LOSSES
    ]


def _graphs(module: GraphModule) -> Iterator[Any]:
    yield module.graph
    for child in module.children():
        if isinstance(child, GraphModule):
            yield from _graphs(child)


def _chain(loss: Node, classes: int) -> Chain:
    names: dict[Node, str] = {}
    back: list[Node] = []
    node = _input(loss)
    end = "no end found"
    while node is not None and len(back) < STEPS:
        if node.op in ("placeholder", "get_attr"):
            end = "a parameter" if _origin(node) == "param" else "graph break"
            break
        back.append(node)
        if node.target in LINEARS:
            end = "linear"
            break
        node = _input(node)
    else:
        end = "no tensor goes in" if node is None else end
    back.reverse()
    for node in back:
        names[node] = "_"
    inside = {loss, *back}
    readers = [
        f"{_call(user, {**names, node: '_'}, classes)} reads {_name(node)}"
        for node in back
        for user in node.users
        if user not in inside and user.op != "output"
    ]
    readers += [
        f"output reads {_name(node)}"
        for node in back
        if any(user.op == "output" for user in node.users)
    ]
    trace = (loss.meta.get("stack_trace") or "").splitlines()
    trace = [line.strip() for line in trace if set(line.strip()) - set("^~")]
    return Chain(
        steps=[_call(node, names, classes) for node in back],
        loss=_call(loss, names, classes),
        end=end,
        readers=readers,
        source=trace[-1] if trace else "",
    )


def _input(node: Node) -> Node | None:
    """The operand with the logits: the first tensor, also inside lists."""
    values = [*node.args, *node.kwargs.values()]
    if "input" in node.kwargs:
        values = [node.kwargs["input"]]
    for value in values:
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if isinstance(item, Node) and _is_tensor(item):
                return item
    return None


def _is_tensor(node: Node) -> bool:
    example = node.meta.get("example_value")
    if isinstance(example, list | tuple):
        return bool(example) and all(isinstance(e, Tensor) for e in example)
    return isinstance(example, Tensor) and example.is_floating_point()


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _call(node: Node, names: dict[Node, str], classes: int) -> str:
    arguments = [_text(a, names, classes) for a in node.args]
    arguments += [f"{k}={_text(v, names, classes)}" for k, v in node.kwargs.items()]
    method = "." if node.op == "call_method" else ""
    return f"{method}{_name(node)}({', '.join(arguments)}){_shape(node)}"


def _text(value: Any, names: dict[Node, str], classes: int) -> str:
    if isinstance(value, Node):
        if value in names:
            return names[value]
        return f"{_origin(value)}{_shape(value)}"
    if isinstance(value, slice):
        parts = [value.start, value.stop, *([value.step] if value.step is not None else [])]
        return ":".join("" if p is None else _text(p, names, classes) for p in parts)
    if isinstance(value, tuple | list):
        inner = ", ".join(_text(v, names, classes) for v in value)
        return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
    if value is Ellipsis:
        return "..."
    if isinstance(value, int) and not isinstance(value, bool) and value == classes:
        return "V"
    return repr(value)


def _origin(node: Node) -> str:
    if isinstance(node.meta.get("example_value"), torch.nn.Parameter):
        return "param"
    return "input" if node.op in ("placeholder", "get_attr") else _name(node)


def _shape(node: Node) -> str:
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        return ""
    dtype = str(example.dtype).removeprefix("torch.").replace("float", "f").replace("int", "i")
    return f":{dtype}{list(example.shape)}"
