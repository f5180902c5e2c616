"""Paths: the nodes from products that may be heads to outputs of Dynamo's graph.

In: the output of a graph, and its products that may be heads. Out: for each result of the graph the
path that computes it. On a path are only casts, views and pointwise functions, as the names of the
functions tell. A result can be deferred if its path, recomputed at the end of the graph, gives the
same values::

    %logits = linear(%h, %w);  %float = float(%logits);  return (%loss, %float)

    paths_to(output, {%logits}) == {%float: LogitsPath((%logits, %float), (%logits,))}
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
from fxpass.rewrite.heads import class_count, element_count

# The kinds of nodes that read logits.
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
# Views that change nothing if their operand has the wanted layout.
_LAYOUTS = {"view", "reshape", "contiguous", "flatten"}


class LogitsPath(NamedTuple):
    """The nodes from products to an output.

    Attributes:
        nodes: all nodes, in the graph's order.
        products: the nodes that multiply.
    """

    nodes: tuple[Node, ...]
    products: tuple[Node, ...]


def dependents_of(products: Collection[Node]) -> set[Node]:
    """The products, and the nodes that their values reach."""
    found = set(products)
    todo = list(products)
    while todo:
        node = todo.pop()
        users = [u for u in node.users if u not in found and reads_values(u, node)]
        found.update(users)
        todo += users
    return found


def paths_to(
    output: Node, products: Collection[Node], *, drop: bool = False
) -> dict[Node, LogitsPath]:
    """The paths to results of a graph that have a dimension of classes, by the result.

    Args:
        output: the graph's output node.
        products: the products that may be heads.
        drop: whether the results are dropped, which recomputes nothing.
    """
    dependents = dependents_of(products)
    found = dict[Node, LogitsPath]()
    for node in output.all_input_nodes:
        nodes = _path_nodes(node, products, dependents, drop) if node in dependents else ()
        path = LogitsPath(nodes, tuple(n for n in nodes if n in products))
        sizes = {class_count(n) for n in path.products}
        if not sizes.isdisjoint(map(hint, value(node).shape) if nodes else ()):
            found[node] = path
    return found


def with_casts(path: LogitsPath, output: Node, *, drop: bool) -> tuple[Node, ...]:
    """The nodes of a path, and the casts of the graph's inputs that its products read: to recompute
    these casts saves memory."""
    casts = _weight_casts(path.nodes)
    movable = (c for c in casts if drop or hazards.hazard((c,), output) is None)
    return tuple(sorted((*movable, *path.nodes)))


class SplitPath(NamedTuple):
    """A path in two: the logits are deferred as a whole, so that the rows of the deferred
    tensor are separate, and the views read it.

    Attributes:
        logits: the last node before the first view of rows.
        tail: the nodes from there to the output; empty if ``logits`` is the output.
    """

    logits: Node
    tail: tuple[Node, ...] = ()


def split_before_views(output: Node, nodes: Collection[Node], path: LogitsPath) -> SplitPath:
    """Splits the nodes that compute an output; not at all if the tail would read more than the
    logits, or write to them.

    Args:
        output: a deferred output.
        nodes: the nodes that compute it.
        path: its path.
    """
    node = output
    tail = list[Node]()
    while True:
        before = {n for n in nodes if n is node or n in _ancestors(node, nodes)}
        if not any(kind_of(n, path.products) == VIEW for n in before):
            return SplitPath(node, tuple(reversed(tail)))
        sources = {n for n in node.all_input_nodes if n in nodes}
        if node in path.products or len(sources) != 1 or written(node):
            return SplitPath(output)
        tail.append(node)
        node = sources.pop()


def _ancestors(node: Node, nodes: Collection[Node]) -> set[Node]:
    found = set[Node]()
    todo = [node]
    while todo:
        sources = {n for n in todo.pop().all_input_nodes if n in nodes} - found
        found |= sources
        todo += sources
    return found


def kind_of(node: Node, products: Collection[Node]) -> str:
    """The kind of a node that reads logits."""
    if node in products:
        return PRODUCT
    function = out_of_place(function_of(node))
    if function in CASTS:
        return CAST
    if function in VIEWS:
        source = node.all_input_nodes[0]
        same = function in _LAYOUTS and storage(node) == storage(source)
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


def _path_nodes(
    output: Node, products: Collection[Node], dependents: set[Node], drop: bool
) -> tuple[Node, ...]:
    """The nodes of the path to an output, in the graph's order; empty if there is no path.

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
            return ()  # a deferred tensor has a shape before its values exist
        placed = drop and (is_gathered(node) or bool(placement_name(node.target)))
        if kind_of(node, products) == OTHER and not placed:
            return ()
        changed = set(written(node))
        if changed and not (is_in_place(function_of(node)) and changed <= dependents):
            return ()
        for operand in node.all_input_nodes:
            if isinstance(operand.meta.get("example_value"), tuple):
                return ()  # a shape, or several tensors, which is no result of a graph
            if is_tensor(operand) and not _is_plain(operand):
                return ()
            if operand not in dependents and is_cut(operand):
                return ()  # AOTAutograd recreates such a view of an input, with gradients
            if operand in dependents and operand not in found and node not in products:
                found.add(operand)
                todo.append(operand)
    # without a product, the logits exist
    return tuple(sorted(found)) if not found.isdisjoint(products) else ()


def _is_plain(node: Node) -> bool:
    """True if a tensor is of no subclass but DTensor, and in no transform of torch.func."""
    example = value(node)
    subclass = is_traceable_wrapper_subclass(example) and not is_dtensor(example)
    return not (subclass or is_functorch_wrapped_tensor(example))


# ---------------------------------------------------------------- recomputed at the graph's end


def is_computable(
    end: Node,
    output: Node,
    path: LogitsPath,
    modes: Mapping[Node, Mode],
    others: Collection[Node],
) -> bool:
    """True if a path, recomputed at the graph's end without autocast, gives the same values and
    gradients as ``output``, and ``output`` shares no memory with ``others``."""
    memory = storage(output)
    nodes = path.nodes
    if any(storage(n) == memory for n in others if is_tensor(n)):
        return False  # the outputs are aliases: a write to one changes the other
    return (
        memory is not None
        and hazards.hazard(nodes, end) is None
        and all(_has_dtype_of_an_operand(node, path) for node in nodes)
        and not (value(output).requires_grad and any(cuts_gradients(n, modes) for n in nodes))
    )


def _has_dtype_of_an_operand(node: Node, path: LogitsPath) -> bool:
    """False where autocast upcasts the operands of a pointwise function: the graph has no node for
    these casts."""
    if node in path.products or function_of(node) in CASTS:
        return True
    return value(node).dtype in {value(n).dtype for n in node.all_input_nodes if is_tensor(n)}


def is_as_large(node: Node, products: Iterable[Node]) -> bool:
    """True if a tensor has half as many values as logits, or a size that depends on data."""
    if not is_tensor(node):
        return False
    if free_unbacked_symbols(value(node)):
        return True
    return 2 * element_count(node) >= min(map(element_count, products))


def _weight_casts(nodes: Iterable[Node]) -> list[Node]:
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in nodes)
    casts = [n for n in read if is_tensor(n) and function_of(n) in CASTS]
    casts = [c for c in casts if [n.op for n in c.all_input_nodes] == ["placeholder"]]
    # a cast under no_grad cuts the gradient of its input
    return [c for c in casts if needs_gradient(c) == needs_gradient(c.all_input_nodes[0])]
