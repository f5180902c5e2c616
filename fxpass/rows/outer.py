"""Nodes that are put into a graph around the calls of ``fxpass::rows``.

In: a graph. Out: nodes that move operands to the rows of a head and results back::

    rows of the view        arange(N).view(B, T)[:, :-1]
    operand, canonical      new_zeros(N, ...).index_put([rows of the view], operand)
    result                  canonical[rows of the view]
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import CallMethodKey
from torch.fx.node import map_arg
from torch.utils._pytree import SequenceKey, tree_leaves, tree_map_only
from torch.utils._sympy.functions import FloorDiv

from fxpass.op import saved
from fxpass.rows.rules import VIEWS, A, P
from fxpass.rows.sizes import is_known, is_tensor, key, numel, packet, same, shape, value
from fxpass.rows.tags import Stop, Tag, View


def _without_base(tensor: Tensor) -> Tensor:
    """A value that is no view of another: torch stores graphs, but no such values."""
    if tensor._base is None:
        return tensor
    layout = tensor.shape, tensor.stride()
    return torch.empty_strided(*layout, dtype=tensor.dtype, device=tensor.device)


class Outer:
    """Adds nodes at the end of a graph; :meth:`sort` moves them to their places.

    Args:
        graph: the graph, which is changed.
        inside: the nodes that go.

    Attributes:
        made: the nodes that are added.
        trace: where the program has them, if it is one place.
    """

    def __init__(self, graph: Graph, inside: Collection[Node] = ()) -> None:
        self.graph = graph
        self.end = graph.output_node()
        self.made: set[Node] = set()
        self.trace: str | None = None
        self._numbers: dict[Any, Node] = {}
        self._rows: dict[View, Node] = {}
        self._inside: dict[View, Node] = {}
        self._operands: dict[Any, Node] = {}
        self._sizes: dict[Any, Node] = {}
        tensors = [value(n) for n in graph.nodes if is_tensor(n)]
        self.mode = next((t.fake_mode for t in tensors if hasattr(t, "fake_mode")), None)
        self.device = next(t.device for t in tensors)
        self._find_sizes(inside)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call, with its example value."""
        with self.graph.inserting_before(self.end):
            node = self.graph.call_function(target, args, kwargs)
        given, named = map_arg((args, kwargs), value)
        if target is operator.getitem:
            node.meta["val"] = given[0][given[1]]
        elif self.mode is not None:
            with self.mode:
                node.meta["val"] = tree_map_only(Tensor, _without_base, target(*given, **named))
        if self.trace is not None:
            node.meta["stack_trace"] = self.trace
        self.made.add(node)
        return node

    # ------------------------------------------------------------ sizes

    def _find_sizes(self, inside: Collection[Node]) -> None:
        """The nodes whose values are the symbols of sizes."""
        self._sources: dict[Any, tuple[Node, int | None]] = {}
        self._known: dict[Any, Any] = {}  # the sizes of what they are compared by
        for node in self.graph.nodes:
            found = value(node)
            self._known |= {key(s): s for s in (shape(node) if is_tensor(node) else ())}
            if isinstance(found, torch.SymInt) and node.op == "placeholder":
                self._sources[key(found)] = node, None
        for node in self.graph.find_nodes(op="placeholder"):
            if "tangents" in str(node.target):  # forward has none
                continue
            self._add_sources(node)
        for node in self.graph.nodes:
            if node.meta.get("unbacked_bindings") and node not in inside:
                self._add_sources(node)

    def _add_sources(self, node: Node) -> None:
        for dim, size in enumerate(shape(node) if is_tensor(node) else ()):
            self._sources.setdefault(key(size), (node, dim))

    def size(self, size: Any) -> Any:
        """A size as an argument: an int, or a node that computes it.

        Raises:
            Stop: no input of the graph tells the size.
        """
        found = key(size)
        return found if isinstance(found, int) else self._size(found)

    def _size(self, expr: Any) -> Any:
        if isinstance(expr, int) or expr.is_Integer:
            return int(expr)
        if expr not in self._sizes:
            self._sizes[expr] = self._made_size(expr)
        return self._sizes[expr]

    def _made_size(self, expr: Any) -> Node:
        known = self._known.get(expr)
        if expr not in self._sources and known is not None:  # another name of the same size
            of = (k for k in self._sources if k in self._known and same(self._known[k], known))
            expr = next(of, expr)
        if expr in self._sources:
            node, dim = self._sources[expr]
            return node if dim is None else self.call(A.sym_size.int, node, dim)
        operators: Any = {sympy.Add: operator.add, sympy.Mul: operator.mul, sympy.Pow: operator.pow}
        operators[FloorDiv] = operator.floordiv
        if expr.func not in operators:
            raise Stop(f"has the size {expr}")
        first, *rest = (self._size(arg) for arg in expr.args)
        for other in rest:
            first = self.call(operators[expr.func], first, other)
        return first

    def product(self, sizes: Iterable[Any]) -> Any:
        """The product of sizes, as an argument."""
        return self._size(sympy.Mul(*map(key, sizes)))

    def sized(self, size: Any) -> Node:
        """A tensor without elements that has a size."""
        return self.full([self._size(size), 0], False, torch.bool)

    def full(self, sizes: Sequence[Any], fill: float, dtype: torch.dtype) -> Node:
        """A tensor of one number."""
        return self.call(A.full.default, list(sizes), fill, dtype=dtype, device=self.device)

    def numbers(self, count: Any) -> Node:
        """``0, 1, ..., count - 1``. Not by arange, which Inductor decomposes before this pass."""
        if count not in self._numbers:
            options = {"dtype": torch.int64, "device": self.device, "requires_grad": False}
            self._numbers[count] = self.call(P.iota.default, count, start=0, step=1, **options)
        return self._numbers[count]

    def tensor_of(self, number: Node) -> Node:
        """A number that varies, as a tensor without dimensions."""
        floating = isinstance(value(number), torch.SymFloat)
        dtype = torch.float64 if floating else torch.int64
        return self.call(A.scalar_tensor.default, number, dtype=dtype, device=self.device)

    # ------------------------------------------------------------ rows

    def rows(self, view: View) -> Node:
        """The numbers of the head's rows that a view has, in its sizes."""
        if view in self._rows:
            return self._rows[view]
        if not view.steps:
            made = self.numbers(self.size(view.root))
        else:
            before = self.rows(view.before)
            kind, args, after = view.last
            if kind == "reshape":
                made = self.call(A.reshape.default, before, list(map(self.size, after)))
            elif kind == "permute":
                made = self.call(A.permute.default, before, list(args))
            elif kind == "flip":
                made = self.call(P.rev.default, before, [d % len(shape(before)) for d in args])
            elif kind == "select":
                made = self.call(A.select.int, before, args[0], self.size(args[1]))
            elif kind == "mask":
                made = self._chosen(before, args[0], args[1], after)
            else:
                dim, start, stop, step = args
                ends = self.size(start), self.size(stop)
                made = self.call(A.slice.Tensor, before, dim, *ends, step)
        self._rows[view] = made
        return made

    def _chosen(self, before: Node, dim: int, mask: Node, after: Sequence[Any]) -> Node:
        """Rows by a mask, as many as the graph knows."""
        with self.graph.inserting_before(self.end):
            args = before, [*[None] * dim, mask]
            made = self.graph.call_function(A.index.Tensor, args)
        self.made.add(made)
        size = after[dim]
        sizes = [*shape(before)[:dim], self._known[size], *shape(before)[dim + len(shape(mask)) :]]
        made.meta["val"] = value(before).new_empty(sizes)
        if not isinstance(size, int) and size not in self._sources:  # what made it goes
            made.meta["unbacked_bindings"] = {size: (CallMethodKey("size"), SequenceKey(dim))}
            self._sources[size] = made, dim
        return made

    def flat(self, view: View) -> Node:
        """:meth:`rows` in one dimension."""
        made = self.rows(view)
        return made if len(shape(made)) == 1 else self.call(A.reshape.default, made, [-1])

    def inside(self, view: View) -> Node:
        """Which of the head's rows a view has, ``[N]`` bool."""
        if view not in self._inside:
            none = self.full([self.size(view.root)], False, torch.bool)
            true = self.full([], True, torch.bool)
            self._inside[view] = self.call(A.index_put.default, none, [self.flat(view)], true)
        return self._inside[view]

    def canonical(
        self, source: Node, letters: str, places: Sequence[int | None], view: View
    ) -> Node:
        """An operand in the head's rows ``[N, ...]``; 0 in rows that the view has not."""
        name = source, letters, places, view
        if name not in self._operands:
            self._operands[name] = self._canonical(source, letters, places, view)
        return self._operands[name]

    def _canonical(
        self, source: Node, letters: str, places: Sequence[int | None], view: View
    ) -> Node:
        numbers = None if view.in_order else self.flat(view)
        inner = [self.size(s) for s, letter in _with_letters(source, letters) if letter != "r"]
        made = self._rows_first(source, letters, places)
        for i, p in enumerate(places):
            if p is None:
                made = self.call(A.unsqueeze.default, made, i)
        rows = shape(made)[: len(places)]
        if not all(map(same, rows, self._sizes_of(view))):
            made = self.call(A.expand.default, made, [*map(self.size, view.shape), *inner])
        if view.steps:
            made = self.call(A.reshape.default, made, [-1, *inner])
        if numbers is None:
            return made
        zeros = self.full([self.size(view.root), *inner], 0, value(made).dtype)
        return self.call(A.index_put.default, zeros, [numbers], made)

    def _sizes_of(self, view: View) -> list[Any]:
        return [self._known.get(size, size) for size in view.shape]

    def _rows_first(self, source: Node, letters: str, places: Sequence[int | None]) -> Node:
        own = [p for p in places if p is not None]
        order = [*own, *(i for i, letter in enumerate(letters) if letter != "r")]
        if len(order) < len(letters):
            raise Stop("is an operand whose rows are not those of its reader")
        whole = order == list(range(len(order)))
        return source if whole else self.call(A.permute.default, source, order)

    def entries(self, source: Node, letters: str, places: Sequence[int | None]) -> Node:
        """An operand, with its own rows in one dimension."""
        inner = [self.size(s) for s, letter in _with_letters(source, letters) if letter != "r"]
        made = self._rows_first(source, letters, places)
        return self.call(A.reshape.default, made, [-1, *inner])

    def places(self, source: Node, letters: str, places: Sequence[int | None], view: View) -> Node:
        """For each of the head's rows, its row of :meth:`entries`; the first for rows that the view
        has not."""
        rows = None if view.in_order else self.flat(view)
        own = [shape(source)[p] for p in places if p is not None]
        sizes = [1 if p is None else self.size(shape(source)[p]) for p in places]
        made = self.call(A.reshape.default, self.numbers(self.product(own)), sizes)
        if not all(map(same, shape(made), self._sizes_of(view))):
            made = self.call(A.expand.default, made, list(map(self.size, view.shape)))
        made = self.call(A.reshape.default, made, [-1])
        if rows is None:
            return made
        first = self.full([self.size(view.root)], 0, torch.int64)
        return self.call(A.index_put.default, first, [rows], made)

    def gathered(self, made: Node, tag: Tag, like: Node) -> Node:
        """Canonical rows in the view and the dimensions of a node."""
        view = tag.view
        inner = [self.size(s) for s in shape(made)[1:]]
        if not view.in_order:
            made = self.call(A.index.Tensor, made, [self.flat(view)])
        if len(view.shape) != 1 or (view.in_order and view.steps):
            made = self.call(A.reshape.default, made, [*map(self.size, view.shape), *inner])
        rows = iter(range(len(view.shape)))
        rest = iter(range(len(view.shape), 99))
        order = []
        for letter in tag.letters:
            order.append(next(rows) if letter == "r" else next(rest))
        if order != list(range(len(order))):
            made = self.call(A.permute.default, made, order)
        if value(made).dtype != value(like).dtype:
            raise Stop(f"is {value(made).dtype} in rows, and {value(like).dtype} in the graph")
        return made

    def scaled(self, made: Node, factor: Node, dtype: torch.dtype) -> Node:
        """Times a number of one element, in a dtype. A large result has an operator of its own,
        which may run in place: :mod:`fxpass.op.saved`."""
        if shape(factor):
            factor = self.call(A.reshape.default, factor, [])
        sizes = shape(made)
        if value(made).dtype == dtype and is_known(sizes) and numel(sizes) >= saved._LARGE:
            return self.call(torch.ops.fxpass.scaled.default, made, factor)
        found = self.call(A.mul.Tensor, made, factor)
        if value(found).dtype == dtype:
            return found
        return self.call(P.convert_element_type.default, found, dtype)

    # ------------------------------------------------------------ order

    def read_sizes_elsewhere(self, inside: set[Node]) -> None:
        """Sizes that are read of tensors of a region are those of the graph's inputs."""
        for node in list(self.graph.nodes):
            of = node.args[0] if packet(node) is A.sym_size and node.args else None
            if of in inside and node not in self.made:
                size = self.size(value(node))
                node.replace_all_uses_with(size) if isinstance(size, Node) else None

    def sort(self) -> None:
        """Moves each node behind what it reads, in the graph's order otherwise; inputs of the
        graph are written at its end.

        Raises:
            Stop: two calls would have to run before each other.
        """
        done: dict[Node, bool] = {}
        order: list[Node] = []
        for first in sorted(self.graph.nodes, key=lambda n: (n.op == "output", _writes(n))):
            stack = [(first, False)]
            while stack:
                node, ready = stack.pop()
                if ready:
                    done[node] = True
                    order.append(node)
                    continue
                if node in done:
                    continue
                done[node] = False
                stack.append((node, True))
                for source in reversed(node.all_input_nodes):
                    if done.get(source) is False:
                        raise Stop("is read by what it reads")
                    if source not in done:
                        stack.append((source, False))
        last: Node | None = None
        for node in order:
            if last is not None:
                last.append(node)
            last = node


