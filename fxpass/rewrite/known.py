"""Row regions whose gradients forward computes: their outputs have coefficients known before.

In: a call of ``fxpass::row_region`` in a graph. Out: the same call with the coefficients of a
total, if all gradients of its outputs pass one scalar, and the gradient of this scalar by the
outputs reads none of them. Nobody has to know what the nodes between compute: autograd says it::

    %rows = getitem(%out, 0)
    %masked = mul(%rows, %mask)          ->     %out = row_region([..., %mask], '... total=1')
    %loss = sum(%masked)                        %loss = getitem(%out, 1)
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.fx import Graph, Node

from fxpass.graph.calls import storage, written
from fxpass.graph.functions import reads_values
from fxpass.graph.moving import movable
from fxpass.graph.nodes import is_tensor, value
from fxpass.rewrite.tails import Copies, Known, Make, is_linear, traced_of

# Scalars that are tried: each is traced.
TRIES = 4


def known_totals(
    outputs: Sequence[Node], results: Collection[Node], grads: Mapping[Node, bool]
) -> Iterator[Known]:
    """The totals of the outputs of a call that have a gradient, the best first: the last one is the
    loss, whose incoming gradient is 1; but of a scalar that is read beside it, the rows would be
    outputs, too.

    Args:
        outputs: the outputs that have a gradient.
        results: all outputs.
        grads: whether gradients are enabled at a node.
    """
    after = _differentiable(outputs, grads)
    scalars = [n for n in after if n not in outputs and is_tensor(n) and not value(n).dim()]
    scalars = [n for n in scalars if value(n).is_floating_point() and _passes(outputs, n, after)]
    tails = {n: _between(outputs, n, after) for n in scalars}
    beside = {n: bool(_read_beside(tail)) for n, tail in tails.items()}
    order = sorted(sorted(scalars, reverse=True), key=beside.__getitem__)
    for node in order[:TRIES]:
        tail = tails[node]
        inside = {*tail, *outputs}
        others = tuple(dict.fromkeys(n for t in tail for n in t.all_input_nodes if n not in inside))
        if any(storage(n) not in _storages(tail) for t in tail for n in written(t)):
            continue
        read = (*outputs, *(n for n in others if n in results))
        found = Known(node, tail, read, tuple(n for n in others if n not in results), Graph())
        traced = traced_of(found, len(outputs))
        if traced is not None and is_linear(found, traced):
            yield replace(found, graph=traced)


def _read_beside(tail: Sequence[Node]) -> set[Node]:
    """The nodes of a tail that have readers beside it, and what these need of the tail."""
    found: set[Node] = set()
    for node in reversed(tail[:-1]):
        if any(user not in tail or user in found for user in node.users):
            found.add(node)
    return found


def _storages(nodes: Collection[Node]) -> set[int | None]:
    return {storage(n) for n in nodes if is_tensor(n)}


def _differentiable(outputs: Sequence[Node], grads: Mapping[Node, bool]) -> set[Node]:
    """The nodes that gradients of the outputs may come from."""
    found, todo = set(outputs), list(outputs)
    while todo:
        node = todo.pop()
        for user in node.users:
            enabled = grads.get(user, True) and getattr(user.target, "__name__", "") != "detach"
            floats = not is_tensor(user) or value(user).is_floating_point()
            if user not in found and enabled and floats and user.target != "detach":
                if user.op != "output" and not reads_values(user, node):
                    continue
                found.add(user)
                todo.append(user)
    return found


def _leaves(node: Node, among: set[Node]) -> bool:
    """Whether some nodes lead from a node to the end of the graph, or to one without a reader: a
    write to an input."""
    seen, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or (user in among and not user.users):
                return True
            if user in among and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


def _passes(outputs: Sequence[Node], node: Node, after: set[Node]) -> bool:
    """Whether every way from the outputs to the end of the graph passes a node."""
    seen, todo = {node, *outputs}, list(outputs)
    while todo:
        for user in todo.pop().users:
            if user.op == "output" or (user in after and not user.users and user is not node):
                return False
            if user in after and user not in seen:
                seen.add(user)
                todo.append(user)
    return True


def _between(outputs: Sequence[Node], node: Node, after: set[Node]) -> tuple[Node, ...]:
    found, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source in after and source not in found and source not in outputs:
                found.add(source)
                todo.append(source)
    return tuple(sorted(found))


class Totalled(Protocol):
    """A call of an operator that may compute the gradients of a total in forward.

    Attributes:
        node: the call.
        results: the nodes of its outputs.
        outputs: those of them that have a gradient.
        made: all nodes that were inserted with it.
    """

    @property
    def node(self) -> Node: ...

    @property
    def results(self) -> Sequence[Node]: ...

    @property
    def outputs(self) -> Sequence[Node]: ...

    @property
    def made(self) -> Sequence[Node]: ...

    def detach(self, results: Collection[Node]) -> None:
        """Notes that no gradient reaches some outputs."""
        ...

    def zeros(self, make: Make, result: Node) -> Node:
        """Zeros for an output."""
        ...

    def again(
        self, make: Make, coefs: Sequence[Node], read: Collection[Node]
    ) -> tuple[dict[Node, Node], Node] | None:
        """The call with these coefficients of its outputs: what takes the place of the outputs that
        are ``read``, and the total. None if it is better without."""
        ...


def with_total(graph: Graph, of: Totalled, grads: Mapping[Node, bool], make: Make) -> bool:
    """Gives a call the coefficients of a total, if forward can compute its gradients.

    Args:
        graph: the graph, which is changed.
        of: the call.
        grads: whether gradients are enabled at a node.
        make: makes a node with its example value at the graph's insertion point.
    """
    reached = _differentiable(of.outputs, grads)
    of.detach([n for n in of.results if not _leaves(n, reached)])
    outputs, results = list(of.outputs), list(of.results)
    totals = known_totals(outputs, results, grads) if outputs else iter(())
    places = ((known, _unwritten(known, _place(of.node, known, results))) for known in totals)
    known, place = next(((k, p) for k, p in places if p is not None), (None, None))
    if known is None or place is None:
        return False
    beside = {*_read_beside(known.tail)}
    before = {*of.made, *known.tail}
    read = {*known.results[len(outputs) :]}
    inside = {*known.tail} - beside
    read |= {n for n in results if any(user not in inside for user in n.users)}
    device = value(outputs[0]).device
    with graph.inserting_before(place):
        zeros = [of.zeros(make, result) for result in known.results]
        given = [*zeros, *known.others]
        copies = Copies(known.graph, given, len(outputs), make, device)
        coefs = [copies(node) for node in copies.results[:-1]]
        news, total = of.again(make, coefs, read) or ({}, None)
        made = {*zeros, *copies.known.values()}
        if total is not None:
            if len(zeros) > len(outputs):  # results without a gradient are read as they are
                untrained = known.results[len(outputs) :]
                given[len(outputs) : len(zeros)] = [news[result] for result in untrained]
                copies = Copies(known.graph, given, len(outputs), make, device)
            # what else is in the scalar may have gradients of its own
            rest = copies(copies.results[-1])
            made |= {*copies.known.values()}
            total, dtype = make(torch.add, total, rest), value(known.node).dtype
            if value(total).dtype != dtype:
                total = make(torch.ops.aten._to_copy.default, total, dtype=dtype)
    made = {n for n in made if isinstance(n, Node)} - {*known.others, *news.values()}
    if total is None:
        _erase(graph, made)
        return False
    for old, node in news.items():
        old.replace_all_uses_with(node)
    if place is known.node:
        for node in known.tail[:-1]:  # some may be read after the total, too
            place.prepend(node)
    example = known.node.meta["example_value"]
    known.node.replace_all_uses_with(total)
    total.meta["example_value"] = example
    _erase(graph, before | made)
    return True


def _erase(graph: Graph, nodes: Collection[Node]) -> None:
    """Erases the nodes that nobody reads."""
    for node in sorted(nodes, reverse=True):
        if not node.users and node.op != "output":
            graph.erase_node(node)


def rows_of(make: Make, tensor: Node) -> Any:
    """The rows of a tensor, as a number or a node."""
    rows = value(tensor).shape[0]
    return rows if isinstance(rows, int) else make(torch.ops.aten.sym_size.int, tensor, 0)


def _hoisted(call: Node, known: Known) -> bool:
    """Moves what the tail reads beside the results before the call, if that is the same there: such
    as the sum of a mask."""
    moved = movable(known.others, call, known.results)
    for node in moved or ():
        call.prepend(node)
    return moved is not None


def _unwritten(known: Known, place: Node | None) -> Node | None:
    """The place, unless what the tail reads there is written to before it would read it."""
    memory = {None, *_storages([n for n in known.others if is_tensor(n)])}
    node = known.node if place is None else min(place, *known.tail)
    while node is not known.node:
        if any(storage(n) in memory for n in written(node)):
            return None
        node = node.next
    return place


def _place(call: Node, known: Known, results: Sequence[Node]) -> Node | None:
    """The node before which the call can stand: after what the tail reads, before all else that
    reads its results, with no write to its operands on the way."""
    before = (*results, *known.tail[:-1])
    readers = [u for n in before for u in n.users if u not in known.tail]
    last = max([call, *known.others])
    place = known.node
    if any(reader < place for reader in readers):
        place = call if last is call or _hoisted(call, known) else None
    if place is None or place is call:
        return place
    memory = _storages([n for n in call.all_input_nodes if is_tensor(n)])
    node = call
    while node is not place:
        if any(storage(n) in memory for n in written(node)):
            return None
        node = node.next
    return place
