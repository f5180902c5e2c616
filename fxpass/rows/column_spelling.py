"""Gives softmaxes along rows, and entries of rows, a spelling in which only reductions mix rows.

In: a node that works along the rows of a tagged tensor. Out: the node, changed in place, behind
nodes that are added. Labels ``t`` are rows::

    _log_softmax(z, 0)          z - m - log(s)               where m, s = exponentials(z, 0)
    gather(z - y, 0, t)         gather(z, 0, t) - y          where y is the same for all rows
    gather(z, 0, t)             sum(where(arange(N)[:, None] == t, z, 0), [0], True)
    scatter(q, 0, t, value)     where(arange(N)[:, None] == t, value, q)

So the logits of a cross-entropy of columns are computed twice: for the sums of exponentials and the
entries, and for the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxpass import messages
from fxpass.rows.aten_calls import A, P, call_arguments, fill_value
from fxpass.rows.columns import exponentials
from fxpass.rows.rules import NodePlan, Rules, rule
from fxpass.rows.sizes import example, guard_equal, is_one, is_tensor_node, keys, packet, shape
from fxpass.rows.tags import Stop, Tag

_EXTREMES = {A.max: (A.amax, A.argmax), A.min: (A.amin, A.argmin)}


def spell_sums(graph: Graph) -> None:
    """Gives sums of one-hot values, as in the gradient of a softmax of labels, their value.

    For t and y ``[N, 1]``, ``sum(scatter(zeros, 1, t, -1) * y, [1], True)`` is ``y * -1``."""
    for node in list(graph.find_nodes(op="call_function", target=A.sum.dim_IntList)):
        product, dims, *keep = node.args
        if packet(product) is not A.mul or len(dims) != 1 or keep != [True] or node.kwargs:
            continue
        for one_hot, factor in (product.args, product.args[::-1]):
            if not is_tensor_node(factor) or getattr(one_hot, "target", None) != A.scatter.value:
                continue
            base, dim, index, value = one_hot.args
            same = keys(shape(index)) == keys(shape(factor)) == keys(shape(node))
            same &= example(factor).dtype == example(node).dtype
            if fill_value(base) == 0 and same and (dims[0] - dim) % len(shape(node)) == 0:
                node.target = A.mul.Tensor
                node.args = (factor, value)
                break


def respell(rules: Rules, node: Node, tag: Tag, dim: int) -> bool:
    """Gives a call along one dimension another spelling, in place.

    Args:
        tag: of the first argument.

    Returns:
        False if the call has no other spelling.
    """
    spell = _SPELLINGS.get(packet(node))
    if spell is None:
        return False
    if tag.letters[dim] == "r":
        whole = tag.rows == (dim,) and tag.view.in_order
        return whole and spell(_Inserter(rules, node), node, dim, True)
    if packet(node) is not A._log_softmax:
        return False
    # A later phase reads the maxima and sums of rows. Not those of a softmax: of logits that are
    # rounded otherwise there, its sum would not be 1, which gradients may amplify.
    return _spell_softmax(_Inserter(rules, node), node, dim, False)


class _Inserter:
    """Inserts nodes before a node, with their example values, and with plans where rules allow."""

    def __init__(self, rules: Rules, node: Node) -> None:
        self.rules = rules
        self.node = node

    def call(self, target: Any, value: Any, *args: Any, **kwargs: Any) -> Node:
        """Adds a call, whose result is like ``value``."""
        with self.rules.graph.inserting_before(self.node):
            made = self.rules.graph.call_function(target, args, kwargs)
        made.meta = self.node.meta | {"val": value}
        if any(self.rules.tags_of(n) is not None for n in made.all_input_nodes):
            try:
                self.rules.plan_node(made)
            except Stop as stop:
                self.rules.reasons[made] = stop
        return made

    def number(self, number: float, like: Node) -> Node:
        """A 0-dim tensor."""
        options = {"dtype": example(like).dtype, "device": example(like).device}
        return self.call(A.full.default, example(like).new_empty([]), [], number, **options)

    def become(self, target: Any, *args: Any, **kwargs: Any) -> bool:
        """Makes the node another call."""
        self.node.target = target
        self.node.args = args
        self.node.kwargs = kwargs
        return True


def _spell_softmax(add: _Inserter, node: Node, dim: int, of_rows: bool) -> bool:
    """``_softmax`` and ``_log_softmax`` by maxima and sums of exponentials."""
    z: Any = node.args[0]
    one = _one(z, dim)
    total = None
    if of_rows:
        largest, total = _add_exponentials(add, z, dim)
    else:
        largest = add.call(A.amax.default, one, z, [dim], True)
    shifted = add.call(A.sub.Tensor, example(z), z, largest)
    # A later phase rounds logits otherwise, and no probability may exceed 1 there.
    shifted = add.call(A.clamp_max.default, example(z), shifted, 0)
    terms = add.call(A.exp.default, example(z), shifted)
    if total is None:
        total = add.call(A.sum.dim_IntList, one, terms, [dim], True)
    if packet(node) is A._softmax:
        return add.become(A.div.Tensor, terms, total)
    return add.become(A.sub.Tensor, shifted, add.call(A.log.default, one, total))


def _spell_logsumexp(add: _Inserter, node: Node, dim: int, _: bool) -> bool:
    z: Any = node.args[0]
    one = _one(z, dim)
    largest, total = _add_exponentials(add, z, dim)
    lse = add.call(A.add.Tensor, one, add.call(A.log.default, one, total), largest)
    mask = one.new_empty(one.shape, dtype=torch.bool)
    infinite = add.call(A.eq.Scalar, mask, largest, math.inf)
    chosen = add.call(A.where.self, one, infinite, largest, lse)
    if call_arguments(node)["keepdim"]:
        return add.become(A.alias.default, chosen)
    return add.become(A.squeeze.dim, chosen, dim)


def _one(z: Node, dim: int) -> Tensor:
    """An example of a reduction of one dimension."""
    return example(z).new_empty([1 if d == dim else size for d, size in enumerate(shape(z))])


def _add_exponentials(add: _Inserter, z: Node, dim: int) -> tuple[Node, Node]:
    """The two results of :func:`exponentials`."""
    one = _one(z, dim)
    state = add.call(exponentials, one.new_empty([2, *one.shape]), z, dim)
    return add.call(A.select.int, one, state, 0, 0), add.call(A.select.int, one, state, 0, 1)


def _spell_gather(add: _Inserter, node: Node, dim: int, _: bool) -> bool:
    """One entry of each column, of the operand that has the rows, or as a sum."""
    source: Any = node.args[0]
    index: Any = node.args[2]
    if not _is_one_each(index, source, dim):
        return False
    operand = _operand_with_rows(add.rules, source, dim)
    if operand is None:
        are_rows = _are_rows(add, _checked(add, index, dim), dim)
        chosen = add.call(A.where.self, example(source), are_rows, source, add.number(0, source))
        return add.become(A.sum.dim_IntList, chosen, [dim], True)
    entries = add.call(
        A.gather.default, example(operand).new_empty(shape(node)), operand, dim, index
    )
    args = (entries if arg is operand else arg for arg in source.args)
    return add.become(source.target, *args, **source.kwargs)


def _is_one_each(index: Node, source: Node, dim: int) -> bool:
    """Tells if an index has one entry for each column of the source, a matrix."""
    wanted = [1 if d == dim else size for d, size in enumerate(shape(source))]
    return len(shape(index)) == len(wanted) == 2 and all(map(guard_equal, shape(index), wanted))


def _operand_with_rows(rules: Rules, node: Node, dim: int) -> Node | None:
    """The only operand of an elementwise call that has rows in a dimension, if it is tagged."""
    torch_tags = getattr(node.target, "tags", ())
    pointwise = torch.Tag.pointwise in torch_tags or packet(node) is P.convert_element_type
    if not pointwise or torch.Tag.nondeterministic_seeded in torch_tags:
        return None
    from_end = dim - len(shape(node))
    tensors = [a for a in node.all_input_nodes if is_tensor_node(a)]
    found = [a for a in tensors if len(shape(a)) >= -from_end and not is_one(shape(a)[from_end])]
    if len(found) != 1 or len(shape(found[0])) != len(shape(node)):
        return None
    return found[0] if rules.tag_of(found[0]) is not None else None


def _spell_scatter(add: _Inserter, node: Node, dim: int, _: bool) -> bool:
    """One value for each column."""
    base: Any = node.args[0]
    index: Any = node.args[2]
    value: Any = node.args[3]
    if not _is_one_each(index, base, dim) or len(node.args) != 4 or node.kwargs:
        return False
    if is_tensor_node(value) and keys(shape(value)) != keys(shape(index)):
        return False
    value = value if isinstance(value, Node) else add.number(value, base)
    are_rows = _are_rows(add, index, dim)
    if packet(node) is A.scatter:
        return add.become(A.where.self, are_rows, value, base)
    added = add.call(A.where.self, example(base), are_rows, value, add.number(0, base))
    return add.become(A.add.Tensor, base, added)


def _are_rows(add: _Inserter, index: Node, dim: int) -> Node:
    """The mask of the entries of the node's first argument whose rows are those of an index."""
    source: Any = add.node.args[0]
    mask = example(source).new_empty(shape(source), dtype=torch.bool)
    return add.call(A.eq.Tensor, mask, _column_of_rows(add, dim), index)


