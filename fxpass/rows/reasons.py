"""A report's lines of heads: those in a call, and the reasons for which others are left.

In: a product and the node that ended its region. Out: records, each of which prints one line::

    >>> print(Declined("train.py:9 z = head(x)", "aten.sort at train.py:12", "works along rows"))
    train.py:9 z = head(x): aten.sort at train.py:12 works along rows
    >>> print(FoundHead("z", "train.py:18 loss = f(x)", 16, 97, 4, 0, ("log_softmax", "sum")))
    train.py:18 loss = f(x): logits [16, 97]: log_softmax, sum
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxpass.graph.names import name_of
from fxpass.graph.source import source_line, source_place
from fxpass.kernels.call import Launch
from fxpass.op.rows import describe_call
from fxpass.plan.budget import size_text
from fxpass.plan.choice import Choice
from fxpass.region.loop import Loop
from fxpass.rows.aten_calls import VIEWS
from fxpass.rows.heads import Head
from fxpass.rows.rules import Rules
from fxpass.rows.sizes import example, numel, packet, shape, size_hint
from fxpass.rows.tags import Stop


@dataclass(frozen=True)
class Declined:
    """The reason for which a head is left as it is.

    Attributes:
        head: the line of the head's product; empty if the reason is of the whole graph.
        place: the operation that ended the head's region, and its line; empty if none did.
        reason: a verb phrase about the operation, or the failure.
        name: the product's name in Dynamo's graph; empty if it has none.
    """

    head: str
    place: str
    reason: str
    name: str = ""

    def __str__(self) -> str:
        why = f"{self.place} {self.reason}".strip()
        return f"{self.head}: {why}" if self.head else why


@dataclass(frozen=True)
class FoundHead:
    """A head whose logits do not exist any more.

    Attributes:
        name: the product's name in Dynamo's graph, or its line.
        line: the line of the first reduction of classes in the head's region, or of the product.
        rows, classes: the sizes of the logits.
        itemsize: the bytes of a logit.
        region: the number of the head's region; heads of one region share their calls.
        ops: short names of forward's operations on classes in the region, in the graph's order.
        names: the names of Dynamo's nodes that were traced into the region.
    """

    name: str
    line: str
    rows: int
    classes: int
    itemsize: int
    region: int
    ops: tuple[str, ...]
    names: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.line}: logits [{self.rows}, {self.classes}]: {', '.join(self.ops)}"


def declined(head: Node | None, stop: Stop, backward: Iterable[Node] = ()) -> Declined:
    """The record of a head that is left as it is.

    Args:
        head: the head's product; None if the reason is of the whole graph.
        stop: the refusal that ended the region.
        backward: the nodes of backward.
    """
    node = stop.node
    place = ""
    if node is not None:
        where = "in backward of" if node in backward else "at"
        place = f"{_full_name(node)} {where} {source_place(node)}"
    line, name = ("", "") if head is None else (source_line(head), name_of(head) or "")
    return Declined(line, place, str(stop), name)


@dataclass(frozen=True)
class FusedPart:
    """A call of the operator.

    Attributes:
        heads: the names of its products.
        choice: how the call runs, for a report: a record if it has a formula, else text.
        text: the text of its loop.
        device: the device of its tensors.
        launches: the Triton kernels of a call with a formula.
    """

    heads: frozenset[str]
    choice: str | Choice
    text: str
    device: torch.device
    launches: tuple[Launch, ...] = ()


def fused_part(call: Node, heads: Iterable[Node], backward: bool, gradients: bool) -> FusedPart:
    """The record of a call.

    Args:
        call: a call of ``fxpass::rows``.
        heads: its products.
        backward: it runs in backward.
        gradients: it runs in forward, and computes gradients.
    """
    tensors: Any = map_arg(call.args[0], _without_data)
    text = str(call.args[1])
    loop = Loop.parse(text)
    found = describe_call(tensors, text)
    names = frozenset(map(head_name, heads))
    device = tensors[0].device
    if found.choice is not None:
        symbolic = any(not isinstance(s, int) for n in call.all_input_nodes for s in shape(n))
        reason = _RECOMPUTES if backward else found.choice.reason
        choice = replace(found.choice, symbolic=symbolic, reason=reason, backward=backward)
        return FusedPart(names, choice, text, device, found.launches)
    planned = found.plan
    assert planned is not None
    how = "compiled by Inductor" if loop.compiled else "interpreted"
    scratch = size_text(planned.scratch + planned.sums)
    computed = "the gradients are computed with the outputs" if gradients else "no gradients"
    computed = _RECOMPUTES if backward else computed
    outputs = f"{len(loop.results)} result{'s' * (len(loop.results) != 1)}"
    rows = f"{planned.rows} rows at a time: {scratch} of scratch"
    choice = f"loop of {outputs}, {how}: {rows}; {computed}"
    return FusedPart(names, choice, text, device)


_RECOMPUTES = "backward computes the logits again"


def _without_data(node: Node) -> torch.Tensor:
    tensor = example(node)
    sizes = [size_hint(s) for s in tensor.shape]
    strides = [size_hint(s) for s in tensor.stride()]
    with FakeTensorMode():
        return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def head_name(product: Node) -> str:
    """The name of a product in Dynamo's graph; its line, where torch hands no name on."""
    return name_of(product) or source_line(product)


def found_heads(
    rules: Rules,
    heads: Sequence[Head],
    inside: Collection[Node],
    component: Mapping[Node, Node],
    backward: Collection[Node],
) -> list[FoundHead]:
    """A report's records of the heads whose regions run in calls.

    Args:
        inside: the nodes of regions.
        component: for each of these nodes, the node that stands for its region.
        backward: the nodes of backward.
    """
    silent = (*VIEWS, operator.getitem)
    outputs = tree_leaves(rules.graph.output_node().args)
    forward = {n for n in outputs if n not in backward}
    regions = list(dict.fromkeys(component[head.node] for head in heads))
    ops: dict[Node, list[Node]] = {region: [] for region in regions}
    for node in reversed(list(rules.graph.nodes)):
        if node not in forward:
            continue
        forward.update(node.all_input_nodes)
        computes = packet(node) not in silent and any(map(rules.has_classes, node.all_input_nodes))
        if computes and node in inside and component[node] in ops:
            ops[component[node]].insert(0, node)
    names: dict[Node, set[str]] = {region: set() for region in regions}
    for node in inside:
        if component[node] in names and (name := name_of(node)):
            names[component[node]].add(name)

    def line(head: Node) -> str:
        reducing = (n for n in ops[component[head]] if not rules.has_classes(n))
        return source_line(next(reducing, head))

    return [
        FoundHead(
            name=head_name(head.node),
            line=line(head.node),
            rows=numel(shape(head.node)) // head.classes,
            classes=head.classes,
            itemsize=example(head.node).dtype.itemsize,
            region=regions.index(component[head.node]),
            ops=_short_names(ops[component[head.node]]),
            names=frozenset(names[component[head.node]]),
        )
        for head in heads
    ]


def _short_names(nodes: Iterable[Node]) -> tuple[str, ...]:
    names = (_name(node).lstrip("_") for node in nodes)
    return tuple(dict.fromkeys(names))


def _name(node: Node) -> str:
    target: Any = packet(node)
    return str(getattr(target, "__name__", target))


def _full_name(node: Node) -> str:
    namespace = getattr(node.target, "namespace", "")
    return f"{namespace}.{_name(node)}" if namespace else _name(node)
