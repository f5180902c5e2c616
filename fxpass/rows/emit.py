"""Replaces the parts of regions by calls of ``fxpass::rows``.

In: a graph and its :class:`fxpass.rows.regions.Regions`. Out: the graph, changed in place. The
plans of a part run on fake tensors of a chunk: the trace is the text of the call. Nodes around the
call move operands and results between views of the rows::

    labels [B, T - 1] of z[:, :-1]    new_zeros(B * T).index_put(rows of the view, labels)
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fxpass.formula.dtypes import LOW_PRECISION
from fxpass.op import rows as _rows  # noqa: F401  registers the operator
from fxpass.region.loop import Loop
from fxpass.rows.aten_calls import A, P
from fxpass.rows.call_inputs import CallInput
from fxpass.rows.chunk import Chunk
from fxpass.rows.heads import backward_nodes, tangent_inputs
from fxpass.rows.masks import reader_masks
from fxpass.rows.powers import ONE, Power
from fxpass.rows.regions import RegionCall, Regions
from fxpass.rows.row_builder import RowBuilder
from fxpass.rows.rules import Rules
from fxpass.rows.sizes import example, is_tensor_node, keys, packet, shape, size_hint
from fxpass.rows.softmaxes import decomposed_softmax
from fxpass.rows.tangents import degrees


def emit(graph: Graph, regions: Regions, options: Mapping[str, Any]) -> list[Node]:
    """Replaces the regions of a graph by calls.

    Args:
        graph: is changed in place.
        regions: its regions.
        options: of the loops.

    Returns:
        the calls, one for each part.

    Raises:
        Stop: a part has no text. The graph may be changed by then.
    """
    chunks = _chunks(graph, regions)
    loops = [chunk.loop() for _, chunk in chunks]
    emitter = _Emitter(graph, regions)
    calls = [
        emitter.add(part, chunk, replace(loop, **options))
        for (part, chunk), loop in zip(chunks, loops, strict=True)
    ]
    emitter.finish()
    return calls


class _Emitter:
    """Adds calls to a graph.

    Args:
        graph: is changed in place.
        regions: its regions.
    """

    def __init__(self, graph: Graph, regions: Regions) -> None:
        self.graph = graph
        self.regions = regions
        self.rules = regions.rules
        self.builder = RowBuilder(graph, regions.inside)
        self.degree = _degrees(graph, regions)
        self.handed: dict[Node, Node] = {}  # canonical rows of an earlier part
        self.replaced: dict[Node, Node] = {}
        self.backward_calls: set[Node] = set()
        self.unit = _UnitTangent(self.builder, regions, self.replaced)

    def add(self, part: RegionCall, chunk: Chunk, loop: Loop) -> Node:
        """Adds the call of a part."""
        builder = self.builder
        rules = self.rules
        degree = self.degree
        linear = [operand for operand in chunk.inputs if degree.get(operand.source) == 1]
        power = None
        if linear and _is_half(rules, part) and all(degree.get(n) is not None for n in part.body):
            power = Power(builder, map(self._given, linear))
        inputs = [
            _operand(builder, operand, self._given(operand), power if operand in linear else None)
            for operand in chunk.inputs
        ]
        casts = {node: some for node in part.results if (some := _casts(rules, node))}
        upcast = {
            node
            for node in part.results
            if degree.get(node) == 1 and example(node).dtype == torch.float16
            if power is not None or (self.regions.factor and rules.is_sum(node))
        }
        upcast |= casts.keys()
        unrounded = tuple(i for i, node in enumerate(part.results) if node in upcast)
        # one line, as Inductor's C++ code has the text as a literal
        text = replace(loop, unrounded=unrounded).text().replace("\n", "; ")
        call = builder.call(torch.ops.fxpass.rows.default, inputs, text)
        call.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if not self.regions.backward.isdisjoint(part.results):
            self.backward_calls.add(call)
        for i, node in enumerate(part.results):
            made = builder.call(operator.getitem, call, i)
            made.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            inverse = power.inverse if power is not None and degree.get(node) == 1 else None
            self._add_result(node, made, inverse, casts.get(node, {}))
        return call

    def _given(self, operand: CallInput) -> Any:
        """The node of an input for a tangent of 1."""
        source = operand.source
        if operand.kind == "handed":
            return self.handed[source]
        return self.unit.node_for(source) if isinstance(source, Node) else source

    def _add_result(
        self, node: Node, made: Node, inverse: Node | None, casts: dict[Node, list[Node]]
    ) -> None:
        """Notes a call's result as the replacement of a node, or of the casts of the node."""
        builder = self.builder
        tag = self.rules.tag_of(node)
        linear = self.degree.get(node) == 1
        if tag is None:
            made = _summed(builder, self.rules, node, made)
        at_unit = _scaled(builder, made, inverse, None, example(node).dtype)
        if tag is not None:
            self.handed[node] = at_unit
        if linear:
            self.unit.nodes[node] = at_unit if tag is None else builder.gathered(at_unit, tag, node)
        factor = self.unit.factor() if linear and self.regions.factor is not None else None
        dtype = torch.float32 if casts else example(node).dtype
        result = _scaled(builder, made, inverse, factor, dtype)
        if tag is not None:
            result = builder.gathered(result, tag, node)
        traces = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
        for reader, views in (casts or {node: []}).items():
            last = result
            for view in views:
                last = builder.call(view.target, last, *view.args[1:], **view.kwargs)
            last.meta |= traces
            self.replaced[reader] = last

    def finish(self) -> None:
        """Replaces the nodes by the results, and removes the regions."""
        builder = self.builder
        inside = self.regions.inside
        for node, result in self.replaced.items():
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in builder.made)
        for node, result in self.replaced.items():
            result.meta["val"] = node.meta["val"]
            _reshaped(result)
        self._copy_written_inputs()
        for node in list(self.graph.nodes):
            made = decomposed_softmax(builder.call, node) if node not in inside else None
            if made is not None:
                made.meta = node.meta | {"val": made.meta["val"]}
                node.replace_all_uses_with(made)
        builder.read_sizes_elsewhere(inside)
        builder.sort()
        # FX takes a wait for other ranks for a side effect
        self.graph.eliminate_dead_code(lambda node: node not in inside and node.is_impure())
        self.graph.lint()

    def _copy_written_inputs(self) -> None:
        """Copies inputs that forward writes to at its end, as ``bias.data.mul_(2)`` does: calls of
        backward read the values before. AOTAutograd clones some, and Inductor drops clones."""
        read = set[Node]()
        todo = list(self.backward_calls)
        while todo:
            if (node := todo.pop()) not in read:
                read.add(node)
                todo += node.all_input_nodes
        for node in self.graph.find_nodes(op="placeholder"):
            users = list(node.users)
            copies = [u for u in users if u.target is A.clone.default and not u.kwargs]
            writes = [u for u in users if u.target is A.copy_.default]
            if node not in read or not (copies or writes):
                continue
            saved = self.builder.call(A.maximum.default, node, node)
            saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            for user in users if writes else ():
                if user not in writes:
                    user.replace_input_with(node, saved)
            for copy in copies:
                copy.replace_all_uses_with(saved)
            _reshaped(saved)