def _writes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _with_letters(node: Node, letters: str) -> list[tuple[Any, str]]:
    return list(zip(shape(node), letters, strict=True))


def _is_view(node: Node) -> bool:
    return packet(node) in VIEWS - {A._unsafe_view}


def own_outputs(graph: Graph, before: Graph) -> None:
    """An output of forward that was no view becomes none: the program may write to it, and autograd
    sees a write to what it has saved.

    Args:
        graph: changed in place; of a joint graph, the first outputs are those of forward.
        before: the graph as it was.
    """
    outputs = [one.output_node().args[0] for one in (before, graph)]
    if isinstance(outputs[0][0] if outputs[0] else None, list | tuple):  # pyright: ignore
        outputs = [one[0] for one in outputs]  # pyright: ignore
    copies: dict[Node, Node] = {}
    for old, new in zip(*map(tree_leaves, outputs), strict=True):
        if not isinstance(new, Node) or new in copies or _is_view(old) or not _is_view(new):
            continue
        with graph.inserting_after(new):
            copies[new] = graph.call_function(A.clone.default, (new,))
        copies[new].meta = dict(new.meta)
    end = graph.output_node()
    wanted = outputs[1]
    made = map_arg(wanted, lambda node: copies.get(node, node))
    end.args = (made if wanted is end.args[0] else (made, *end.args[0][1:]),)  # pyright: ignore
