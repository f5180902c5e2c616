"""Outputs of Dynamo's graph that are logits: which of them can be computed again at its end.

In: a region, and its products that may be heads. Out: for each output the nodes that compute it. It
is a chain if only casts, views and pointwise functions, which the names of the functions tell, are
between products and output; it can be deferred if the chain computes the same at the end of the
graph::

    %logits = linear(%h, %w);  %float = float(%logits);  return (%loss, %float)

    leaving(region, {%logits}) == {%float: Chain((%logits, %float), (%logits,))}
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxpass.graph import hazards
from fxpass.graph.calls import is_cut, storage, written
from fxpass.graph.functions import CASTS, function_of, is_in_place, out_of_place, reads_values
from fxpass.graph.modes import Mode, cuts_gradients
from fxpass.graph.nodes import hint, is_tensor, needs_gradient, value
from fxpass.graph.placements import is_dtensor, is_gathered, placement_name
from fxpass.rewrite.heads import columns, elements

# What a node does to logits.
PRODUCT = "product"
CAST = "cast"
VIEW = "view"
POINTWISE = "pointwise"
OTHER = "other"
VIEWS = {
    *("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "contiguous", "clone"),
    *("transpose", "permute", "movedim", "t", "numpy_T", "mT", "unsqueeze", "squeeze", "expand"),
    *("expand_as", "getitem", "select", "slice", "narrow", "index", "index_select", "detach"),
    *("alias", "lift_fresh_copy"),
}
_SAME = {"view", "reshape", "contiguous", "flatten"}  # of what has the wanted layout, nothing


class Chain(NamedTuple):
    """The nodes from products to an output.

    Attributes:
        nodes: all of them, in the graph's order.
        products: those that multiply.
    """

    nodes: tuple[Node, ...]
    products: tuple[Node, ...]


def made_of(products: Collection[Node]) -> set[Node]:
    """The products, and the nodes that values of them reach."""
    found = set(products)
    todo = list(products)
    while todo:
        node = todo.pop()
        users = [u for u in node.users if u not in found and reads_values(u, node)]
        found.update(users)
        todo += users
    return found


def leaving(output: Node, products: Collection[Node], *, drop: bool = False) -> dict[Node, Chain]:
    """The results of a graph that are chains, and have a dimension of classes.

    Args:
        output: the graph's.
        products: those that may be heads.
        drop: as of :func:`is_computable`.
    """
    inside = made_of(products)
    found = dict[Node, Chain]()
    for node in output.all_input_nodes:
        nodes = _between(node, products, inside, drop) if node in inside else ()
        chain = Chain(nodes, tuple(n for n in nodes if n in products))
        sizes = {columns(n) for n in chain.products}
        if not sizes.isdisjoint(map(hint, value(node).shape) if nodes else ()):
            found[node] = chain
    return found


def with_casts(chain: Chain, output: Node, *, drop: bool) -> tuple[Node, ...]:
    """A chain with the casts of the graph's inputs that its products read: computed again, they
    save memory."""
    casts = _weight_casts(chain.nodes)
    movable = (c for c in casts if drop or hazards.hazard((c,), output) is None)
    return tuple(sorted((*movable, *chain.nodes)))


def split(node: Node, nodes: Collection[Node], chain: Chain) -> tuple[Node, tuple[Node, ...]]:
    """The last node before the first view of rows, and the nodes from it to an output: the logits
    are deferred as a whole, so that their rows are known, and the views are taken of them.

    Args:
        node: a deferred output.
        nodes: the nodes that compute it.
        chain: those from the products.

    Returns:
        the output itself and no nodes, where there is no such node.
    """
    output = node
    after = list[Node]()
    while True:
        before = {n for n in nodes if n is node or n in _ancestors(node, nodes)}
        if not any(does(n, chain.products) == VIEW for n in before):
            return node, tuple(reversed(after))
        sources = {n for n in node.all_input_nodes if n in nodes}
        if node in chain.products or len(sources) != 1 or written(node):
            return output, ()
        after.append(node)
        node = sources.pop()


def _ancestors(node: Node, nodes: Collection[Node]) -> set[Node]:
    found = set[Node]()
    todo = [node]
    while todo:
        sources = {n for n in todo.pop().all_input_nodes if n in nodes} - found
        found |= sources
        todo += sources
    return found


def does(node: Node, products: Collection[Node]) -> str:
    """The kind of a node that reads logits."""
    if node in products:
        return PRODUCT
    function = out_of_place(function_of(node))
    if function in CASTS:
        return CAST
    if function in VIEWS:
        source, *_ = node.all_input_nodes
        same = function in _SAME and storage(node) == storage(source)
        return CAST if same and _layout(node) == _layout(source) else VIEW
    return POINTWISE if _is_pointwise(function) else OTHER


def _layout(node: Node) -> list[int]:
    return [hint(n) for n in (*value(node).shape, *value(node).stride())]


@functools.cache
def _is_pointwise(function: str) -> bool:
    packet = getattr(torch.ops.aten, function, None)
    ops = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    drawn = any(torch.Tag.nondeterministic_seeded in op.tags for op in ops)
    return not drawn and any(torch.Tag.pointwise in op.tags for op in ops)


def _between(
    output: Node, products: Collection[Node], inside: Collection[Node], drop: bool
) -> tuple[Node, ...]:
    """The nodes from the products to an output in the graph's order; empty if it is no chain.

    DTensors are not deferred: recomputing them may need all ranks. An output can be dropped, which
    recomputes nothing, if its DTensors are gathered to plain tensors.
    """
    found = {output}
    todo = [output]
    while todo:
        node = todo.pop()
        if not is_tensor(node) or not value(node).is_floating_point():
            return ()
        if is_dtensor(value(node)) and (not drop or node is output):
            return ()
        if free_unbacked_symbols(value(node)):
            return ()  # a deferred tensor has a shape before its values are known
        placed = drop and (is_gathered(node) or bool(placement_name(node.target)))
        if does(node, products) == OTHER and not placed:
            return ()
        changed = written(node)
        if changed and not (is_in_place(function_of(node)) and all(n in inside for n in changed)):
            return ()
        for operand in node.all_input_nodes:
            if isinstance(operand.meta.get("example_value"), tuple):
                return ()  # a shape, or several tensors, which is no result of a graph
            if is_tensor(operand) and not _is_plain(operand):
                return ()
            if operand not in inside and is_cut(operand):
                return ()  # AOTAutograd makes such a view of an input anew, with gradients
            if operand in inside and operand not in found and node not in products:
                found.add(operand)
                todo.append(operand)
    # of logits that exist, nothing is saved
    return tuple(sorted(found)) if not found.isdisjoint(products) else ()


def _is_plain(node: Node) -> bool:
    """Whether a tensor is neither of a transform of torch.func nor of a subclass, but DTensor."""
    example = value(node)
    subclass = is_traceable_wrapper_subclass(example) and not is_dtensor(example)
    return not (subclass or is_functorch_wrapped_tensor(example))


# ---------------------------------------------------------------- recomputed later, the same?


def is_computable(
    end: Node,
    output: Node,
    chain: Chain,
    modes: Mapping[Node, Mode],
    others: Collection[Node],
) -> bool:
    """Whether a chain, recomputed at the graph's end without autocast, gives the same values and
    gradients as ``output``, which shares no memory with ``others``."""
    memory = storage(output)
    nodes = chain.nodes
    if any(storage(n) == memory for n in others if is_tensor(n)):
        return False  # the outputs are aliases: a write to one changes the other
    return (
        memory is not None
        and hazards.hazard(nodes, end) is None
        and all(_has_dtype_of_an_operand(node, chain) for node in nodes)
        and not (value(output).requires_grad and any(cuts_gradients(n, modes) for n in nodes))
    )


def _has_dtype_of_an_operand(node: Node, chain: Chain) -> bool:
    """False where autocast up-casts a pointwise function, for which the graph has no node."""
    if node in chain.products or function_of(node) in CASTS:
        return True
    return value(node).dtype in {value(n).dtype for n in node.all_input_nodes if is_tensor(n)}


def is_as_large(node: Node, products: Iterable[Node]) -> bool:
    """Whether a tensor has at least half as many values as logits, or a size that data decides."""
    if not is_tensor(node):
        return False
    if free_unbacked_symbols(value(node)):
        return True
    return 2 * elements(node) >= min(map(elements, products))


def _weight_casts(nodes: Iterable[Node]) -> list[Node]:
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in nodes)
    casts = [n for n in read if is_tensor(n) and function_of(n) in CASTS]
    casts = [c for c in casts if [n.op for n in c.all_input_nodes] == ["placeholder"]]
    # one under no_grad cuts the gradient of its input
    return [c for c in casts if needs_gradient(c) == needs_gradient(c.all_input_nodes[0])]
