"""Rows that an index of integers chooses are chosen of the hidden states.

In: a graph. Out: the graph, changed in place. An index may take a row twice, and what takes few
rows need not multiply all::

    index(view(mm(x, w), [B, T, V]), [i, j])         mm(index(view(x, [B, T, D]), [i, j]), w)
    mm(index_put(zeros, [i, j], dz, True), wᵀ)       index_put(zeros, [i, j], mm(dz, wᵀ), True)
    mm(index_put(zeros, [i, j], dz, True)ᵀ, x)       mm(dzᵀ, index(x, [i, j]))
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from fxpass.rows.outer import Outer
from fxpass.rows.rules import A
from fxpass.rows.sizes import packet, same, shape, value

_CHOOSE = (A.index, A.index_select)
_ADD = (A.index_put, A.index_add)
_VIEWS = (A.view, A._unsafe_view, A.reshape)


def choose_rows(graph: Graph) -> None:
    """Moves indices of rows before the products of heads."""
    found = [n for n in graph.nodes if packet(n) in (*_CHOOSE, *_ADD)]
    if not found:
        return
    outer = Outer(graph)
    for node in found:
        if packet(node) in _ADD:
            _put(outer, node)
        else:
            _chosen(outer, node)
    if outer.made:
        outer.sort()
        graph.eliminate_dead_code()


def _integers(node: Node) -> list[Any] | None:
    """The indices of all dimensions but the last, which is not indexed; None if it is."""
    rank = len(shape(node.args[0]))  # pyright: ignore[reportArgumentType]
    given: Any = node.args[1]
    if packet(node) in (A.index_select, A.index_add):
        given = [None] * (given % max(rank, 1)) + [node.args[2]]
    used = [i for i in given if i is not None]
    if len(given) >= rank or any(value(i).dtype not in (torch.int64, torch.int32) for i in used):
        return None
    return list(given)


def _chosen(outer: Outer, node: Node) -> None:
    """Of logits that nothing else reads."""
    base: Any = node.args[0]
    indices = _integers(node)
    if indices is None or len(shape(base)) < 2:
        return
    product, classes = base, shape(base)[-1]
    while packet(product) in _VIEWS and _is_read_once(product):
        product = product.args[0]
        if len(shape(product)) < 2 or not same(shape(product)[-1], classes):
            return
    if packet(product) not in (A.mm, A.addmm) or product.kwargs or not _is_read_once(product):
        return
    *bias, x, weight = product.args
    rows = _rows(outer, x, shape(base)[:-1], indices)
    made = outer.call(product.target, *bias, rows, weight)
    sizes = [outer.size(size) for size in shape(node)]
    node.replace_all_uses_with(outer.call(A.reshape.default, made, sizes))


def _is_read_once(node: Node) -> bool:
    return len(node.users) == 1


def _rows(outer: Outer, x: Node, sizes: Any, indices: Any) -> Node:
    """The chosen rows of hidden states ``[N, D]``."""
    hidden = outer.size(shape(x)[-1])
    whole = outer.call(A.reshape.default, x, [*map(outer.size, sizes), hidden])
    chosen = outer.call(A.index.Tensor, whole, indices)
    return outer.call(A.reshape.default, chosen, [-1, hidden])


def _put(outer: Outer, node: Node) -> None:
    """The gradient of logits that an index chose, whose products are those of the chosen rows."""
    base: Any = node.args[0]
    source: Any = node.args[3 if packet(node) is A.index_add else 2]
    adds = packet(node) is A.index_add or node.args[3:] == (True,)
    zero = packet(base) is A.full and base.args[1] == 0
    indices = _integers(node)
    if not zero or indices is None or not adds or node.kwargs:
        return
    whole = node
    while _is_read_once(whole) and packet(next(iter(whole.users))) in _VIEWS:
        whole = next(iter(whole.users))
    classes, sizes = shape(node)[-1], shape(node)[:-1]
    if len(shape(whole)) != 2 or not same(shape(whole)[-1], classes):
        return
    rows = outer.call(A.reshape.default, source, [-1, outer.size(classes)])
    for user in list(whole.users):
        if packet(user) is A.mm and user.args[0] is whole:
            product = outer.call(A.mm.default, rows, user.args[1])
            columns = outer.size(shape(user)[-1])
            taken = [outer.size(s) for s in shape(source)[:-1]]
            product = outer.call(A.reshape.default, product, [*taken, columns])
            options = {"dtype": value(user).dtype, "device": value(user).device}
            every = outer.call(A.zeros.default, [*map(outer.size, sizes), columns], **options)
            made = outer.call(A.index_put.default, every, indices, product, True)
            made = outer.call(A.reshape.default, made, [-1, columns])
            user.replace_all_uses_with(made)
        elif user.target is A.permute.default and list(user.args[1]) == [1, 0]:  # pyright: ignore
            turned = outer.call(A.permute.default, rows, [1, 0])
            for last in list(user.users):
                if packet(last) is A.mm and last.args[0] is user:
                    x: Any = last.args[1]
                    made = outer.call(A.mm.default, turned, _rows(outer, x, sizes, indices))
                    last.replace_all_uses_with(made)
