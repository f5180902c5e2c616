"""Finds the regions of a joint graph, between the products of heads and what has no classes.

In: a joint or an inference graph. Out: :class:`Regions`, with the parts of regions that run as one
call each. A node that reads a sum over all rows of a region, or a tangent, is of a later phase.
Where all gradients are multiples of one scalar tangent, forward computes them for a tangent of 1::

    cross_entropy(z, labels, reduction="sum")                     one phase: three products
    (log_softmax(z)[labels] - reference).sigmoid().log().mean()   two phases: four products
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxpass import messages
from fxpass.rows.alike import is_alike
from fxpass.rows.aten_calls import origin_of
from fxpass.rows.comparisons import COMPARISONS
from fxpass.rows.heads import (
    Head,
    backward_nodes,
    find_heads,
    plan_heads,
    readers_of,
    tangent_inputs,
)
from fxpass.rows.propagation import propagate, region_nodes
from fxpass.rows.reasons import FoundHead, found_heads
from fxpass.rows.rules import Rules
from fxpass.rows.sizes import example, numel, packet, shape
from fxpass.rows.tags import Stop
from fxpass.rows.tangents import META, degrees


@dataclass
class RegionCall:
    """The computation of one call.

    Attributes:
        phase: the number of its phase.
        results: the nodes that the call returns, in the order of the graph.
        body: the nodes that the call computes, in the order of the graph.
    """

    phase: int
    results: list[Node]
    body: list[Node]


@dataclass
class Regions:
    """The regions of a graph.

    Attributes:
        rules: the plans of the graph's nodes.
        heads: the products that have a plan.
        backward: the nodes of backward.
        parts: the calls, the earliest first.
        inside: the nodes of the regions that run in calls.
        factor: the tangent of which all gradients are multiples, if forward computes them.
        degrees: the degree of each node of the graph in ``factor``.
        declined: for each head that is left as it is, the reason.
        fused_heads: the heads in calls, for a report.
    """

    rules: Rules
    heads: list[Head]
    backward: set[Node]
    parts: list[RegionCall] = field(default_factory=list)
    inside: set[Node] = field(default_factory=set)
    factor: Node | None = None
    degrees: dict[Node, int | None] = field(default_factory=dict)
    declined: dict[Node, Stop] = field(default_factory=dict)
    fused_heads: list[FoundHead] = field(default_factory=list)


def find_regions(
    graph: Graph,
    least_mb: float,
    classes_first: bool,
    largest_only: bool,
    strategy: str,
    columns: bool = False,
) -> Regions | None:
    """Finds the regions of a graph; None if it has no head.

    Args:
        least_mb: the size of logits, in MiB, that are worth a loop.
        classes_first: the logits are ``[V, N]``.
        largest_only: only products with as many rows as the largest are heads.
        strategy: where gradients that forward can compute are computed: ``chunked``, in forward;
            ``tiled``, in backward; ``auto``, in forward, unless they take more memory than logits.
        columns: reductions over rows other than sums are of regions.
    """
    backward = backward_nodes(tangent_inputs(graph), graph)
    candidates = find_heads(graph, backward, least_mb, classes_first)
    if not candidates:
        return None
    if largest_only:
        rows = max(candidates, key=lambda head: numel(shape(head.node))).row_sizes
        candidates = [head for head in candidates if head.row_sizes == rows]
    rules = Rules(
        graph,
        classes=max(head.classes for head in candidates),
        large=min(numel(shape(head.node)) for head in candidates) // 4 + 1,
        weights={origin_of(head.weight) for head in candidates},
        hidden={origin_of(head.x) for head in candidates},
        alike=all(is_alike(head.node) for head in candidates),
        columns=columns,
    )
    regions = Regions(rules, plan_heads(rules, candidates), backward)
    propagate(rules, regions.heads, backward)
    backward |= backward_nodes(tangent_inputs(graph), graph)  # with those that rules have added
    inside = region_nodes(rules)
    if strategy == "chunked" or (strategy == "auto" and not _saves_much(regions)):
        _find_factor(regions, inside)
    component = _components(rules, inside)
    regions.inside = _fused_nodes(regions, inside, component)
    _find_parts(regions, inside, component)
    return regions


def _saves_much(regions: Regions) -> bool:
    """True if the weights' gradients that forward saves, one for each head and in f32 for fp16,
    exceed those that backward returns by more than the size of the logits."""
    heads_of: dict[Node, list[Head]] = {}
    for head in regions.heads:
        heads_of.setdefault(origin_of(head.weight), []).append(head)
    for heads in heads_of.values():
        tensor = example(heads[0].node)
        saved = 4 if tensor.dtype == torch.float16 else tensor.itemsize
        more = heads[0].hidden * (len(heads) * saved - tensor.itemsize)
        rows = sum(numel(shape(head.node)) // head.classes for head in heads)
        if more > rows * tensor.itemsize:
            return True
    return False


def _find_factor(regions: Regions, inside: set[Node]) -> None:
    """Sets the scalar tangent of which all gradients are multiples, if there is one."""
    graph = regions.rules.graph
    reached = [t for t in tangent_inputs(graph) if not readers_of(t, graph).isdisjoint(inside)]
    if len(reached) != 1 or numel(shape(reached[0])) != 1:
        return
    degree = degrees(regions.rules, graph, reached[0])
    if all(degree[node] is not None for node in inside):
        regions.factor = reached[0]
        regions.degrees = degree


def _phases(regions: Regions, inside: set[Node]) -> dict[Node, int]:
    """The phase of each node. The phase rises where a node outside of the regions reads a region's
    result, and where a region reads such a node. A tangent other than the factor is of the phase
    after all of forward."""
    rules = regions.rules
    starts = tangent_inputs(rules.graph)
    phase = dict[Node, int]()
    last = 0
    for in_backward in (False, True):
        for node in rules.graph.nodes:
            if node in starts:
                phase[node] = 0 if node is regions.factor else last
                continue
            if node in regions.backward and not in_backward:
                continue
            filled = node.op == "call_function" and node not in rules.plans
            if packet(node) in META or (filled and rules.fill_value(node) is not None):
                phase[node] = 0
            elif node in inside:
                phase[node] = max(
                    (
                        phase.get(ref.node, 0) + (ref.node in inside and ref.kind != "node")
                        for ref in rules.plans[node].refs
                    ),
                    default=0,
                )
            else:
                reads = node.all_input_nodes
                phase[node] = max((phase.get(a, 0) + (a in inside) for a in reads), default=0)
        last = 1 + max((phase[n] for n in inside if n in phase), default=0)
    return phase


def _returned_gradients(regions: Regions) -> set[Node]:
    """The nodes of backward that the graph returns: a gradient may have classes."""
    outputs = regions.rules.graph.output_node().args
    return regions.backward.intersection(pytree.tree_leaves(outputs))


def _fused_nodes(regions: Regions, inside: set[Node], component: dict[Node, Node]) -> set[Node]:
    """The nodes of the components that no reader of classes ends; notes the declined heads."""
    rules = regions.rules
    gradients = _returned_gradients(regions)
    stops: dict[Node, Stop] = {}
    for node in inside:
        if not rules.has_many(node):
            continue
        for user in node.users:
            filled = user.op == "call_function" and rules.fill_value(user) is not None
            harmless = packet(user) in META or filled or (user.op == "output" and node in gradients)
            if user not in inside and not harmless:
                stops.setdefault(component[node], _reader_stop(rules, node, user))
    heads = [head.node for head in regions.heads if head.node in inside]
    of_heads = {component[head] for head in heads}
    regions.declined = {h: stops[component[h]] for h in heads if component[h] in stops}
    if regions.declined:  # gradients alone save nothing
        headless = {c: Stop(messages.NO_HEAD) for c in component.values() if c not in of_heads}
        stops = headless | stops
    return {n for n in inside if component[n] not in stops}


def _find_parts(regions: Regions, inside: set[Node], component: dict[Node, Node]) -> None:
    """Sets the parts: a call for each component in each phase, and the heads in calls."""
    rules = regions.rules
    fused = regions.inside
    heads = [head for head in regions.heads if head.node in fused]
    regions.fused_heads = found_heads(rules, heads, fused, component, regions.backward)
    phase = _phases(regions, inside)
    gradients = _returned_gradients(regions)
    order = {node: i for i, node in enumerate(rules.graph.nodes)}
    needed = {
        n
        for n in fused
        if (not rules.has_many(n) or n in gradients)
        and not isinstance(rules.tags_of(n), list)
        and any(user not in inside or rules.is_sum(n) for user in n.users)
    }
    for p in sorted({phase[n] for n in fused}, reverse=True):
        for c in dict.fromkeys(component[n] for n in sorted(fused, key=order.__getitem__)):
            results = [n for n in needed if phase[n] == p and component[n] is c]
            if results:
                body = _part_body(rules, results, inside, phase, needed)
                results.sort(key=order.__getitem__)
                regions.parts.append(RegionCall(p, results, sorted(body, key=order.__getitem__)))
    regions.parts.reverse()


def _reader_stop(rules: Rules, node: Node, user: Node) -> Stop:
    """The reason for which a reader of a node with classes ends the region."""
    if (reason := rules.reasons.get(user)) is not None:
        return reason
    leaves = user.op == "output"
    stop = Stop(messages.LEAVES_GRAPH if leaves else messages.CLASSES_OF_ALL)
    stop.node = node if leaves else user
    return stop


def _part_body(
    rules: Rules,
    results: Sequence[Node],
    inside: set[Node],
    phase: dict[Node, int],
    needed: set[Node],
) -> set[Node]:
    """The nodes that a part computes for its results. Each phase recomputes values with classes,
    and the rows that these are compared with. Other rows of an earlier phase are handed over: they
    are added to ``needed``, the results of all parts."""
    current = phase[results[0]]
    body: dict[Node, bool] = {}  # True for a node that logits are compared with
    todo = [(node, False) for node in results]
    while todo:
        node, compared = todo.pop()
        if body.get(node, False) >= compared and node in body:
            continue
        body[node] = compared
        compared |= packet(node) in COMPARISONS and rules.has_classes(node)
        for ref in rules.plans[node].refs:
            if ref.kind != "node":
                continue
            recomputed = rules.has_classes(ref.node) or isinstance(rules.tags_of(ref.node), list)
            if recomputed or compared or (ref.node in inside and phase[ref.node] == current):
                todo.append((ref.node, compared and not recomputed))
            elif ref.node in inside:
                needed.add(ref.node)
    return set(body)


def _components(rules: Rules, inside: set[Node]) -> dict[Node, Node]:
    """For each node, the node that stands for its connected component."""
    parent = {n: n for n in inside}

    def representative(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in inside:
        for ref in rules.plans[node].refs:
            if ref.kind == "node" and ref.node in inside:
                parent[representative(node)] = representative(ref.node)
    return {node: representative(node) for node in inside}
