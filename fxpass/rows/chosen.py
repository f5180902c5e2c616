"""Rows that are chosen of logits are chosen of the hidden states.

In: a graph. Out: the graph, changed in place. A product of the chosen rows is another head: an
index may take a row twice, and a chosen row may meet other rows. Calls that compute each row by
itself compute the chosen ones; a gradient that is put into zeros is multiplied before::

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

from fxpass.rows.indexing import is_range
from fxpass.rows.outer import Outer
from fxpass.rows.rules import A, P, bound, fill
from fxpass.rows.sizes import is_one, is_tensor, keys, packet, same, shape, value

_VIEWS = (A.view, A._unsafe_view, A.reshape)
_INDEX = (A.index, A.index_select)
_INDEX_PUT = (A.index_put, A.index_add)
_PART = (A.slice, A.select, A.flip, P.rev)
_PART_PUT = (A.slice_scatter, A.select_scatter)
_SPLITS = (A.split, A.split_with_sizes, A.unbind)
# Each element by itself, beside what torch tags so; and along one dimension.
_EACH = (A.expand, A.where, A.clone, A.alias, A.detach, A._to_copy, P.convert_element_type, P.fma)
_ALONG = (A.sum, A.mean, A.amax, A.amin, A.logsumexp, A._softmax, A._log_softmax, A.sort, A.cumsum)
_ALONG += (A.gather, A.scatter, A.scatter_add, A.slice, A.slice_scatter, A.topk)
# The arguments in which a call is linear, all at once; of products, one of the first two.
_LINEAR = {A.add: (0, 1), A.sub: (0, 1), A.where: (1, 2), A.mul: (), P.fma: (2,), A.div: (0,)}
_LINEAR |= {A.scatter: (0, 3), A.scatter_add: (0, 3), A.slice_scatter: (0, 1), A.sum: (0,)}
_LINEAR |= dict.fromkeys((A.neg, A.clone, A.alias, A._to_copy, P.convert_element_type), (0,))
_LINEAR |= dict.fromkeys((A.gather, A.slice, A.expand), (0,))

Terms = dict[Node | None, Node]  # what is put into rows, by their numbers ``[M]``; None: all rows


def choose_rows(graph: Graph, products: Iterable[Node], parts: bool) -> bool:
    """Moves what chooses rows before the products of heads; says whether there was any.

    Args:
        products: of heads, ``[N, V]``.
        parts: whether parts of rows are chosen so too, beside rows by an index of integers.
    """
    chosen = _Chosen(graph, parts)
    chosen.layouts.update({node: shape(node)[:1] for node in products})
    found = False
    for node in list(graph.nodes):
        if node.op == "call_function" and node not in chosen.layouts:
            found |= chosen.visit(node)
    if found:
        chosen.outer.sort()
        graph.eliminate_dead_code()
    return found


class _Chosen:
    def __init__(self, graph: Graph, parts: bool) -> None:
        self.outer = Outer(graph)
        self.parts = parts
        # the sizes of the rows of what is computed of each row of a head by itself
        self.layouts: dict[Node, tuple[Any, ...]] = {}
        self.terms: dict[Node, Terms] = {}
        self._known: dict[Any, Node] = {}

    def visit(self, node: Node) -> bool:
        """Replaces a node, or notes what it is; says whether it is replaced."""
        self.outer.trace = node.meta.get("stack_trace")
        made = self._taken(node) or self._multiplied(node)
        if made is not None:
            node.replace_all_uses_with(made)
        elif (terms := self._put(node) or self._summed(node)) is not None:
            self.terms[node] = terms
        elif (sizes := self._layout(node)) is not None:
            self.layouts[node] = sizes
        return made is not None

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call, once."""
        name = target, str(args), str(kwargs)
        if name not in self._known:
            self._known[name] = self.outer.call(target, *args, **kwargs)
        return self._known[name]

    def _sizes(self, sizes: Iterable[Any]) -> list[Any]:
        return [size if size == -1 else self.outer.size(size) for size in sizes]

    def _shaped(self, node: Node, sizes: Iterable[Any]) -> Node:
        return self._call(A.reshape.default, node, self._sizes(sizes))

    def _zeros(self, sizes: Iterable[Any], like: Node, number: Any = 0) -> Node:
        options = {"dtype": value(like).dtype, "device": value(like).device}
        return self._call(A.full.default, self._sizes(sizes), number, **options)

    # ------------------------------------------------------------ which rows

    def _rows(self, node: Node, sizes: Sequence[Any]) -> tuple[Node, Node | None] | None:
        """The numbers ``[M]`` of the rows of these sizes that a node takes or puts, and the class
        of each if it takes or puts one."""
        what = packet(node)
        labels = None
        rank = len(sizes)
        size = self.outer.size
        every = self._shaped(self.outer.numbers(self.outer.product(sizes)), sizes)
        if what in (*_INDEX, *_INDEX_PUT):
            indices = _integers(node)
            if indices is None or (len(indices) > rank and _picks(indices, sizes)):
                return None
            rows = self._call(A.index.Tensor, every, indices[:rank])
            if len(indices) > rank:
                wide = self._sizes(torch.broadcast_shapes(*map(shape, indices)))
                rows = self._call(A.expand.default, rows, wide)
                labels = self._shaped(self._call(A.expand.default, indices[-1], wide), [-1])
        else:
            dim, target, args = _part(node)
            if not self.parts or dim >= rank:
                return None
            rows = self._call(
                target, every, *(size(a) if isinstance(a, torch.SymInt) else a for a in args)
            )
        return self._shaped(rows, [-1]), labels

    def _at(self, rows: Node, labels: Node) -> list[Node]:
        return [self.outer.numbers(self.outer.size(shape(rows)[0])), labels]

    def _taken(self, node: Node) -> Node | None:
        """The chosen rows of a head."""
        base: Any = node.args[0] if node.args else None
        if packet(node) is operator.getitem and packet(base) in _SPLITS:
            base = base.args[0]
        elif packet(node) not in (*_INDEX, *_PART):
            return None
        if base not in self.layouts or (
            packet(node) is A.slice and keys(shape(node)) == keys(shape(base))
        ):
            return None
        if (found := self._rows(node, self.layouts[base])) is None:
            return None
        rows, labels = found
        made = self._of(base, rows)
        if labels is not None:
            made = self._call(A.index.Tensor, made, self._at(rows, labels))
        made = self._shaped(made, shape(node))
        if labels is None and len(shape(node)) > 1:
            self.layouts[made] = shape(node)[:-1]
        return made

    # ------------------------------------------------------------ forward

    def _layout(self, node: Node) -> tuple[Any, ...] | None:
        read = [a for a in node.all_input_nodes if a in self.layouts]
        if not read:
            return None
        if packet(node) in _VIEWS:
            return shape(node)[:-1] if _keeps_classes(node) else None
        sizes = self.layouts[read[0]]
        return sizes if packet(node) is operator.getitem or _is_row_wise(node, sizes) else None

    def _of(self, node: Node, rows: Node) -> Node:
        """Some rows ``[M, ...]`` of what is computed of each row by itself."""
        name = "rows", node, rows
        if name not in self._known:
            sizes = self.layouts[node]
            source = node.args[0]
            if packet(node) in (A.mm, A.addmm):
                *bias, x, weight = node.args
                made = self._call(node.target, *bias, self._hidden(x, rows), weight)
            elif packet(node) in _VIEWS:
                made = self._of(source, rows)  # pyright: ignore[reportArgumentType]
            elif packet(node) is operator.getitem:
                made = self._call(operator.getitem, self._of(source, rows), node.args[1])  # pyright: ignore
            else:
                made = self._same(node, lambda arg: self._operand(arg, rows, sizes))
            self.layouts[made] = shape(rows)
            self._known[name] = made
        return self._known[name]

    def _hidden(self, x: Any, rows: Node | None) -> Any:
        """Some rows of hidden states, of which some may have been chosen before."""
        if rows is not None and x in self.outer.made and packet(x) is A.index:
            x, (chosen,) = x.args
            rows = self._call(A.index.Tensor, chosen, [rows])
        return x if rows is None else self._call(A.index.Tensor, x, [rows])

    def _same(self, node: Node, of: Callable[[Node], Node]) -> Node:
        """The same call of tensors ``[M, ...]``."""
        found = bound(node)
        found = {k: map_arg(v, lambda n: of(n) if is_tensor(n) else n) for k, v in found.items()}
        if packet(node) in _ALONG:
            found["dim"] = [1] if isinstance(found["dim"], list | tuple) else 1
        elif packet(node) is A.expand:
            found["size"] = [-1, self.outer.size(shape(node)[-1])]
        found.pop("memory_format", None)
        schema = node.target._schema.arguments  # pyright: ignore
        args = [found[a.name] for a in schema if not a.kwarg_only]
        named = {a.name: found[a.name] for a in schema if a.kwarg_only and a.name in found}
        return self._call(node.target, *args, **named)

    def _operand(self, node: Node, rows: Node, sizes: Sequence[Any]) -> Node:
        """Some rows of an operand that is broadcast to rows of these sizes and classes."""
        own = shape(node)
        if not own or all(map(is_one, own[:-1])):
            return self._shaped(node, own[-1:]) if len(own) > 1 else node
        if (number := fill(node)) is not None:
            return self._zeros([shape(rows)[0], own[-1]], node, number)
        if keys(own[:-1]) != keys(sizes):
            node = self._call(A.expand.default, node, self._sizes([*sizes, own[-1]]))
        elif node in self.layouts or _is_row_wise(node, sizes):
            self.layouts.setdefault(node, tuple(sizes))
            return self._of(node, rows)
        if len(sizes) > 1:
            node = self._shaped(node, [-1, own[-1]])
        return self._call(A.index.Tensor, node, [rows])

    # ------------------------------------------------------------ backward

    def _put(self, node: Node) -> Terms | None:
        """Tensors that are put into rows of zeros, or made of parts of rows."""
        if packet(node) not in (*_INDEX_PUT, *_PART_PUT, A.cat) or len(shape(node)) < 2:
            return None
        *sizes, classes = shape(node)
        if packet(node) is A.cat:
            return self._joined(node, sizes) if self.parts else None
        named = bound(node)
        source: Any = named.get("values", named.get("source", named.get("src")))
        adds = named.get("accumulate", True) and named.get("alpha", 1) == 1
        if fill(named["self"]) != 0 or not adds or (found := self._rows(node, sizes)) is None:
            return None
        rows, labels = found
        if labels is not None:
            wide = self._sizes(torch.broadcast_shapes(*map(shape, named["indices"])))
            values = self._shaped(self._call(A.expand.default, source, wide), [-1])
            zeros = self._zeros([shape(rows)[0], classes], source)
            args = self._at(rows, labels), values, True
            return {rows: self._call(A.index_put.default, zeros, *args)}
        if value(rows).numel() * classes != value(source).numel():
            return None
        terms = self.terms.get(source, {None: source}).items()
        return {
            self._call(A.index.Tensor, rows, [some]) if some else rows: self._shaped(
                d, [-1, classes]
            )
            for some, d in terms
        }

    def _joined(self, node: Node, sizes: Sequence[Any]) -> Terms | None:
        tensors: Any = node.args[0]
        dim = bound(node)["dim"] % len(shape(node))
        start = 0
        terms = Terms()
        if dim == len(sizes) or any(len(shape(t)) <= len(sizes) for t in tensors):
            return None
        every = self._shaped(self.outer.numbers(self.outer.product(sizes)), sizes)
        for tensor in tensors:
            end = start + shape(tensor)[dim]
            rows = self._call(A.slice.Tensor, every, dim, *map(self.outer.size, (start, end)))
            if fill(tensor) != 0:
                terms[self._shaped(rows, [-1])] = self._shaped(tensor, [-1, shape(node)[-1]])
            start = end
        return terms

    def _summed(self, node: Node) -> Terms | None:
        """The terms of a call that is linear in terms."""
        read = [a for a in node.all_input_nodes if a in self.terms]
        if not read or packet(node) not in (*_LINEAR, *_VIEWS):
            return None
        if packet(node) in _VIEWS:
            items = self.terms[read[0]].items()
            sizes = shape(node)
            made = {rows: d if rows else self._shaped(d, sizes) for rows, d in items}
            return made if _keeps_classes(node) else None
        args: Any = node.args
        linear = [args[i] for i in _LINEAR[packet(node)] if i < len(args)]
        if packet(node) in (A.mul, P.fma):
            factors = [a for a in args[:2] if a in self.terms]
            if len(factors) != 1:
                return None
            linear += factors
        sizes = shape(node)[:-1]
        if not set(read) <= set(linear) or not _is_row_wise(node, sizes):
            return None
        every = {rows for a in read for rows in self.terms[a]}
        if any(a not in self.terms and not _is_zero(a) for a in linear):
            every.add(None)
        return {rows: self._term(node, rows, sizes, linear) for rows in every}

    def _term(self, node: Node, rows: Node | None, sizes: Any, linear: list[Any]) -> Node:
        def of(arg: Node) -> Node:
            if arg in linear and shape(arg):
                terms = self.terms.get(arg, {None: arg})
                lead = sizes if rows is None else shape(rows)
                return terms[rows] if rows in terms else self._zeros([*lead, shape(arg)[-1]], arg)
            return arg if rows is None else self._operand(arg, rows, sizes)

        if rows is not None:
            return self._same(node, of)
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: of(n) if is_tensor(n) else n)
        return self._call(node.target, *args, **kwargs)

    def _multiplied(self, node: Node) -> Node | None:
        """A product of terms, or their sum over rows: it has no rows, or no classes."""
        a, b = (*node.args, None, None)[:2]
        turned: Any = a.args[0] if isinstance(a, Node) and packet(a) is A.permute else None
        made: list[Node] = []
        turn = lambda t: self._call(A.permute.default, t, [1, 0])  # noqa: E731
        if packet(node) is A.mm and a in self.terms:
            for rows, d in self.terms[a].items():  # pyright: ignore[reportArgumentType]
                product = self._call(A.mm.default, d, b)
                if rows is not None:
                    zeros = self._zeros(shape(node), node)
                    product = self._call(A.index_put.default, zeros, [rows], product, True)
                made.append(product)
        elif packet(node) is A.mm and turned in self.terms:
            terms = self.terms[turned].items()
            made += [self._call(A.mm.default, turn(d), self._hidden(b, rows)) for rows, d in terms]
        elif packet(node) is A.mm and b in self.terms and turned is not None:
            terms = self.terms[b].items()  # pyright: ignore[reportArgumentType]
            made += [
                self._call(A.mm.default, turn(self._hidden(turned, rows)), d) for rows, d in terms
            ]
        elif node.target is A.sum.dim_IntList and a in self.terms:
            rank: int = len(shape(a))  # pyright: ignore[reportArgumentType]
            if sorted(d % rank for d in b) != list(range(rank - 1)):  # pyright: ignore
                return None
            for rows, d in self.terms[a].items():  # pyright: ignore[reportArgumentType]
                total = self._call(A.sum.dim_IntList, d, b if rows is None else [0], **node.kwargs)
                made.append(self._shaped(total, shape(node)))
        add = functools.partial(self._call, A.add.Tensor)
        return functools.reduce(add, made) if made else None


