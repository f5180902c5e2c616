"""Outputs of the graph that are logits: which of them can be deferred.

In: a region, and the flows of its heads. Out: the deferred outputs, each with the nodes that
compute it. An output can be deferred if only casts, views and pointwise functions are between the
linears and the output, and if these nodes have the same result when they are recomputed at the end
of the graph::

    %logits = linear(%h, %w);  %float = float(%logits);  return (%loss, %float)

    deferred = {%float: (%logits, %float)}
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fxpass.graph import hazards
from fxpass.graph.calls import is_cut, storage, written
from fxpass.graph.functions import CASTS, function_of, is_in_place, out_of_place
from fxpass.graph.nodes import is_tensor, needs_gradient, value
from fxpass.graph.placements import is_dtensor, is_gathered
from fxpass.graph.region import Region
from fxpass.lower.pointwise import POINTWISE
from fxpass.match.linears import LINEARS, linear_of
from fxpass.match.modes import Mode, cuts_gradients
from fxpass.match.views import VIEWS

_COMPUTABLE = CASTS | LINEARS.keys() | VIEWS | POINTWISE.keys()

Deferred = Mapping[Node, tuple[Node, ...]]


def deferred_outputs(
    region: Region, inside: Collection[Node], modes: dict[Node, Mode], *, drop: bool
) -> Deferred:
    """The outputs that can be deferred, each with the nodes from the linears to it.

    Args:
        region: the region.
        inside: the linears of heads, and all nodes with values of their logits.
        modes: those of the region's nodes.
        drop: whether the values of the outputs cannot be read, so that nothing is recomputed.
    """
    if region.outer is not None:
        return {}  # nodes of the outer graph read the outputs of a checkpoint
    output = region.module.graph.output_node()
    found: dict[Node, tuple[Node, ...]] = {}
    for node in output.all_input_nodes:
        nodes = _between(node, inside, drop) if node in inside else ()
        if nodes and (drop or _computable_at(output, node, nodes, modes)):
            casts = [n for n in _weight_casts(nodes) if drop or _movable(n, output)]
            found[node] = tuple(sorted((*casts, *nodes)))
    return found


def _between(output: Node, inside: Collection[Node], drop: bool) -> tuple[Node, ...]:
    """The nodes from the linears to an output in the graph's order; empty if it is not deferred.

    DTensors are not deferred: recomputing them may need all ranks. An output can be dropped, which
    recomputes nothing, if its DTensors are gathered to plain tensors.
    """
    found, todo = {output}, [output]
    while todo:
        node = todo.pop()
        if not is_tensor(node) or not value(node).is_floating_point():
            return ()
        if is_dtensor(value(node)) and (not drop or node is output):
            return ()
        if free_unbacked_symbols(value(node)):
            return ()  # a deferred tensor has a shape before its values are known
        function, changed = function_of(node), written(node)
        if not is_computable(function) and not (drop and is_gathered(node)):
            return ()
        if changed and not (is_in_place(function) and all(n in inside for n in changed)):
            return ()
        for operand in node.all_input_nodes:
            if isinstance(operand.meta.get("example_value"), tuple):
                return ()  # a shape, or several tensors, which is no result of a graph
            if operand not in inside and is_cut(operand):
                return ()  # AOTAutograd makes such a view of an input anew, with gradients
            if operand in inside and operand not in found:
                found.add(operand)
                todo.append(operand)
    return tuple(sorted(found))


def is_computable(function: str) -> bool:
    """Whether a recipe of deferred logits may have a function: linears, casts, views and functions
    of one logit."""
    return function in _COMPUTABLE or out_of_place(function) in POINTWISE


# ---------------------------------------------------------------- recomputed later, the same?


def _computable_at(
    end: Node, output: Node, nodes: tuple[Node, ...], modes: dict[Node, Mode]
) -> bool:
    """Whether ``nodes``, recomputed at the graph's end without autocast, give the same values and
    gradients as ``output``."""
    memory = storage(output)
    if any(storage(n) == memory for n in end.all_input_nodes if is_tensor(n) and n is not output):
        return False  # the outputs are aliases: a write to one changes the other
    return (
        memory is not None
        and hazards.hazard(nodes, end) is None
        and all(_has_dtype_of_an_operand(node) for node in nodes)
        and not (value(output).requires_grad and any(cuts_gradients(n, modes) for n in nodes))
    )


def _has_dtype_of_an_operand(node: Node) -> bool:
    """False where autocast up-casts a pointwise function, for which the graph has no node."""
    if function_of(node) in CASTS or function_of(node) in LINEARS:
        return True
    return value(node).dtype in {value(n).dtype for n in node.all_input_nodes if is_tensor(n)}


def _weight_casts(nodes: Iterable[Node]) -> list[Node]:
    """Casts of weights and biases that are inputs: recomputed later, they save memory."""
    linears = [linear_of(node) for node in nodes]
    weights = [n for linear in linears if linear for n in (linear.weight, linear.bias) if n]
    casts = [weight for weight in dict.fromkeys(weights) if function_of(weight) in CASTS]
    casts = [c for c in casts if [n.op for n in c.all_input_nodes] == ["placeholder"]]
    # one under no_grad cuts the gradient of its input
    return [c for c in casts if needs_gradient(c) == needs_gradient(c.all_input_nodes[0])]


def _movable(cast: Node, end: Node) -> bool:
    """Whether a cast of an input has the same result at the graph's end."""
    return hazards.hazard((cast,), end) is None
