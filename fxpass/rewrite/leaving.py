"""Outputs of the graph that are logits: which of them can be deferred.

In: a region, and what was captured of its heads. Out: the deferred outputs, each with the nodes
that compute it. An output can be deferred if only casts, views and pointwise functions are between
the products and the output, and if these nodes have the same result when they are recomputed at the
end of the graph::

    %logits = linear(%h, %w);  %float = float(%logits);  return (%loss, %float)

    deferred = {%float: (%logits, %float)}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpass.capture.capture import Captured
from fxpass.capture.values import Step
from fxpass.graph import hazards
from fxpass.graph.calls import is_cut, storage, written
from fxpass.graph.functions import CASTS, function_of, is_in_place
from fxpass.graph.modes import Mode, cuts_gradients
from fxpass.graph.nodes import is_tensor, needs_gradient, value
from fxpass.graph.placements import is_dtensor, is_gathered
from fxpass.graph.region import Region

Deferred = Mapping[Node, tuple[Node, ...]]
# What a node does to logits.
PRODUCT, CAST, VIEW, POINTWISE, OTHER = "product", "cast", "view", "pointwise", "other"


def deferred_outputs(
    region: Region, captured: Captured, modes: Mapping[Node, Mode], *, drop: bool
) -> Deferred:
    """The outputs that can be deferred, each with the nodes from the products to it.

    Args:
        region: the region.
        captured: its heads.
        modes: those of the region's nodes.
        drop: whether the values of the outputs cannot be read, so that nothing is recomputed.
    """
    if region.outer is not None:
        return {}  # nodes of the outer graph read the outputs of a checkpoint
    output = region.module.graph.output_node()
    found: dict[Node, tuple[Node, ...]] = {}
    for node in captured.slice.left:
        nodes = _between(node, captured, drop)
        others = {n for n in output.all_input_nodes if n not in captured.slice.left}
        if nodes and (drop or _computable_at(output, node, nodes, captured, modes, others)):
            casts = [n for n in _weight_casts(nodes) if drop or _movable(n, output)]
            found[node] = tuple(sorted((*casts, *nodes)))
    return found


def split(
    output: Node, nodes: Collection[Node], captured: Captured
) -> tuple[Node, tuple[Node, ...]]:
    """The last node before the first view of rows, and the nodes from it to an output: the logits
    are deferred as a whole, so that their rows are known, and the views are taken of them.

    Args:
        output: a deferred output.
        nodes: the nodes that compute it.
        captured: the heads.

    Returns:
        the output itself and no nodes, where there is no such node.
    """
    node, chain = output, list[Node]()
    while True:
        before = {n for n in nodes if n is node or n in _ancestors(node, nodes)}
        if not any(VIEW in does(captured, n) for n in before):
            return node, tuple(reversed(chain))
        sources = {n for n in node.all_input_nodes if n in nodes}
        if node in captured.heads or len(sources) != 1 or written(node):
            return output, ()
        chain.append(node)
        node = sources.pop()


def _ancestors(node: Node, nodes: Collection[Node]) -> set[Node]:
    found, todo = set[Node](), [node]
    while todo:
        sources = {n for n in todo.pop().all_input_nodes if n in nodes} - found
        found |= sources
        todo += sources
    return found


def does(captured: Captured, node: Node) -> set[str]:
    """What the calls of a node do to logits."""
    if node in captured.heads:
        return {PRODUCT}
    steps = (s for s in captured.slice.steps if s.node is node)
    return {_kind(s) for s in steps if any(v.of_classes for v in s.values)}


def _kind(step: Step) -> str:
    packet, schema = step.op.overloadpacket, step.op._schema
    if packet is torch.ops.aten._to_copy:
        return CAST
    views = (torch.ops.aten._unsafe_view, torch.ops.aten.clone, torch.ops.aten.index)
    if packet in views or (schema.arguments and schema.arguments[0].alias_info is not None):
        return VIEW
    return POINTWISE if torch.Tag.pointwise in step.op.tags else OTHER


def _between(output: Node, captured: Captured, drop: bool) -> tuple[Node, ...]:
    """The nodes from the products to an output in the graph's order; empty if it is not deferred.

    DTensors are not deferred: recomputing them may need all ranks. An output can be dropped, which
    recomputes nothing, if its DTensors are gathered to plain tensors.
    """
    inside = captured.slice.ran
    found, todo = {output}, [output]
    while todo:
        node = todo.pop()
        if not is_tensor(node) or not value(node).is_floating_point():
            return ()
        if is_dtensor(value(node)) and (not drop or node is output):
            return ()
        if free_unbacked_symbols(value(node)):
            return ()  # a deferred tensor has a shape before its values are known
        if OTHER in does(captured, node) and not (drop and is_gathered(node)):
            return ()
        changed = written(node)
        if changed and not (is_in_place(function_of(node)) and all(n in inside for n in changed)):
            return ()
        for operand in node.all_input_nodes:
            if isinstance(operand.meta.get("example_value"), tuple):
                return ()  # a shape, or several tensors, which is no result of a graph
            if operand not in inside and is_cut(operand):
                return ()  # AOTAutograd makes such a view of an input anew, with gradients
            if operand in inside and operand not in found and node not in captured.heads:
                found.add(operand)
                todo.append(operand)
    # of logits that exist, nothing is saved
    return tuple(sorted(found)) if not found.isdisjoint(captured.heads) else ()


# ---------------------------------------------------------------- recomputed later, the same?


def _computable_at(
    end: Node,
    output: Node,
    nodes: Collection[Node],
    captured: Captured,
    modes: Mapping[Node, Mode],
    others: Collection[Node],
) -> bool:
    """Whether ``nodes``, recomputed at the graph's end without autocast, give the same values and
    gradients as ``output``, which shares no memory with ``others``."""
    memory = storage(output)
    if any(storage(n) == memory for n in others if is_tensor(n)):
        return False  # the outputs are aliases: a write to one changes the other
    return (
        memory is not None
        and hazards.hazard(nodes, end) is None
        and all(_has_dtype_of_an_operand(node, captured) for node in nodes)
        and not (value(output).requires_grad and any(cuts_gradients(n, modes) for n in nodes))
    )


def _has_dtype_of_an_operand(node: Node, captured: Captured) -> bool:
    """False where autocast up-casts a pointwise function, for which the graph has no node."""
    if node in captured.heads or function_of(node) in CASTS:
        return True
    return value(node).dtype in {value(n).dtype for n in node.all_input_nodes if is_tensor(n)}


def _weight_casts(nodes: Iterable[Node]) -> list[Node]:
    """Casts of inputs of the graph that products read: recomputed later, they save memory."""
    read = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in nodes)
    casts = [n for n in read if is_tensor(n) and function_of(n) in CASTS]
    casts = [c for c in casts if [n.op for n in c.all_input_nodes] == ["placeholder"]]
    # one under no_grad cuts the gradient of its input
    return [c for c in casts if needs_gradient(c) == needs_gradient(c.all_input_nodes[0])]


def _movable(cast: Node, end: Node) -> bool:
    """Whether a cast of an input has the same result at the graph's end."""
    return hazards.hazard((cast,), end) is None
