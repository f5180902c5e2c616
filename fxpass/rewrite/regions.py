"""Replaces row regions by operator calls: the logits of their heads are never whole.

In: a :class:`fxpass.capture.capture.Captured`. Out: the inserted calls, and the calls on rows that
stood between the operator's outputs and the results of nodes::

    %z = linear(%h, %w)                      %out = row_region([%h_rows, %w, %labels, ...], '...')
    %top = topk(%z, 5)                 ->    %rows = getitem(%out, 0)
    %loss = mean(sum(%top[0], -1))           %loss = mean(%rows)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

import fxpass.op.kept
import fxpass.op.row_region  # noqa: F401, registers the operator
from fxpass.capture.capture import Captured, nodes_of
from fxpass.capture.values import Leaf, RowOp, Value
from fxpass.graph.calls import storage
from fxpass.graph.functions import function_of
from fxpass.graph.hazards import leaves, writers_in
from fxpass.graph.nodes import NoMatch, hint, is_tensor, needs_gradient
from fxpass.rewrite.row_views import VIEWS
from fxpass.rewrite.traced import Made

A = torch.ops.aten
# Functions of which autograd saves no operand, or a mask.
_UNSAVING = {"add", "sub", "rsub", "gt", "ge", "lt", "le", "where"}
# Elements of a constant that becomes a part of the graph.
LONGEST = 4096


def rewrite_region(graph: Graph, captured: Captured, made: Sequence[Made]) -> Emitter:
    """Inserts the calls of a region, replaces what its nodes give to others, erases them."""
    emitter = Emitter(graph, captured)
    for one in made:
        emitter.insert(one)
    emitter.replace_results()
    emitter.erase()
    return emitter


class Emitter:
    """Inserts nodes before a place of a graph.

    Attributes:
        calls: the operator calls.
    """

    def __init__(self, graph: Graph, captured: Captured) -> None:
        self.graph, self.captured, self.slice = graph, captured, captured.slice
        self.calls: list[Node] = []
        self._unsaved: dict[Node, list[int]] = {}  # positions of a call's tensors
        self.rows: dict[int, tuple[Node, Value]] = {}  # outputs by value
        self.fake_mode = captured.calls[0].outputs[0].fake.fake_mode  # type: ignore[attr-defined]
        self.site: Node = captured.calls[0].place
        self.writers = writers_in(graph)
        self._known: dict[int, Node] = {}  # operands and late values, at the insertion point
        self._sizes: dict[Any, Node] = {}

    # ------------------------------------------------------------ nodes

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A new node with its example value and the stack trace of the site."""
        node = self.graph.call_function(function, args, kwargs)
        node.meta["stack_trace"] = self.site.meta.get("stack_trace")
        examples, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with torch.no_grad(), self.fake_mode or nullcontext():
            node.meta["example_value"] = function(*examples, **named)
        return node

    def size(self, size: Any) -> Any:
        """A size, or a number made of sizes, as a number or a node.

        Raises:
            NoMatch: it cannot be computed before the call.
        """
        if isinstance(size, torch.SymBool):
            raise NoMatch(self.site, f"the condition {size} on sizes is not known before the call")
        if not isinstance(size, torch.SymInt | torch.SymFloat):
            return size
        expr = size.node.expr
        if expr.is_number:
            return _number(expr)
        if expr not in self._sizes:
            self._sizes[expr] = self._computed(expr)
        return self._sizes[expr]

    def known_size(self, size: torch.SymInt, node: Node) -> None:
        """Names the node of a size."""
        self._sizes.setdefault(size.node.expr, node)

    def sizes(self, sizes: Sequence[Any]) -> list[Any]:
        """Sizes as numbers or nodes."""
        return [self.size(s) for s in sizes]

    def _computed(self, expr: Any) -> Any:
        for node in self.graph.nodes:
            if node is self.site:
                break
            example = node.meta.get("example_value")
            if node in self.slice.ran:
                continue
            if isinstance(example, torch.SymInt) and example.node.expr == expr:
                return node
            for dim, size in enumerate(example.shape if isinstance(example, Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr == expr:
                    return self.call(A.sym_size.int, node, dim)
        if not expr.args:
            return self._rows_of_mask(expr)
        parts = [_number(a) if a.is_number else self._computed(a) for a in expr.args]
        function = _ARITHMETIC.get(type(expr).__name__)
        if function is None:
            raise NoMatch(self.site, f"the size {expr} is not known before the call")
        if len(parts) == 1:
            return self.call(function, *parts)
        return functools.reduce(lambda one, other: self.call(function, one, other), parts)

    def _rows_of_mask(self, expr: Any) -> Node:
        """The number of rows that a mask takes, at a place before the call."""
        for step in self.slice.steps:
            sizes = step.results[0].shape if step.op.overloadpacket is A.index else ()
            if not any(isinstance(s, torch.SymInt) and s.node.expr == expr for s in sizes):
                continue
            for mask in step.values:
                known = mask.node is not None and mask.node < self.site
                if known and mask.fake.dtype == torch.bool:
                    taken = self.call(A.index.Tensor, mask.node, [mask.node])
                    return self.call(A.sym_size.int, taken, 0)
        raise NoMatch(self.site, f"the size {expr} is not known before the call")

    # ------------------------------------------------------------ operands

    def operand(self, value: Value) -> Node:
        """A node for a tensor that no logits are read for, or for a late one."""
        if value.node is not None:
            return value.node
        if id(value) not in self._known and value.data is not None:
            self._known[id(value)] = self._constant(value.data)
        if id(value) not in self._known:
            step = value.step
            assert step is not None
            args, kwargs = self._arguments((step.args, step.kwargs))
            if step.op.overloadpacket is A._to_copy:
                args, kwargs = (args[0],), {k: v for k, v in kwargs.items() if v is not None}
            made = self.call(step.op, *args, **kwargs)
            if len(step.results) == 1 and isinstance(made.meta["example_value"], Tensor):
                self._known[id(value)] = made
            else:
                for i, result in enumerate(step.results):
                    self._known[id(result)] = self.call(operator.getitem, made, i)
        return self._known[id(value)]

    def _constant(self, data: Tensor) -> Node:
        if data.numel() > LONGEST:
            raise NoMatch(self.site, f"a constant has {data.numel()} elements")
        return self.call(torch.tensor, data.tolist(), dtype=data.dtype, device=data.device)

    def _arguments(self, arguments: Any) -> Any:
        def of(argument: Any) -> Any:
            if isinstance(argument, Value):
                return self.current(argument)
            return self.size(argument)

        return pytree.tree_map(of, arguments, is_leaf=lambda a: isinstance(a, Value))

    def current(self, value: Value) -> Node:
        """A node for any tensor without classes."""
        return self.result(value) if value.tag is not None else self.operand(value)

    def viewed(self, node: Node, chain: Sequence[RowOp], rows: int) -> Node:
        """A tensor ``[*rows, ...]`` after views of its rows, as ``[n, ...]``."""
        for op in chain:
            node = VIEWS[op.kind](self, node, op)
            rows = op.after
        if rows == 0:
            return self.call(A.unsqueeze.default, node, 0)
        return node if rows == 1 else self.call(torch.flatten, node, 0, rows - 1)

    def leaf(self, leaf: Leaf) -> list[Node]:
        """The operator's tensors for an input."""
        head = leaf.head
        if head is not None:
            x, weight = map(self._matrix, (head.x, head.weight))
            if head.first:
                x = self.call(A.t.default, x)
            else:
                weight = self.call(A.t.default, weight)
            bias = [] if head.bias is None else [self.operand(head.bias)]
            return [self.viewed(x, leaf.chain, 1), weight, *bias]
        assert leaf.value is not None
        node, letters = self.operand(leaf.value), leaf.letters
        device = leaf.value.fake.device
        if device != self.captured.calls[0].outputs[0].fake.device:
            node = self.call(A._to_copy.default, node, device=self._device())
        if leaf.kind == "shared":
            return [node]
        order = [i for i, c in enumerate(letters) if c == "r"]
        rows = len(order)
        order += [i for i, c in enumerate(letters) if c != "r"]
        if order != sorted(order):
            node = self.call(A.permute.default, node, order)
        return [self.viewed(node, leaf.chain, rows)]

    def _device(self) -> torch.device:
        return self.captured.calls[0].outputs[0].fake.device

    def _matrix(self, value: Value) -> Node:
        node = self.operand(value)
        return node if len(value.shape) == 2 else self.call(A.select.int, node, 0, 0)

    # ------------------------------------------------------------ the operator's call

    def insert(self, made: Made) -> None:
        """Inserts a call, and the nodes of its outputs."""
        call, region = made.call, made.region
        self.site, self._known, self._sizes = call.place, {}, {}
        with self.graph.inserting_before(call.place):
            tensors: list[Node] = []
            unsaved: list[int] = []
            for leaf in call.leaves:
                sources = any(map(needs_gradient, nodes_of(leaf)))
                written = region.trained and self._written_later(leaf)
                for node in self.leaf(leaf):
                    if written:  # backward reads it as it is now
                        node = self.call(A.clone.default, node)
                    position = len(tensors)
                    if leaf.head is None and not written and self._is_unsaved(leaf, tensors):
                        unsaved.append(position)
                    if sources and position not in region.trained:
                        node = self.call(A.detach.default, node)
                    tensors.append(node)
            out = self.call(torch.ops.fxpass.row_region.default, tensors, region.text())
            self.calls.append(out)
            self._unsaved[out] = unsaved if region.trained else []
            for i, value in enumerate(call.outputs):
                node = self.call(operator.getitem, out, i)
                node.meta["example_value"].requires_grad_(i in region.tangents)
                self.rows[id(value)] = node, value

    def _is_unsaved(self, leaf: Leaf, tensors: Sequence[Node]) -> bool:
        """Whether autograd of the program may not save an operand that the user may write to: a
        small one, or one as large as logits that is only added to them, compared or chosen."""
        x, weight = (node.meta["example_value"] for node in tensors[:2])
        large = hint(x.shape[0]) * hint(weight.shape[0])

        def unsaved(node: Node) -> bool:
            small = hint(node.meta["example_value"].numel()) * 8 <= large
            return small or all(function_of(user) in _UNSAVING for user in node.users)

        return any(leaves(node) and unsaved(node) for node in nodes_of(leaf) if is_tensor(node))

    def kept(self, call: Node) -> Node:
        """A call whose backward reads copies of operands that autograd of the program may not save:
        what the user writes to them before backward is not seen."""
        tensors: Any = list(call.args[0])  # type: ignore[arg-type]
        with self.graph.inserting_before(call):
            for position in self._unsaved[call]:
                tensors[position] = self.call(torch.ops.fxpass.kept.default, tensors[position])
        call.args = (tensors, *call.args[1:])
        return call

    def _written_later(self, leaf: Leaf) -> bool:
        """Whether a node writes to an operand after the call."""
        memory = {storage(n) for n in nodes_of(leaf)}
        writers = (w for m in (*memory, None) for w in self.writers.get(m, ()))
        return any(writer > self.site for writer in writers)

    def result(self, value: Value) -> Node:
        """An output of the operator in the shape that the program has."""
        if id(value) in self._known:
            return self._known[id(value)]
        node, _ = self.rows[id(value)]
        tag = value.tag or ""
        if tag.count("r") != 1:
            rows = self.sizes(value.rows)
            inside = [s for s, c in zip(value.shape, tag, strict=True) if c != "r"]
            node = self.call(A.view.default, node, [*rows, *self.sizes(inside)])
        order = [i for i, c in enumerate(tag) if c == "r"] + [
            i for i, c in enumerate(tag) if c != "r"
        ]
        if order != sorted(order):
            back = [order.index(i) for i in range(len(order))]
            node = self.call(A.permute.default, node, back)
            node = self.call(A.clone.default, node, memory_format=torch.contiguous_format)
        self._known[id(value)] = node
        return node

    def replace_results(self) -> None:
        """Gives the users of nodes of the slice what they read."""
        for old in sorted(self.slice.boundary()):
            value = self.slice.values(old)
            self.site, self._known, self._sizes = old, {}, {}
            if isinstance(value, Value):
                if value.tag is None and not value.late:
                    continue  # a constant stays
                with self.graph.inserting_before(old):
                    new = self.current(value)
                self._take_place(old, new)
            elif isinstance(value, torch.SymInt):
                with self.graph.inserting_before(old):
                    self._take_place(old, self.size(value))
            elif isinstance(value, int | float | bool):
                self._take_place(old, value)

    def _take_place(self, old: Node, new: Any) -> None:
        if isinstance(new, Node):
            example = old.meta["example_value"]
            if new.meta["example_value"] is not example and is_tensor(old):
                new.meta["example_value"] = example
        for user in list(old.users):
            if user not in self.slice.ran:
                user.replace_input_with(old, new)

    def erase(self) -> None:
        """Erases the nodes of the slice that nobody reads."""
        for node in sorted(self.slice.ran, reverse=True):
            if not node.users:
                self.graph.erase_node(node)


_ARITHMETIC: dict[str, Any] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloatTrueDiv": operator.truediv,
    "IntTrueDiv": operator.truediv,
    "ToFloat": torch.sym_float,
}


def _number(expr: Any) -> int | float:
    return int(expr) if expr.is_integer else float(expr)
