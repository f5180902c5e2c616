"""Replaces the parts of regions by calls of ``fxpass::rows``.

In: a graph and its :class:`fxpass.rows.regions.Found`. Out: the graph, changed in place. The plans
of a part run on fake tensors of a chunk, and what they run is the text of the call. Operands and
results in another view of the rows are moved by nodes around the call::

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
from fxpass.rows.chunk import Chunk, Leaf
from fxpass.rows.heads import backward_of
from fxpass.rows.masks import masks
from fxpass.rows.outer import Outer
from fxpass.rows.powers import ONE, Power
from fxpass.rows.regions import Found, RegionCall
from fxpass.rows.rules import A, P, Rules
from fxpass.rows.sizes import hint, is_tensor, keys, packet, shape, value
from fxpass.rows.softmaxes import taken_apart
from fxpass.rows.tangents import degrees


def emit(graph: Graph, found: Found, options: Mapping[str, Any]) -> list[Node]:
    """Puts the calls into a graph in the place of the regions.

    Args:
        graph: is changed in place.
        found: its regions.
        options: of the loops.

    Returns:
        the calls, one for each part.

    Raises:
        Stop: a part has no text. The graph may be changed by then.
    """
    chunks = _chunks(graph, found)
    loops = [chunk.loop(part) for part, chunk in chunks]
    emitter = _Emitter(graph, found)
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
        found: its regions.
    """

    def __init__(self, graph: Graph, found: Found) -> None:
        self.graph = graph
        self.found = found
        self.rules = found.rules
        self.outer = Outer(graph, found.inside)
        self.degree = _degrees(graph, found)
        self.handed: dict[Node, Node] = {}  # canonical rows of an earlier part
        self.replaced: dict[Node, Node] = {}
        self.late: set[Node] = set()  # the calls that backward may run
        self.ones = _Ones(self.outer, found, self.replaced)

    def add(self, part: RegionCall, chunk: Chunk, loop: Loop) -> Node:
        """Adds the call of a part."""
        outer = self.outer
        rules = self.rules
        degree = self.degree
        linear = [leaf for leaf in chunk.leaves if degree.get(leaf[1]) == 1]
        power = None
        if linear and _is_half(rules, part) and all(degree.get(n) is not None for n in part.body):
            power = Power(outer, map(self._given, linear))
        inputs = [
            _operand(outer, rules, leaf, self._given(leaf), power if leaf in linear else None)
            for leaf in chunk.leaves
        ]
        casts = {node: some for node in part.results if (some := _casts(rules, node))}
        exact = {n for n in part.results if degree.get(n) == 1 and value(n).dtype == torch.float16}
        exact = {n for n in exact if power is not None or (self.found.factor and rules.is_sum(n))}
        wide = tuple(i for i, node in enumerate(part.results) if node in casts or node in exact)
        # of one line: Inductor's C++ code has it as a literal
        text = replace(loop, wide=wide).text().replace("\n", "; ")
        call = outer.call(torch.ops.fxpass.rows.default, inputs, text)
        call.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if not self.found.later.isdisjoint(part.results):
            self.late.add(call)
        for i, node in enumerate(part.results):
            made = outer.call(operator.getitem, call, i)
            made.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            inverse = power.inverse if power is not None and degree.get(node) == 1 else None
            self._result(node, made, inverse, casts.get(node, {}))
        return call

    def _given(self, leaf: Leaf) -> Any:
        """The value of a leaf for a tangent of 1."""
        kind, of = leaf[:2]
        if kind == "handed":
            return self.handed[of]
        return self.ones.of(of) if isinstance(of, Node) else of

    def _result(
        self, node: Node, made: Node, inverse: Node | None, casts: dict[Node, list[Node]]
    ) -> None:
        """Puts a result of a call in the place of a node, or of the casts that read it."""
        outer = self.outer
        tag = self.rules.tag_of(node)
        linear = self.degree.get(node) == 1
        if tag is None:
            made = _summed(outer, self.rules, node, made)
        one = _times(outer, made, inverse, None, value(node).dtype)
        if tag is not None:
            self.handed[node] = one
        if linear:
            self.ones.known[node] = one if tag is None else outer.gathered(one, tag, node)
        factor = self.ones.part() if linear and self.found.factor is not None else None
        dtype = torch.float32 if casts else value(node).dtype
        result = _times(outer, made, inverse, factor, dtype)
        if tag is not None:
            result = outer.gathered(result, tag, node)
        traces = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
        for reader, views in (casts or {node: []}).items():
            last = result
            for view in views:
                last = outer.call(view.target, last, *view.args[1:], **view.kwargs)
            last.meta |= traces
            self.replaced[reader] = last

    def finish(self) -> None:
        """Puts the results in the places of the nodes."""
        outer = self.outer
        for node, result in self.replaced.items():
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in outer.made)
        for node, result in self.replaced.items():
            result.meta["val"] = node.meta["val"]
            _reshaped(result)
        self._keep_what_is_written()
        for node in list(self.graph.nodes):
            made = taken_apart(outer.call, node) if node not in self.found.inside else None
            if made is not None:
                made.meta = node.meta | {"val": made.meta["val"]}
                node.replace_all_uses_with(made)
        outer.read_sizes_elsewhere(self.found.inside)
        outer.sort()
        inside = self.found.inside  # FX calls a wait for other ranks an effect
        self.graph.eliminate_dead_code(lambda node: node not in inside and node.is_impure())
        self.graph.lint()

    def _keep_what_is_written(self) -> None:
        """Inputs that forward writes to in the end, as ``bias.data.mul_(2)`` does, are copied: what
        calls of backward read is as it was. AOTAutograd clones some, and Inductor drops clones."""
        read = set[Node]()
        todo = list(self.late)
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
            kept = self.outer.call(A.maximum.default, node, node)
            kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            for user in users if writes else ():
                if user not in writes:
                    user.replace_input_with(node, kept)
            for copy in copies:
                copy.replace_all_uses_with(kept)
            _reshaped(kept)