def _integers(node: Node) -> list[Any] | None:
    """The indices of the first dimensions, or of all; None if there are others, such as masks."""
    given: Any = node.args[1]
    if packet(node) in (A.index_select, A.index_add):
        given = [None] * (given % max(len(shape(node)), 1)) + [node.args[2]]
    used = [i for i in given if i is not None]
    rank = len(shape(node.args[0]))  # pyright: ignore[reportArgumentType]
    numbers = all(value(i).dtype in (torch.int64, torch.int32) for i in used)
    return list(given) if numbers and (len(given) < rank or len(used) == rank) else None


def _picks(indices: Sequence[Any], sizes: Sequence[Any]) -> bool:
    """Whether indices take one class of each row."""
    pairs = enumerate(zip(indices, sizes, strict=False))
    return all(is_range(index, size, len(sizes) - i) for i, (index, size) in pairs)


def _part(node: Node) -> tuple[int, Any, tuple[Any, ...]]:
    """The dimension of which a node takes a part or puts one, and the call that takes it."""
    if packet(node) is operator.getitem:
        split, i = node.args
        named = bound(split)  # pyright: ignore[reportArgumentType]
        dim = named["dim"] % len(shape(named["self"]))
        if packet(split) is A.unbind:  # pyright: ignore[reportArgumentType]
            return dim, A.select.int, (dim, i)
        sizes = [part.shape[dim] for part in value(split)]  # pyright: ignore[reportArgumentType]
        return dim, A.slice.Tensor, (dim, sum(sizes[:i]), sum(sizes[: i + 1]))  # pyright: ignore
    named = bound(node)
    rank = len(shape(named.get("self", node)))
    if packet(node) in (A.flip, P.rev):
        dims = [d % rank for d in named["dims"]]
        return max(dims), A.flip.default, (dims,)
    dim = named["dim"] % rank
    if packet(node) in (A.select, A.select_scatter):
        return dim, A.select.int, (dim, named["index"])
    return dim, A.slice.Tensor, (dim, named["start"], named["end"], named["step"])


