"""Replaces the parts of regions by calls of ``fxpass::rows``.

In: a graph and its :class:`fxpass.rows.regions.Found`. Out: the graph, changed in place. The plans
of a part run on fake tensors of a chunk, and what they run is the text of the call. Operands and
results in another view of the rows are moved by nodes around the call::

    labels [B, T - 1] of z[:, :-1]    new_zeros(B * T).index_put(rows of the view, labels)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fxpass.op import rows as _rows  # noqa: F401  registers the operator
from fxpass.region.joint import tidy, traced
from fxpass.region.loop import Loop
from fxpass.region.run import Fakes, apart
from fxpass.region.text import Input
from fxpass.rows.outer import Outer
from fxpass.rows.regions import Found, Part
from fxpass.rows.rules import A, Ref, Rules
from fxpass.rows.sizes import hint, is_known, key, keys, numel, shape, value
from fxpass.rows.tags import Stop, View, others

Leaf = tuple[Any, ...]  # of a chunk: what is read, and how


class _UnknownSize(Exception):  # noqa: N818
    """A size that no input has: an input without elements is to have it."""

    def __init__(self, expr: Any) -> None:
        self.expr = expr


class Chunk:
    """The environment in which the plans of a part run on fake tensors of a chunk.

    Args:
        rules: the plans.
        body: the nodes that run.
        inside: the nodes that run in any part.
    """

    def __init__(self, rules: Rules, body: Sequence[Node], inside: set[Node]) -> None:
        self.rules, self.body, self.inside_of = rules, set(body), inside
        self.leaves: dict[Leaf, Input] = {}
        self.names: dict[Any, str] = {}
        self.hints: dict[str, int] = {"n": 256}
        self.values: dict[Node, Any] = {}
        self.given: dict[Leaf, Tensor] = {}
        self.fakes: Any = None
        self.n: Any = None
        self.device = torch.device("cpu")

    # ------------------------------------------------------------ what a part reads

    def collect(self, body: Sequence[Node]) -> None:
        """Notes the leaves of the nodes."""
        for node in body:
            for ref in self.rules.plans[node].refs:
                if (leaf := self.leaf(ref)) is not None:
                    self._note(leaf, ref)
            for arg in node.all_input_nodes:
                if isinstance(value(arg), torch.SymFloat | torch.SymInt | torch.SymBool):
                    self.number(arg)
            for view in self.rules.plans[node].views:
                if not view.is_whole:
                    self.leaves["inside", view] = Input(torch.bool, ("n",))

    def leaf(self, ref: Ref) -> Leaf | None:
        """What stands for an operand; None of what the part computes, and of one number."""
        if ref.kind == "node" and ref.node not in self.body:
            tag = self.rules.tag_of(ref.node)
            if tag is None or not tag.rows:
                return ("shared", ref.node)
            if ref.node in self.inside_of:
                return ("handed", ref.node)
            ref = Ref("row", ref.node, tag.letters, tag.rows, tag.view)
        if ref.kind == "row":
            assert ref.view is not None
            apart = not ref.view.in_order or None in ref.places
            large = is_known(shape(ref.node)) and numel(shape(ref.node)) >= self.rules.large
            kind = "entries" if apart and large else "row"
            return (kind, ref.node, ref.letters, ref.places, ref.view)
        return ("shared", ref.node) if ref.kind == "shared" else None

    def _note(self, leaf: Leaf, ref: Ref) -> None:
        sizes, letters, rows = shape(ref.node), ref.letters, ("n",)
        if leaf[0] == "handed":
            tag = self.rules.tag_of(ref.node)
            assert tag is not None
            letters = tag.letters
        if leaf[0] == "shared":
            letters, rows = "k" * len(sizes), ()
        inner = [self.named(size) for size in others(sizes, letters)]
        if leaf[0] == "entries":  # too large to be moved: a chunk looks up its rows
            self.leaves[("place", *leaf[1:])] = Input(torch.int64, ("n",))
            own = [key(size) for size, letter in zip(sizes, letters, strict=True) if letter == "r"]
            rows = (self.named(sympy.Mul(*own)),)
        self.leaves[leaf] = Input(value(ref.node).dtype, (*rows, *inner))

    def named(self, size: Any) -> int | str:
        """A size, or the name of a symbol."""
        found = key(size)
        if isinstance(found, int) or found.is_Integer:
            return int(found)
        name = self.names.setdefault(found, f"s{len(self.names)}")
        self.hints[name] = max(2, hint(size))
        return name

    def number(self, node: Node) -> None:
        """A number that varies, as a tensor without dimensions."""
        floating = isinstance(value(node), torch.SymFloat)
        self.leaves[("number", node)] = Input(torch.float64 if floating else torch.int64, ())

    # ------------------------------------------------------------ Env

    def get(self, ref: Ref) -> Any:
        if ref.kind == "fill":
            sizes = [self.size(s) for s in others(shape(ref.node), ref.letters)]
            number = self.rules.fill(ref.node)
            dtype, device = value(ref.node).dtype, self.device
            return torch.full((self.n, *sizes), number, dtype=dtype, device=device)
        leaf = self.leaf(ref)
        if leaf is None:
            made = self.values[ref.node]
            if ref.sizes is not None:
                made = made.reshape(made.shape[0], *map(self.size, ref.sizes))
            return made
        made = self.given[leaf]
        if leaf[0] == "entries":
            return made.index_select(0, self.given[("place", *leaf[1:])])
        return made.unsqueeze(0) if leaf[0] == "shared" and made.dim() else made

    def shared(self, ref: Ref) -> Tensor:
        return self.given["shared", ref.node]

    def full(self, ref: Ref) -> Tensor:
        made = self.get(ref)
        rows = made.dim() and key(made.shape[0]) != 1
        return made if rows else made.expand(self.n, *made.shape[1:])

    def size(self, size: Any) -> Any:
        if isinstance(size, Node) and ("number", size) in self.given:
            return self.given["number", size]  # of an elementwise call
        found = key(size)
        if isinstance(found, int | float | bool):
            return found
        symbols = sorted(found.free_symbols, key=str)
        if found not in self.names and not set(symbols) <= self.names.keys():
            raise _UnknownSize(found)
        if found in self.names:
            return self.fakes.sizes[self.names[found]]
        known = [self.fakes.sizes[self.names[s]] for s in symbols]
        return sympy.lambdify(symbols, found, modules=[{}, "math"])(*known)

    def inside(self, view: View) -> Tensor | None:
        return None if view.is_whole else self.given["inside", view]

    # ------------------------------------------------------------ the text

    def loop(self, part: Part) -> Loop:
        """The text of a part; ``leaves`` are its inputs, in this order.

        Raises:
            Stop: a call that no text has, or that holds for some numbers of rows alone.
        """
        self.collect(part.body)
        while True:
            try:
                return apart(lambda: self._loop(part))
            except _UnknownSize as unknown:
                for symbol in unknown.expr.free_symbols:
                    self.leaves["size", symbol] = Input(torch.bool, (self.named(symbol), 0))
            except ValueError as error:
                raise Stop(str(error)) from error

    def _loop(self, part: Part) -> Loop:
        inputs = list(self.leaves.values())
        self.fakes = Fakes(inputs, self.hints, self.device)
        self.n = self.fakes.sizes["n"]
        rules = self.rules

        def chunk(*tensors: Tensor) -> list[Tensor]:
            self.given = dict(zip(self.leaves, tensors, strict=True))
            self.values = {}
            for node in part.body:
                self.values[node] = rules.plans[node].run(self)
            return [self._result(node) for node in part.results]

        graph = tidy(traced(chunk, self.fakes, {}))
        self.fakes.check()
        for node in graph.find_nodes(op="call_function", target=A.view.default):
            node.target = A.reshape.default  # operands have strides of their own
        for node, of in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
            node.meta["input"] = of
        rows = tuple(i for i, of in enumerate(inputs) if of.shape[:1] == ("n",))
        sums = tuple(i for i, node in enumerate(part.results) if rules.is_sum(node))
        loop = Loop(rows, sums, graph)
        return Loop.parse(loop.text())

    def _result(self, node: Node) -> Tensor:
        made = self.values[node]
        if self.rules.is_sum(node):
            return made
        tag = self.rules.tag_of(node)
        assert tag is not None
        sizes = others(shape(node), tag.letters)
        if keys(made.shape[1:]) == keys(sizes) and key(made.shape[0]) != 1:
            return made
        return made.expand(self.n, *map(self.size, sizes))


def emit(graph: Graph, found: Found) -> None:
    """Puts the calls into a graph in the place of the regions.

    Raises:
        Stop: a part has no text. The graph may be changed by then.
    """
    rules = found.rules
    chunks = []
    for part in found.parts:
        chunk = Chunk(rules, part.body, found.inside)
        chunks.append((part, chunk, chunk.loop(part)))
    outer = Outer(graph)
    ones = _Ones(outer, found)
    handed: dict[Node, Node] = {}  # canonical rows of an earlier part
    replaced: dict[Node, Node] = {}
    for part, chunk, loop in chunks:
        inputs = [_operand(outer, rules, leaf, ones, handed) for leaf in chunk.leaves]
        call = outer.call(torch.ops.fxpass.rows.default, inputs, loop.text())
        call.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for i, node in enumerate(part.results):
            made = outer.call(operator.getitem, call, i)
            made.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            tag = rules.tag_of(node)
            if tag is None:
                result = _summed(outer, rules, node, made)
            else:
                handed[node] = made
                result = outer.gathered(made, tag, node)
            if found.degrees.get(node) == 1:
                ones.known[node] = result
                if tag is not None:
                    handed[node] = made
                result = outer.scaled(result, found.factor, value(node).dtype)
            result.meta |= {
                k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")
            }
            replaced[node] = result
    for node, result in replaced.items():
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in outer.made)
    for node, result in replaced.items():
        result.meta["val"] = node.meta["val"]
        for user in result.users:  # nor are those of results the node's
            user.target = A.reshape.default if user.target is A.view.default else user.target
    outer.read_sizes_elsewhere(found.inside)
    outer.sort()
    graph.eliminate_dead_code()
    graph.lint()


def _operand(outer: Outer, rules: Rules, leaf: Leaf, ones: _Ones, handed: dict[Node, Node]) -> Node:
    kind, of = leaf[:2]
    if kind == "handed":
        return handed[of]
    if kind == "inside":
        return outer.inside(of)
    if kind == "size":
        return outer.sized(of)
    if kind == "place":
        return outer.places(*leaf[1:])
    source = ones.of(of)
    if kind == "number":
        return outer.tensor_of(source)
    if kind == "row":
        return outer.canonical(source, *leaf[2:])
    if kind == "entries":
        return outer.entries(source, *leaf[2:4])
    return source


def _summed(outer: Outer, rules: Rules, node: Node, made: Node) -> Node:
    """A sum in the shape and dtype of a node, or the mean."""
    per = rules.plans[node].per
    if per:
        made = outer.call(A.div.Tensor, made, outer.product(per))
    if value(made).dtype != value(node).dtype:
        made = outer.call(A._to_copy.default, made, dtype=value(node).dtype)
    if keys(shape(made)) != keys(shape(node)):
        made = outer.call(A.reshape.default, made, [outer.size(s) for s in shape(node)])
    return made


class _Ones:
    """Nodes for a tangent of 1."""

    def __init__(self, outer: Outer, found: Found) -> None:
        self.outer, self.found = outer, found
        self.known: dict[Node, Node] = {}

    def of(self, node: Node) -> Node:
        """The node, or a copy that reads 1 in the place of the tangent."""
        found = self.found
        if found.degrees.get(node) != 1:
            return node
        if node not in self.known:
            if node is found.factor:
                args = [hint(s) for s in shape(node)], 1
                options = {"dtype": value(node).dtype, "device": value(node).device}
                self.known[node] = self.outer.call(A.full.default, *args, **options)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), self.of)
                self.known[node] = self.outer.call(node.target, *args, **kwargs)
        return self.known[node]