def _checked(add: _Inserter, index: Node, dim: int) -> Node:
    """An index, gathered from the numbers of rows: as in eager, others are an error."""
    flat = add.call(A.squeeze.dim, example(index).squeeze(dim), index, dim)
    checked = add.call(A.gather.default, example(flat), _row_numbers(add, dim), 0, flat)
    return add.call(A.unsqueeze.default, example(index), checked, dim)


def _column_of_rows(add: _Inserter, dim: int) -> Node:
    """The numbers of rows, before dimensions of one element."""
    rows = _row_numbers(add, dim)
    source: Any = add.node.args[0]
    for _ in range(dim + 1, len(shape(source))):
        rows = add.call(A.unsqueeze.default, example(rows).unsqueeze(-1), rows, -1)
    return rows


def _row_numbers(add: _Inserter, dim: int) -> Node:
    """``0, 1, ...``, one for each element of a dimension of the node's first argument."""
    source: Any = add.node.args[0]
    count = shape(source)[dim]
    device = example(source).device
    options = {"dtype": torch.int64, "device": device, "requires_grad": False}
    numbers = example(source).new_empty([count], dtype=torch.int64)
    if packet(source) is A.full:
        count = source.args[0][dim]
    elif not isinstance(count, int):
        count = add.call(A.sym_size.int, count, source, dim)
    return add.call(P.iota.default, numbers, count, start=0, step=1, **options)


