"""Inserts nodes before a place of a graph: operands of calls, sizes, views of rows.

In: a graph and a :class:`fxpass.capture.capture.Captured`. Out: nodes with example values, which
the calls of a row region read.
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

from fxpass.capture.capture import Captured
from fxpass.capture.values import Leaf, RowOp, Value, same, trimmed
from fxpass.casts.casts import DYNAMO, Cast
from fxpass.graph.functions import function_of
from fxpass.graph.hazards import writers_in
from fxpass.graph.nodes import NoMatch, is_number
from fxpass.rewrite.ranks import Ranks
from fxpass.rewrite.row_views import VIEWS

A = torch.ops.aten
# Views that a linear takes of its operands.
_VIEWS = {A.t, A.view, A._unsafe_view, A.reshape, A.transpose, A.permute, A.unsqueeze, A.expand}
# Elements of a constant that becomes a part of the graph.
LONGEST = 4096


class Emitter:
    """Inserts nodes before a place of a graph.

    Attributes:
        casts: those of heads' operands, which autocast did.
        made: what was inserted.
        shared: memory of several results, or that autograd saves.
    """

    def __init__(self, graph: Graph, captured: Captured) -> None:
        self.graph, self.captured, self.slice = graph, captured, captured.slice
        self.casts: list[Cast] = []
        self.made: list[Node] = []
        self.shared: set[int | None] = set()
        self.rows: dict[int, tuple[Node, Value]] = {}  # outputs by value
        self.fake_mode = captured.calls[0].outputs[0].fake.fake_mode  # type: ignore[attr-defined]
        self.site: Node = captured.calls[0].place
        self.writers = writers_in(graph)
        self.ranks = Ranks(self.call, captured.slice.sharding)
        self.role = ""  # in a head, of the operand that is inserted
        self._known: dict[int, Node] = {}  # operands and late values, at the insertion point
        self._sizes: dict[Any, Node] = {}

    def stand(self, site: Node) -> None:
        """Begins at another place of the graph."""
        self.site, self._known, self._sizes = site, {}, {}
        self.ranks.forget()

    # ------------------------------------------------------------ nodes

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """A new node with its example value and the stack trace of the site."""
        node = self.graph.call_function(function, args, kwargs)
        self.made.append(node)
        # a node that switches gradients off, before which a call may stand, has no line
        sites = (self.site, self.captured.heads[0])
        if trace := next(filter(None, (n.meta.get("stack_trace") for n in sites)), None):
            node.meta["stack_trace"] = trace
        examples, named = torch.fx.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        # a search after this one asks which nodes need gradients
        with torch.set_grad_enabled(self._grads_at(node)), self.fake_mode or nullcontext():
            node.meta["example_value"] = function(*examples, **named)
        return node

    def _grads_at(self, node: Node) -> bool:
        """Whether gradients are enabled at a node."""
        first = next(iter(self.graph.nodes))
        while node is not first and node.target is not torch._C._set_grad_enabled:
            node = node.prev
        switches = node.target is torch._C._set_grad_enabled
        return bool(node.args[0]) if switches else self.slice.scope.grads.get(node, True)

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
        if value.node is not None and is_number(value.node):
            # a product, of which AOTAutograd knows how to keep the number varying
            of = {"dtype": value.fake.dtype, "device": self._device()}
            return self.call(torch.mul, self.call(A.full.default, [], 1, **of), value.node)
        if value.node is not None:
            return self.ranks.here(value.node, self.role)
        if id(value) not in self._known and value.data is not None:
            self._known[id(value)] = self._constant(value.data)
        if id(value) not in self._known:
            step = value.step
            assert step is not None
            args, kwargs = self._arguments((step.args, step.kwargs))
            if step.op.overloadpacket is A.copy:  # which has no derivative
                self._known[id(value)] = self._copied(args[1], value)
                return self._known[id(value)]
            if step.op.overloadpacket is A._to_copy:
                args, kwargs = (args[0],), {k: v for k, v in kwargs.items() if v is not None}
            if step.head_cast and not kwargs.keys() - {"dtype"}:
                made, cast = DYNAMO.make(self.graph, args[0], kwargs["dtype"], step.node)
                self.casts.append(cast)
            else:
                made = self.call(step.op, *args, **kwargs)
            if len(step.results) == 1 and isinstance(made.meta["example_value"], Tensor):
                self._known[id(value)] = made
            else:
                for i, result in enumerate(step.results):
                    self._known[id(result)] = self.call(operator.getitem, made, i)
        return self._known[id(value)]

    def _copied(self, source: Node, to: Value) -> Node:
        """A tensor in the dtype and shape of the one that it is copied to."""
        if source.meta["example_value"].dtype != to.fake.dtype:
            source = self.call(A._to_copy.default, source, dtype=to.fake.dtype)
        return self.call(A.expand.default, source, self.sizes(to.shape))

    def wide(self, leaf: Leaf, dtype: torch.dtype) -> dict[str, Node]:
        """What the hidden states and the weight of a head were cast from, if autocast did it."""
        head, found = leaf.head, dict[str, Node]()
        assert head is not None
        if self.ranks.sharding is not None:
            return {}  # the ranks of a sharded head exchange casts
        for name, value in (("x", head.x), ("weight", head.weight)):
            node = self._before_cast(value, dtype)
            if node is None:
                continue
            if len(value.shape) != 2:
                node = self.call(A.select.int, node, 0, 0)
            node = self._transposed(node) if head.first == (name == "x") else node
            found[name] = self.viewed(node, leaf.chain, 1) if name == "x" else node
        return found

    def _before_cast(self, value: Value, dtype: torch.dtype) -> Node | None:
        step = value.step
        if value.node is not None or step is None or not step.values:
            return None
        source, *others = step.args
        if step.op.overloadpacket is A._to_copy and source.fake.dtype == dtype:
            return self.current(source)
        if step.op.overloadpacket not in _VIEWS or not isinstance(source, Value):
            return None
        inner = self._before_cast(source, dtype)
        if inner is None:
            return None
        # a cast has other strides than its operand, which may have no such view
        view = step.op.overloadpacket in (A.view, A._unsafe_view)
        apart = view and not inner.meta["example_value"].is_contiguous()
        op = A.reshape.default if apart else step.op
        return self.call(op, inner, *self._arguments(tuple(others)))

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

    def viewed(self, node: Node, chain: Sequence[RowOp], rows: int) -> Node:
        """A tensor ``[*rows, ...]`` after views of its rows, as ``[n, ...]``."""
        chain = chain if rows != 1 else trimmed(chain)
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
            x = self._in_role("x", self._matrix, head.x)
            weight = self._in_role("weight", self._matrix, head.weight)
            chain, rows = trimmed(leaf.chain), 1
            if head.first:
                x = self._transposed(x)
            else:
                weight = self._transposed(weight)
            bias = [] if head.bias is None else [self._bias(head.bias, head.classes)]
            if not head.first and chain and chain[0].kind == "reshape":
                x, chain, rows = self._in_role("x", self._unflattened, x, head.x, chain)
            return [self.ranks.rows_of_x(self.viewed(x, chain, rows)), weight, *bias]
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
        return [self.ranks.rows_here(self.viewed(node, leaf.chain, rows))]

    def _bias(self, bias: Value, classes: Any) -> Node:
        """``[V]``: of one element, it is that of all classes."""
        node = self._in_role("bias", self.operand, bias)
        whole = same(bias.shape[0], classes)
        return node if whole else self.call(A.expand.default, node, [self.size(classes)])

    def _in_role(self, role: str, function: Any, *args: Any) -> Any:
        self.role = role
        try:
            return function(*args)
        finally:
            self.role = ""

    def _device(self) -> torch.device:
        return self.captured.calls[0].outputs[0].fake.device

    def _unflattened(
        self, x: Node, of: Value, chain: Sequence[RowOp]
    ) -> tuple[Node, Sequence[RowOp], int]:
        """Hidden states before a linear flattens them, where the rows of its result are views."""
        step, sizes = of.step, chain[0].args[0]
        view = step is not None and step.op.overloadpacket in (A.view, A._unsafe_view, A.reshape)
        source = step.values[0] if view and of.node is None else None  # type: ignore[union-attr]
        if source is None or len(source.shape) != len(sizes) + 1:
            return x, chain, 1
        if not all(map(same, source.shape[:-1], sizes)):
            return x, chain, 1
        return self.operand(source), chain[1:], chain[0].after

    def _transposed(self, node: Node) -> Node:
        """A matrix ``[V, D]`` in place of its transpose."""
        turned = function_of(node) in ("t", "numpy_T") or node.target is A.t.default
        source = node.all_input_nodes[0] if turned else node
        # a view made where gradients are off passes none on
        turned = turned and self.slice.scope.grads.get(node, True)
        if turned and source.meta["example_value"].dim() == 2:
            return source
        return self.call(A.t.default, node)

    def _matrix(self, value: Value) -> Node:
        node = self.operand(value)
        return node if len(value.shape) == 2 else self.call(A.select.int, node, 0, 0)


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