def _reshaped(result: Node) -> None:
    """Makes reshapes of a result's views: its strides may differ from those of the node."""
    for user in result.users:
        user.target = A.reshape.default if user.target is A.view.default else user.target


def _chunks(graph: Graph, regions: Regions) -> list[tuple[RegionCall, Chunk]]:
    """The parts, with chunks whose results are 0 in rows that nothing reads."""
    rules = regions.rules
    inside = regions.inside
    dependent = backward_nodes([*tangent_inputs(graph), *inside], graph)
    chunks = []
    for part in regions.parts:
        rows = [n for n in part.results if rules.tag_of(n) and not rules.has_classes(n)]
        masks = {n: some for n in rows if (some := reader_masks(rules, n, inside, dependent))}
        chunks.append((part, Chunk(rules, part, inside, masks)))
    return chunks


def _degrees(graph: Graph, regions: Regions) -> dict[Node, int | None]:
    """The degrees of nodes in the factor; where there is none, in all tangents together."""
    if regions.factor is not None:
        return regions.degrees
    return degrees(regions.rules, graph, *tangent_inputs(graph))


def _is_half(rules: Rules, part: RegionCall) -> bool:
    """Is true if a value with classes is fp16."""
    with_classes = [n for n in part.body if rules.has_classes(n) and is_tensor_node(n)]
    return any(example(n).dtype == torch.float16 for n in with_classes)


