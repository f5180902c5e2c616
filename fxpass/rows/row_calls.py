"""Calls that choose rows or put rows, and calls that compute each row by itself.

In: a node of a functional ATen graph. Out: facts that its arguments tell::

    integer_indices(index(z, [i, None]))     [i, None]
    part_call(select_scatter(z, d, 0, 2))    PartCall(0, aten.select.int, (0, 2))
    is_row_wise(tanh(z), shape(z)[:-1])      True
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from fxpass.rows.aten_calls import A, P, call_arguments, fill_value
from fxpass.rows.indexing import is_range
from fxpass.rows.sizes import example, is_tensor_node, keys, packet, same_size, shape

RESHAPES = (A.view, A._unsafe_view, A.reshape)
INDEXED = (A.index, A.index_select, A.index_put, A.index_add)
CHOOSING = (A.index, A.index_select, A.slice, A.select, A.flip, P.rev)
PUTTING = (A.index_put, A.index_add, A.slice_scatter, A.select_scatter)
SPLITS = (A.split, A.split_with_sizes, A.unbind)
# Calls that work along one dimension.
ALONG = (A.sum, A.mean, A.amax, A.amin, A.logsumexp, A._softmax, A._log_softmax, A.sort, A.cumsum)
ALONG += (A.gather, A.scatter, A.scatter_add, A.slice, A.slice_scatter, A.topk)
# Elementwise calls that torch does not tag as pointwise.
_EACH = (A.expand, A.where, A.clone, A.alias, A.detach, A._to_copy, P.convert_element_type, P.fma)
# The positions of the arguments in which a call is linear, in all of them at once; a product is
# linear in either factor too.
_LINEAR = {A.add: (0, 1), A.sub: (0, 1), A.where: (1, 2), A.mul: (), P.fma: (2,), A.div: (0,)}
_LINEAR |= {A.scatter: (0, 3), A.scatter_add: (0, 3), A.slice_scatter: (0, 1), A.sum: (0,)}
_LINEAR |= dict.fromkeys((A.neg, A.clone, A.alias, A._to_copy, P.convert_element_type), (0,))
_LINEAR |= dict.fromkeys((A.gather, A.slice, A.expand), (0,))


class PartCall(NamedTuple):
    """The call that takes a part: ``target(tensor, *args)``.

    Attributes:
        dim: the last dimension along which the call works.
    """

    dim: int
    target: Any
    args: tuple[Any, ...]


def integer_indices(node: Node) -> list[Any] | None:
    """The index of each dimension, from the first; None with masks, and where the last dimension
    but not every other is indexed."""
    indices: Any = node.args[1]
    if packet(node) in (A.index_select, A.index_add):
        indices = [None] * (indices % max(len(shape(node)), 1)) + [node.args[2]]
    used = [i for i in indices if i is not None]
    rank = len(shape(node.args[0]))  # pyright: ignore[reportArgumentType]
    integers = all(example(i).dtype in (torch.int64, torch.int32) for i in used)
    return list(indices) if integers and (len(indices) < rank or len(used) == rank) else None


def are_ranges(indices: Sequence[Any], sizes: Sequence[Any]) -> bool:
    """True if indices take all rows of these sizes in order."""
    pairs = enumerate(zip(indices, sizes, strict=False))
    return all(is_range(index, size, len(sizes) - i) for i, (index, size) in pairs)


def part_call(node: Node) -> PartCall:
    """The call that takes the part that a node takes or puts."""
    if packet(node) is operator.getitem:
        split: Any = node.args[0]
        i: Any = node.args[1]
        named = call_arguments(split)
        dim = named["dim"] % len(shape(named["self"]))
        if packet(split) is A.unbind:
            return PartCall(dim, A.select.int, (dim, i))
        sizes = [part.shape[dim] for part in example(split)]
        return PartCall(dim, A.slice.Tensor, (dim, sum(sizes[:i]), sum(sizes[: i + 1])))
    named = call_arguments(node)
    rank = len(shape(named.get("self", node)))
    if packet(node) in (A.flip, P.rev):
        dims = [d % rank for d in named["dims"]]
        return PartCall(max(dims), A.flip.default, (dims,))
    dim = named["dim"] % rank
    if packet(node) in (A.select, A.select_scatter):
        return PartCall(dim, A.select.int, (dim, named["index"]))
    return PartCall(dim, A.slice.Tensor, (dim, named["start"], named["end"], named["step"]))


def keeps_classes(view: Node) -> bool:
    """True if a view reshapes rows alone."""
    before = shape(view.args[0])  # pyright: ignore[reportArgumentType]
    after = shape(view)
    return len(after) > 1 and len(before) > 1 and same_size(before[-1], after[-1])


def is_row_wise(node: Node, sizes: Sequence[Any]) -> bool:
    """True if a call computes each row of these sizes by itself, with one dimension in a row."""
    results = example(node) if isinstance(example(node), list | tuple) else [example(node)]
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    rank = len(sizes) + 1
    whole = lambda t: t.dim() == rank and keys(t.shape[:-1]) == keys(sizes)  # noqa: E731
    if not all(isinstance(t, torch.Tensor) and whole(t) for t in results):
        return False
    if packet(node) is A.expand and len(shape(node.args[0])) != rank:  # pyright: ignore
        return False
    if packet(node) in _EACH or torch.Tag.pointwise in node.target.tags:
        return torch.Tag.nondeterministic_seeded not in node.target.tags
    operands = map(example, filter(is_tensor_node, node.all_input_nodes))
    if packet(node) not in ALONG or not all(map(whole, operands)):
        return False
    dims = call_arguments(node)["dim"]
    return [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])] == [rank - 1]


def linear_arguments(node: Node, terms: Sequence[Node]) -> list[Any]:
    """The arguments in which a call is linear, if these are among them; else none."""
    if not terms or packet(node) not in _LINEAR:
        return []
    linear = [node.args[i] for i in _LINEAR[packet(node)] if i < len(node.args)]
    if packet(node) in (A.mul, P.fma):
        factors = [a for a in node.args[:2] if a in terms]
        if len(factors) != 1:
            return []
        linear += factors
    return linear if set(terms) <= set(linear) else []


def is_zero(arg: Any) -> bool:
    """True for 0, and for a tensor of zeros."""
    if not isinstance(arg, Node):
        return bool(arg == 0)
    return bool(fill_value(arg) == 0 or (packet(arg) is A.scalar_tensor and arg.args[0] == 0))
