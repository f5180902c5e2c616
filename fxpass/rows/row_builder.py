"""Adds nodes around the calls of ``fxpass::rows``.

In: a graph. Out: nodes that move operands to the rows of a head, and results back::

    rows of the view        arange(N).view(B, T)[:, :-1]
    operand, canonical      new_zeros(N, ...).index_put([rows of the view], operand)
    result                  canonical[rows of the view]
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import CallMethodKey
from torch.utils._pytree import SequenceKey

from fxpass import messages
from fxpass.op import saved
from fxpass.rows.aten_calls import A, P
from fxpass.rows.builder import GraphBuilder
from fxpass.rows.sizes import all_backed, example, numel, same_size, shape
from fxpass.rows.tags import Stop, Tag, View


class RowBuilder(GraphBuilder):
    """Adds nodes that move operands and results between views of a head's rows.

    Parameters of its methods: ``letters`` of the source's dimensions; ``places``, for each
    dimension of the view, the source's dimension of these rows, None if the source has none.
    """

    def __init__(self, graph: Graph, inside: Collection[Node] = ()) -> None:
        super().__init__(graph, inside)
        self._rows: dict[View, Node] = {}
        self._row_masks: dict[View, Node] = {}
        self._operands: dict[Any, Node] = {}

    def rows(self, view: View) -> Node:
        """The indices of the head's rows that are in a view, in the view's sizes."""
        if view in self._rows:
            return self._rows[view]
        if not view.steps:
            made = self.iota(self.size(view.root))
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
                made = self._masked_rows(before, args[0], args[1], after)
            else:
                dim, start, stop, step = args
                ends = self.size(start), self.size(stop)
                made = self.call(A.slice.Tensor, before, dim, *ends, step)
        self._rows[view] = made
        return made

    def _masked_rows(self, before: Node, dim: int, mask: Node, after: Sequence[Any]) -> Node:
        """The rows that a mask selects; the node binds their number, if no other node does."""
        with self.graph.inserting_before(self.end):
            args = before, [*[None] * dim, mask]
            made = self.graph.call_function(A.index.Tensor, args)
        self.made.add(made)
        size = after[dim]
        sizes = list(shape(before))
        sizes[dim : dim + len(shape(mask))] = [self._symints[size]]
        made.meta["val"] = example(before).new_empty(sizes)
        if not isinstance(size, int) and size not in self._sources:  # its source is in a region
            made.meta["unbacked_bindings"] = {size: (CallMethodKey("size"), SequenceKey(dim))}
            self._sources[size] = made, dim
        return made

    def flat_rows(self, view: View) -> Node:
        """:meth:`rows` in one dimension."""
        made = self.rows(view)
        return made if len(shape(made)) == 1 else self.call(A.reshape.default, made, [-1])

    def row_mask(self, view: View) -> Node:
        """A mask ``[N]`` of the head's rows that are in a view."""
        if view not in self._row_masks:
            none = self.full([self.size(view.root)], False, torch.bool)
            true = self.full([], True, torch.bool)
            rows = self.flat_rows(view)
            self._row_masks[view] = self.call(A.index_put.default, none, [rows], true)
        return self._row_masks[view]

    def canonical(
        self, source: Node, letters: str, places: Sequence[int | None], view: View
    ) -> Node:
        """An operand in the head's rows ``[N, ...]``; 0 in rows that are not in the view."""
        key = source, letters, places, view
        if key not in self._operands:
            self._operands[key] = self._canonical(source, letters, places, view)
        return self._operands[key]

    def _canonical(
        self, source: Node, letters: str, places: Sequence[int | None], view: View
    ) -> Node:
        indices = None if view.in_order else self.flat_rows(view)
        inner = self._inner_sizes(source, letters)
        made = self._rows_first(source, letters, places)
        for i, p in enumerate(places):
            if p is None:
                made = self.call(A.unsqueeze.default, made, i)
        rows = shape(made)[: len(places)]
        if not all(map(same_size, rows, self._sizes_of(view))):
            made = self.call(A.expand.default, made, [*map(self.size, view.shape), *inner])
        if view.steps:
            made = self.call(A.reshape.default, made, [-1, *inner])
        if indices is None:
            return made
        zeros = self.full([self.size(view.root), *inner], 0, example(made).dtype)
        return self.call(A.index_put.default, zeros, [indices], made)

    def _inner_sizes(self, source: Node, letters: str) -> list[Any]:
        pairs = zip(shape(source), letters, strict=True)
        return [self.size(size) for size, letter in pairs if letter != "r"]

    def _sizes_of(self, view: View) -> list[Any]:
        return [self._symints.get(size, size) for size in view.shape]

    def _rows_first(self, source: Node, letters: str, places: Sequence[int | None]) -> Node:
        own = [p for p in places if p is not None]
        order = [*own, *(i for i, letter in enumerate(letters) if letter != "r")]
        if len(order) < len(letters):
            raise Stop(messages.OPERAND_ROWS)
        whole = order == list(range(len(order)))
        return source if whole else self.call(A.permute.default, source, order)

    def entries(self, source: Node, letters: str, places: Sequence[int | None]) -> Node:
        """An operand, with its own rows in one dimension."""
        made = self._rows_first(source, letters, places)
        return self.call(A.reshape.default, made, [-1, *self._inner_sizes(source, letters)])

    def entry_indices(self, source: Node, places: Sequence[int | None], view: View) -> Node:
        """For each of the head's rows, the index of its row in :meth:`entries`; 0 for rows that are
        not in the view."""
        rows = None if view.in_order else self.flat_rows(view)
        own = [shape(source)[p] for p in places if p is not None]
        sizes = [1 if p is None else self.size(shape(source)[p]) for p in places]
        made = self.call(A.reshape.default, self.iota(self.product(own)), sizes)
        if not all(map(same_size, shape(made), self._sizes_of(view))):
            made = self.call(A.expand.default, made, list(map(self.size, view.shape)))
        made = self.call(A.reshape.default, made, [-1])
        if rows is None:
            return made
        first = self.full([self.size(view.root)], 0, torch.int64)
        return self.call(A.index_put.default, first, [rows], made)

    def gathered(self, made: Node, tag: Tag, like: Node) -> Node:
        """A result in the head's rows, moved to the view and the dimensions of a node."""
        view = tag.view
        inner = [self.size(s) for s in shape(made)[1:]]
        if not view.in_order:
            made = self.call(A.index.Tensor, made, [self.flat_rows(view)])
        if len(view.shape) != 1 or (view.in_order and view.steps):
            made = self.call(A.reshape.default, made, [*map(self.size, view.shape), *inner])
        rows = iter(range(len(view.shape)))
        rest = itertools.count(len(view.shape))
        order = [next(rows) if letter == "r" else next(rest) for letter in tag.letters]
        if order != list(range(len(order))):
            made = self.call(A.permute.default, made, order)
        if example(made).dtype != example(like).dtype:
            raise Stop(
                messages.OTHER_DTYPE.format(made=example(made).dtype, wanted=example(like).dtype)
            )
        return made

    def scaled(self, made: Node, factor: Node, dtype: torch.dtype) -> Node:
        """A result times a factor of one element, in a dtype. A large result has an operator of
        its own, which may run in place: :mod:`fxpass.op.saved`."""
        if shape(factor):
            factor = self.call(A.reshape.default, factor, [])
        sizes = shape(made)
        if example(made).dtype == dtype and all_backed(sizes) and numel(sizes) >= saved._LARGE:
            return self.call(torch.ops.fxpass.scaled.default, made, factor)
        found = self.call(A.mul.Tensor, made, factor)
        if example(found).dtype == dtype:
            return found
        return self.call(P.convert_element_type.default, found, dtype)