def _spell_extremes(add: _Inserter, node: Node, dim: int, _: bool) -> bool:
    """``max`` and ``min`` with indices: each result is a call of its own."""
    source: Any = node.args[0]
    if not isinstance(example(node), list | tuple):
        return False
    keep = bool(call_arguments(node)["keepdim"])
    for user in list(node.users):
        i: Any = user.args[1]
        over: Any = dim if i else [dim]
        user.target = _EXTREMES[packet(node)][i].default
        user.args = (source, over, keep)
    add.rules.graph.erase_node(node)
    raise Stop(messages.ALONG_ROWS)


_SPELLINGS: dict[Any, Callable[[_Inserter, Node, int, bool], bool]] = {
    A._softmax: _spell_softmax,
    A._log_softmax: _spell_softmax,
    A.logsumexp: _spell_logsumexp,
    A.gather: _spell_gather,
    A.scatter: _spell_scatter,
    A.scatter_add: _spell_scatter,
    A.max: _spell_extremes,
    A.min: _spell_extremes,
}


@rule("diagonal", "diagonal_scatter")
def diagonal(rules: Rules, node: Node, want: Tag | None) -> NodePlan:
    """The diagonal of square logits: one class of each row, read or put."""
    source: Any = node.args[0]
    puts = packet(node) is A.diagonal_scatter
    tag = want if puts and want is not None else rules.tag_of(source)
    sizes = shape(source)
    square = len(sizes) == 2 and guard_equal(*sizes) and len(node.args) == 1 + puts
    if tag is None or not square or node.kwargs or len(tag.rows) != 1 or not tag.view.in_order:
        raise Stop(messages.NO_RULE)
    dim = 1 - tag.rows[0]  # of the classes
    add = _Inserter(rules, node)
    numbers = _row_numbers(add, dim)
    index = add.call(A.unsqueeze.default, example(numbers).unsqueeze(dim), numbers, dim)
    if puts:
        value: Any = node.args[1]
        column = add.call(A.unsqueeze.default, example(value).unsqueeze(dim), value, dim)
        add.become(A.scatter.src, source, dim, index, column)
    else:
        made = example(source).new_empty(shape(index))
        add.become(A.squeeze.dim, add.call(A.gather.default, made, source, dim, index), dim)
    rules.plan_node(node, want)
    return rules.plans[node]
