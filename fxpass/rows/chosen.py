"""Moves the selection of rows before the head: ``(x @ w)[i]`` becomes ``x[i] @ w``.

In: a graph. Out: the graph, changed in place. The product of the selected rows is another head: an
index may take a row twice, and a selected row may meet other rows. Calls that compute each row by
itself compute the selected rows. A gradient that is scattered into zeros is multiplied first, and
the product is scattered::

    index(tanh(mm(x, w)), [i, labels])    index(tanh(mm(index(x, [i]), w)), [arange(M), labels])
    split(log_softmax(mm(x, w)), N)       log_softmax(mm(index(x, [arange(2 N)[:N]]), w)), ...
    mm(index_put(0, [i], dz, True), wᵀ)   index_put(0, [i], mm(dz, wᵀ), True)
    mm(index_put(0, [i], dz, True)ᵀ, x)   mm(dzᵀ, index(x, [i]))
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxpass.rows import row_calls
from fxpass.rows.aten_calls import A, call_arguments, fill_value
from fxpass.rows.builder import GraphBuilder
from fxpass.rows.sizes import example, is_one, is_tensor_node, keys, packet, shape

# A tensor as a sum: row numbers ``[M]`` to the values ``[M, V]`` that are added at these rows; the
# key None has a term for all rows.
Terms = dict[Node | None, Node]


def choose_rows(graph: Graph, products: Iterable[Node], parts: bool) -> bool:
    """Moves calls that choose rows before the products of heads; returns True if any were moved.

    Args:
        products: of heads, ``[N, V]``.
        parts: True to move parts of rows too, beside indices of integers.
    """
    chooser = _RowChooser(graph, parts)
    chooser.row_sizes.update({node: shape(node)[:1] for node in products})
    changed = False
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in chooser.row_sizes:
            changed |= chooser.visit(node)
    if changed:
        chooser.builder.sort()
        graph.eliminate_dead_code()
    return changed


class _RowChooser:
    """Replaces nodes of a graph.

    Attributes:
        row_sizes: of the nodes that compute each row of a head by itself, the sizes of the rows.
        terms: of the nodes that are sums of terms.
    """

    def __init__(self, graph: Graph, parts: bool) -> None:
        self.builder = GraphBuilder(graph)
        self.parts = parts
        self.row_sizes: dict[Node, tuple[Any, ...]] = {}
        self.terms: dict[Node, Terms] = {}
        self._calls: dict[Any, Node] = {}
        self._chosen: dict[tuple[Node, Node], Node] = {}

    def visit(self, node: Node) -> bool:
        """Replaces a node, or records its row sizes or terms; returns True if it is replaced."""
        self.builder.trace = node.meta.get("stack_trace")
        made = self._choice_of_head(node) or self._product(node)
        if made is not None:
            node.replace_all_uses_with(made)
        elif (terms := self._put_terms(node) or self._linear_terms(node)) is not None:
            self.terms[node] = terms
        elif (sizes := self._row_sizes_of(node)) is not None:
            self.row_sizes[node] = sizes
        return made is not None

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call; equal calls are one node."""
        name = target, str(args), str(kwargs)
        if name not in self._calls:
            self._calls[name] = self.builder.call(target, *args, **kwargs)
        return self._calls[name]

    def _sizes(self, sizes: Iterable[Any]) -> list[Any]:
        return [size if size == -1 else self.builder.size(size) for size in sizes]

    def _reshape(self, node: Node, sizes: Iterable[Any]) -> Node:
        return self._call(A.reshape.default, node, self._sizes(sizes))

    def _expand(self, node: Node, sizes: Iterable[Any]) -> Node:
        return self._call(A.expand.default, node, self._sizes(sizes))

    def _full(self, sizes: Iterable[Any], like: Node, number: Any = 0) -> Node:
        options = {"dtype": example(like).dtype, "device": example(like).device}
        return self._call(A.full.default, self._sizes(sizes), number, **options)

    # ------------------------------------------------------------ which rows

    def _row_numbers(self, sizes: Sequence[Any]) -> Node:
        """The numbers of all rows, in these sizes."""
        return self._reshape(self.builder.iota(self.builder.product(sizes)), sizes)

    def _choice(self, node: Node, sizes: Sequence[Any]) -> tuple[Node, Node | None] | None:
        """The numbers ``[M]`` of the rows, among rows of these sizes, that a node takes or puts;
        and the labels ``[M]``, if the node takes or puts one class of each row."""
        rank = len(sizes)
        every = self._row_numbers(sizes)
        if packet(node) not in row_calls.INDEXED:
            part = row_calls.part_call(node)
            if not self.parts or part.dim >= rank:
                return None
            size = self.builder.size
            args = [size(a) if isinstance(a, torch.SymInt) else a for a in part.args]
            rows = self._call(part.target, every, *args)
            return self._reshape(rows, [-1]), None
        indices = row_calls.integer_indices(node)
        if indices is None or (len(indices) > rank and row_calls.are_ranges(indices, sizes)):
            return None
        rows = self._call(A.index.Tensor, every, indices[:rank])
        labels = None
        if len(indices) > rank:
            together = torch.broadcast_shapes(*map(shape, indices))
            rows = self._expand(rows, together)
            labels = self._reshape(self._expand(indices[-1], together), [-1])
        return self._reshape(rows, [-1]), labels

    def _label_indices(self, rows: Node, labels: Node) -> list[Node]:
        """The indices of one class in each of the chosen rows."""
        return [self.builder.iota(self.builder.size(shape(rows)[0])), labels]

    def _choice_of_head(self, node: Node) -> Node | None:
        """The chosen rows of a head, for a node that chooses rows."""
        base: Any = node.args[0] if node.args else None
        if packet(node) is operator.getitem and packet(base) in row_calls.SPLITS:
            base = base.args[0]
        elif packet(node) not in row_calls.CHOOSING:
            return None
        if base not in self.row_sizes or (
            packet(node) is A.slice and keys(shape(node)) == keys(shape(base))
        ):
            return None
        if (choice := self._choice(node, self.row_sizes[base])) is None:
            return None
        rows, labels = choice
        made = self._chosen_rows(base, rows)
        if labels is not None:
            made = self._call(A.index.Tensor, made, self._label_indices(rows, labels))
        made = self._reshape(made, shape(node))
        if labels is None and len(shape(node)) > 1:
            self.row_sizes[made] = shape(node)[:-1]
        return made

    # ------------------------------------------------------------ forward

    def _row_sizes_of(self, node: Node) -> tuple[Any, ...] | None:
        read = [a for a in node.all_input_nodes if a in self.row_sizes]
        if not read:
            return None
        if packet(node) in row_calls.RESHAPES:
            return shape(node)[:-1] if row_calls.keeps_classes(node) else None
        sizes = self.row_sizes[read[0]]
        return (
            sizes
            if packet(node) is operator.getitem or row_calls.is_row_wise(node, sizes)
            else None
        )

    def _chosen_rows(self, node: Node, rows: Node) -> Node:
        """Some rows ``[M, ...]`` of a node that computes each row by itself."""
        name = node, rows
        if name not in self._chosen:
            sizes = self.row_sizes[node]
            source: Any = node.args[0]
            if packet(node) in (A.mm, A.addmm):
                *bias, x, weight = node.args
                made = self._call(node.target, *bias, self._hidden(x, rows), weight)
            elif packet(node) in row_calls.RESHAPES:
                made = self._chosen_rows(source, rows)
            elif packet(node) is operator.getitem:
                made = self._call(operator.getitem, self._chosen_rows(source, rows), node.args[1])
            else:
                made = self._call_of_rows(node, lambda arg: self._operand(arg, rows, sizes))
            self.row_sizes[made] = shape(rows)
            self._chosen[name] = made
        return self._chosen[name]

    def _hidden(self, x: Any, rows: Node | None) -> Any:
        """Some rows of hidden states, which may be a choice themselves."""
        if rows is not None and x in self.builder.made and packet(x) is A.index:
            x, (before,) = x.args
            rows = self._call(A.index.Tensor, before, [rows])
        return x if rows is None else self._call(A.index.Tensor, x, [rows])

    def _call_of_rows(self, node: Node, operand: Callable[[Node], Node]) -> Node:
        """The call of a node, of operands ``[M, ...]``."""
        named = {name: map_arg(arg, operand) for name, arg in call_arguments(node).items()}
        if packet(node) in row_calls.ALONG:
            named["dim"] = [1] if isinstance(named["dim"], list | tuple) else 1
        elif packet(node) is A.expand:
            named["size"] = [-1, self.builder.size(shape(node)[-1])]
        named.pop("memory_format", None)
        schema = node.target._schema.arguments  # pyright: ignore
        args = [named[a.name] for a in schema if not a.kwarg_only]
        kwargs = {a.name: named[a.name] for a in schema if a.kwarg_only and a.name in named}
        return self._call(node.target, *args, **kwargs)

    def _operand(self, node: Node, rows: Node, sizes: Sequence[Any]) -> Node:
        """Some rows of an operand that is broadcast to rows of these sizes and classes."""
        if not is_tensor_node(node):
            return node
        own = shape(node)
        if not own or all(map(is_one, own[:-1])):
            return self._reshape(node, own[-1:]) if len(own) > 1 else node
        if (number := fill_value(node)) is not None:
            return self._full([shape(rows)[0], own[-1]], node, number)
        if keys(own[:-1]) != keys(sizes):
            node = self._expand(node, [*sizes, own[-1]])
        elif node in self.row_sizes or row_calls.is_row_wise(node, sizes):
            self.row_sizes.setdefault(node, tuple(sizes))
            return self._chosen_rows(node, rows)
        if len(sizes) > 1:
            node = self._reshape(node, [-1, own[-1]])
        return self._call(A.index.Tensor, node, [rows])

    # ------------------------------------------------------------ backward

    def _put_terms(self, node: Node) -> Terms | None:
        """The terms of a call that puts rows into zeros, or joins parts of rows."""
        if packet(node) not in (*row_calls.PUTTING, A.cat) or len(shape(node)) < 2:
            return None
        *sizes, classes = shape(node)
        if packet(node) is A.cat:
            return self._cat_terms(node, sizes) if self.parts else None
        named = call_arguments(node)
        source: Any = named.get("values", named.get("source", named.get("src")))
        adds = named.get("accumulate", True) and named.get("alpha", 1) == 1
        zeros = fill_value(named["self"]) == 0
        if not (zeros and adds) or (choice := self._choice(node, sizes)) is None:
            return None
        rows, labels = choice
        if labels is not None:
            together = torch.broadcast_shapes(*map(shape, named["indices"]))
            values = self._reshape(self._expand(source, together), [-1])
            base = self._full([shape(rows)[0], classes], source)
            indices = self._label_indices(rows, labels)
            return {rows: self._call(A.index_put.default, base, indices, values, True)}
        if example(rows).numel() * classes != example(source).numel():
            return None
        terms = Terms()
        for some, term in self.terms.get(source, {None: source}).items():
            numbers = rows if some is None else self._call(A.index.Tensor, rows, [some])
            terms[numbers] = self._reshape(term, [-1, classes])
        return terms

    def _cat_terms(self, node: Node, sizes: Sequence[Any]) -> Terms | None:
        tensors: Any = node.args[0]
        dim = call_arguments(node)["dim"] % len(shape(node))
        if dim == len(sizes) or any(len(shape(t)) <= len(sizes) for t in tensors):
            return None
        start = 0
        terms = Terms()
        every = self._row_numbers(sizes)
        for tensor in tensors:
            end = start + shape(tensor)[dim]
            rows = self._call(A.slice.Tensor, every, dim, *map(self.builder.size, (start, end)))
            if fill_value(tensor) != 0:
                terms[self._reshape(rows, [-1])] = self._reshape(tensor, [-1, shape(node)[-1]])
            start = end
        return terms

    def _linear_terms(self, node: Node) -> Terms | None:
        """The terms of a call that is linear in operands with terms."""
        read = [a for a in node.all_input_nodes if a in self.terms]
        if read and packet(node) in row_calls.RESHAPES:
            if not row_calls.keeps_classes(node):
                return None
            items = self.terms[read[0]].items()
            return {rows: d if rows else self._reshape(d, shape(node)) for rows, d in items}
        linear = row_calls.linear_arguments(node, read)
        sizes = shape(node)[:-1] if linear else ()
        if not linear or not row_calls.is_row_wise(node, sizes):
            return None
        every = {rows for a in read for rows in self.terms[a]}
        if any(a not in self.terms and not row_calls.is_zero(a) for a in linear):
            every.add(None)
        return {rows: self._term(node, rows, sizes, linear) for rows in every}

    def _term(self, node: Node, rows: Node | None, sizes: Any, linear: list[Any]) -> Node:
        """The term of a linear call for some rows; an operand without a term there is zero."""

        def operand(arg: Node) -> Node:
            if is_tensor_node(arg) and arg in linear and shape(arg):
                terms = self.terms.get(arg, {None: arg})
                lead = sizes if rows is None else shape(rows)
                return terms[rows] if rows in terms else self._full([*lead, shape(arg)[-1]], arg)
            return arg if rows is None else self._operand(arg, rows, sizes)

        if rows is not None:
            return self._call_of_rows(node, operand)
        args, kwargs = map_arg((node.args, node.kwargs), operand)
        return self._call(node.target, *args, **kwargs)

    def _product(self, node: Node) -> Node | None:
        """A product of terms, or their sum over rows: it has no rows, or no classes."""
        made: list[Node] = []
        if packet(node) is A.mm:
            made = self._products_of_terms(node)
        elif node.target is A.sum.dim_IntList and node.args[0] in self.terms:
            made = self._sums_of_terms(node)
        add = functools.partial(self._call, A.add.Tensor)
        return functools.reduce(add, made) if made else None

    def _products_of_terms(self, node: Node) -> list[Node]:
        a: Any = node.args[0]
        b: Any = node.args[1]
        mm = functools.partial(self._call, A.mm.default)
        turned = lambda t: self._call(A.permute.default, t, [1, 0])  # noqa: E731
        made = []
        if a in self.terms:
            for rows, d in self.terms[a].items():
                product = mm(d, b)
                if rows is not None:
                    zeros = self._full(shape(node), node)
                    product = self._call(A.index_put.default, zeros, [rows], product, True)
                made.append(product)
            return made
        source = a.args[0] if packet(a) is A.permute else None
        if source in self.terms:
            return [mm(turned(d), self._hidden(b, rows)) for rows, d in self.terms[source].items()]
        if source is not None and b in self.terms:
            return [mm(turned(self._hidden(source, rows)), d) for rows, d in self.terms[b].items()]
        return []

    def _sums_of_terms(self, node: Node) -> list[Node]:
        source: Any = node.args[0]
        dims: Any = node.args[1]
        rank = len(shape(source))
        if sorted(d % rank for d in dims) != list(range(rank - 1)):
            return []
        sums = [
            self._call(A.sum.dim_IntList, d, dims if rows is None else [0], **node.kwargs)
            for rows, d in self.terms[source].items()
        ]
        return [self._reshape(total, shape(node)) for total in sums]