def _reshaped(result: Node) -> None:
    """Views of a result may be of other strides than the node's were."""
    for user in result.users:
        user.target = A.reshape.default if user.target is A.view.default else user.target


def _chunks(graph: Graph, found: Found) -> list[tuple[RegionCall, Chunk]]:
    """The parts, whose results are 0 in rows that nothing reads."""
    rules = found.rules
    inside = found.inside
    tangents = [n for n in graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
    late = backward_of([*tangents, *inside], graph) | set(tangents) | inside
    made = []
    for part in found.parts:
        rows = [n for n in part.results if rules.tag_of(n) and not rules.has_classes(n)]
        read = {n: some for n in rows if (some := masks(rules, n, inside, late))}
        made.append((part, Chunk(rules, part.body, inside, read)))
    return made


def _degrees(graph: Graph, found: Found) -> dict[Node, int | None]:
    """The degrees of nodes in the tangents, together."""
    if found.factor is not None:
        return found.degrees
    places = graph.find_nodes(op="placeholder")
    tangents = [n for n in places if "tangents" in str(n.target)]
    return degrees(found.rules, graph, *tangents)


def _is_half(rules: Rules, part: RegionCall) -> bool:
    """Whether values with classes are fp16."""
    with_classes = [n for n in part.body if rules.has_classes(n) and is_tensor(n)]
    return any(value(n).dtype == torch.float16 for n in with_classes)


def _casts(rules: Rules, node: Node) -> dict[Node, list[Node]]:
    """The casts to f32 that alone read a sum of 16 bits, and the views between; else none."""
    if not rules.is_sum(node) or value(node).dtype not in LOW_PRECISION:
        return {}
    found: dict[Node, list[Node]] = {}
    todo: list[tuple[Node, list[Node]]] = [(node, [])]
    while todo:
        last, chain = todo.pop()
        for user in last.users:
            if packet(user) in (A._to_copy, P.convert_element_type):
                if value(user).dtype != torch.float32:
                    return {}
                found[user] = chain
            elif packet(user) in (A.permute, A.t, A.transpose, A.view, A.reshape):
                todo.append((user, [*chain, user]))
            else:
                return {}
    return found


def _times(
    outer: Outer, made: Node, inverse: Node | None, factor: Node | None, dtype: torch.dtype
) -> Node:
    """A result times the numbers that it was computed without, in a dtype."""
    if inverse is not None and factor is not None:
        factor = outer.call(A.mul.Tensor, inverse, factor)
    elif factor is None:
        factor = inverse
    if factor is not None:
        return outer.scaled(made, factor, dtype)
    if value(made).dtype == dtype:
        return made
    return outer.call(P.convert_element_type.default, made, dtype)


def _operand(outer: Outer, rules: Rules, leaf: Leaf, given: Any, power: Power | None) -> Node:
    """The node of an input."""
    kind, of = leaf[:2]
    if kind == "inside":
        return outer.inside(of)
    if kind == "size":
        return outer.sized(of)
    if kind == "place":
        return outer.places(*leaf[1:])
    source = given if power is None else power.of(given)
    if kind == "number":
        return outer.tensor_of(source)
    if kind == "row":
        return outer.canonical(source, *leaf[2:])
    if kind == "entries":
        return outer.entries(source, *leaf[2:4])
    return source


def _summed(outer: Outer, rules: Rules, node: Node, made: Node) -> Node:
    """A sum in the shape of a node, or the mean."""
    per = rules.plans[node].per
    if per:
        made = outer.call(A.div.Tensor, made, outer.product(per))
    if keys(shape(made)) != keys(shape(node)):
        made = outer.call(A.reshape.default, made, [outer.size(s) for s in shape(node)])
    return made


class _Ones:
    """Nodes for a tangent of 1, but of ``ONE`` in fp16."""

    def __init__(self, outer: Outer, found: Found, replaced: Mapping[Node, Node]) -> None:
        self.outer = outer
        self.found = found
        self.replaced = replaced
        self.known: dict[Node, Node] = {}
        tangent = found.factor
        self.is_half = tangent is not None and value(tangent).dtype == torch.float16

    def part(self) -> Node:
        """The tangent over what it was taken for, 0-dim."""
        factor = self.found.factor
        assert factor is not None
        if shape(factor):
            factor = self.outer.call(A.reshape.default, factor, [])
        if not self.is_half:
            return factor
        wide = self.outer.call(P.convert_element_type.default, factor, torch.float32)
        return self.outer.call(A.mul.Tensor, wide, 1 / ONE)

    def of(self, node: Node) -> Node:
        """The node, or a copy that reads 1 in the place of the tangent."""
        found = self.found
        if found.degrees.get(node) != 1:
            return self.replaced.get(node, node)  # of an earlier part
        if node not in self.known:
            if node is found.factor:
                args = [hint(s) for s in shape(node)], ONE if self.is_half else 1
                options = {"dtype": value(node).dtype, "device": value(node).device}
                self.known[node] = self.outer.call(A.full.default, *args, **options)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), self.of)
                self.known[node] = self.outer.call(node.target, *args, **kwargs)
        return self.known[node]