def _casts(rules: Rules, node: Node) -> dict[Node, list[Node]]:
    """The casts to f32 of a 16-bit sum, each with the views between; none if the sum has other
    readers."""
    if not rules.is_sum(node) or example(node).dtype not in LOW_PRECISION:
        return {}
    found: dict[Node, list[Node]] = {}
    todo: list[tuple[Node, list[Node]]] = [(node, [])]
    while todo:
        last, views = todo.pop()
        for user in last.users:
            if packet(user) in (A._to_copy, P.convert_element_type):
                if example(user).dtype != torch.float32:
                    return {}
                found[user] = views
            elif packet(user) in (A.permute, A.t, A.transpose, A.view, A.reshape):
                todo.append((user, [*views, user]))
            else:
                return {}
    return found


def _scaled(
    builder: RowBuilder, made: Node, inverse: Node | None, factor: Node | None, dtype: torch.dtype
) -> Node:
    """A result times the power's inverse and the factor, where there are such, in a dtype."""
    if inverse is not None and factor is not None:
        factor = builder.call(A.mul.Tensor, inverse, factor)
    elif factor is None:
        factor = inverse
    if factor is not None:
        return builder.scaled(made, factor, dtype)
    if example(made).dtype == dtype:
        return made
    return builder.call(P.convert_element_type.default, made, dtype)


def _operand(builder: RowBuilder, operand: CallInput, given: Any, power: Power | None) -> Node:
    """The node of an input."""
    kind = operand.kind
    letters = operand.letters
    places = operand.places
    view = operand.view
    if kind == "row_mask":
        return builder.row_mask(operand.source)
    if kind == "size":
        return builder.size_carrier(operand.source)
    if kind == "entry_indices":
        assert view is not None
        return builder.entry_indices(operand.source, places, view)
    source = given if power is None else power.scaled(given)
    if kind == "number":
        return builder.scalar_tensor(source)
    if kind == "row":
        assert view is not None
        return builder.canonical(source, letters, places, view)
    if kind == "entries":
        return builder.entries(source, letters, places)
    return source


def _summed(builder: RowBuilder, rules: Rules, node: Node, made: Node) -> Node:
    """A call's sum in the shape of a node; over a number of elements, where the node is a mean."""
    per = rules.plans[node].per
    if rules.plans[node].merge.startswith("arg"):  # a value and its row
        made = builder.call(A.select.int, made, 0, 1)
    if per:
        made = builder.call(A.div.Tensor, made, builder.product(per))
    if keys(shape(made)) != keys(shape(node)):
        made = builder.call(A.reshape.default, made, [builder.size(s) for s in shape(node)])
    return made


class _UnitTangent:
    """Nodes that are computed for a tangent of 1, or of ``ONE`` in fp16.

    Attributes:
        nodes: for each node of degree 1 in the factor, its value for that tangent.
    """

    def __init__(
        self, builder: RowBuilder, regions: Regions, replaced: Mapping[Node, Node]
    ) -> None:
        self.builder = builder
        self.regions = regions
        self.replaced = replaced
        self.nodes: dict[Node, Node] = {}
        tangent = regions.factor
        self.is_half = tangent is not None and example(tangent).dtype == torch.float16

    def factor(self) -> Node:
        """The tangent over that of ``nodes``, 0-dim."""
        factor = self.regions.factor
        assert factor is not None
        if shape(factor):
            factor = self.builder.call(A.reshape.default, factor, [])
        if not self.is_half:
            return factor
        upcast = self.builder.call(P.convert_element_type.default, factor, torch.float32)
        return self.builder.call(A.mul.Tensor, upcast, 1 / ONE)

    def node_for(self, node: Node) -> Node:
        """The node, or a copy that reads 1 in the place of the tangent."""
        if self.regions.degrees.get(node) != 1:
            return self.replaced.get(node, node)  # of an earlier part
        if node not in self.nodes:
            if node is self.regions.factor:
                sizes = [size_hint(s) for s in shape(node)]
                options = {"dtype": example(node).dtype, "device": example(node).device}
                number = ONE if self.is_half else 1
                self.nodes[node] = self.builder.call(A.full.default, sizes, number, **options)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), self.node_for)
                self.nodes[node] = self.builder.call(node.target, *args, **kwargs)
        return self.nodes[node]