def _keeps_classes(view: Node) -> bool:
    before = shape(view.args[0])  # pyright: ignore[reportArgumentType]
    after = shape(view)
    return len(after) > 1 and len(before) > 1 and same(before[-1], after[-1])


def _is_row_wise(node: Node, sizes: Sequence[Any]) -> bool:
    """Whether a call computes each row of these sizes by itself, and keeps its last dimension."""
    found = value(node) if isinstance(value(node), list | tuple) else [value(node)]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    whole = lambda t: t.dim() == len(sizes) + 1 and keys(t.shape[:-1]) == keys(sizes)  # noqa: E731
    if not all(isinstance(t, torch.Tensor) and whole(t) for t in found):
        return False
    if packet(node) in _EACH or torch.Tag.pointwise in node.target.tags:
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    if packet(node) not in _ALONG or not all(
        map(whole, map(value, filter(is_tensor, node.all_input_nodes)))
    ):
        return False
    dims = bound(node)["dim"]
    return [d % (len(sizes) + 1) for d in (dims if isinstance(dims, list | tuple) else [dims])] == [
        len(sizes)
    ]


def _is_zero(arg: Any) -> bool:
    if not isinstance(arg, Node):
        return bool(arg == 0)
    return bool(fill(arg) == 0 or (packet(arg) is A.scalar_tensor and arg.args[0] == 0))
