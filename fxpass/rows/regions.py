"""Finds the regions of a joint graph, between the products of heads and what has no classes.

In: a joint or an inference graph. Out: the parts of regions that run as one call each, the earliest
first; :class:`Found`. A node that reads a sum over all rows of a region, or a tangent, is of a
later phase. Where all of backward is a number of one tangent times known values, it is computed in
forward for a tangent of 1::

    cross_entropy(z, labels, reduction="sum")                     one phase: three products
    (log_softmax(z)[labels] - reference).sigmoid().log().mean()   two phases: four products
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxpass.rows import (  # noqa: F401  rules
    collectives,
    indexing,
    joins,
    parts,
    pointwise,
    products,
    views,
)
from fxpass.rows.alike import is_alike
from fxpass.rows.comparisons import COMPARISONS
from fxpass.rows.heads import Head, backward_of, heads, reading, seeded, tangents
from fxpass.rows.reasons import FoundHead, found_heads
from fxpass.rows.rules import A, Rules, base_of
from fxpass.rows.sizes import key, numel, packet, shape, value
from fxpass.rows.tags import Stop, Tag
from fxpass.rows.tangents import META, degrees

AGAIN = 5  # as often, rules of backward may find what others have tagged


@dataclass
class RegionCall:
    """The computation of one call.

    Attributes:
        phase: the number of its phase.
        results: the nodes that leave, in the order of the graph.
        body: the nodes that run, in the order of the graph.
    """

    phase: int
    results: list[Node]
    body: list[Node]


@dataclass
class Found:
    """The regions of a graph.

    Attributes:
        rules: the plans of its nodes.
        parts: the calls.
        inside: the nodes of the regions that run in calls.
        factor: the tangent for which gradients are computed in forward; None if there is none.
        degrees: of all nodes in it.
        declined: what ended the region of a head that is left as it is.
        heads: the products.
        later: the nodes of backward.
        kept: the heads that are in calls, for a report.
    """

    rules: Rules
    parts: list[RegionCall] = field(default_factory=list)
    inside: set[Node] = field(default_factory=set)
    factor: Node | None = None
    degrees: dict[Node, int | None] = field(default_factory=dict)
    declined: dict[Node, Stop] = field(default_factory=dict)
    heads: list[Head] = field(default_factory=list)
    later: set[Node] = field(default_factory=set)
    kept: list[FoundHead] = field(default_factory=list)


def regions(
    graph: Graph,
    least_mb: float,
    first: bool = False,
    largest: bool = False,
    strategy: str = "auto",
) -> Found | None:
    """Finds the regions of a graph; None if it has no head.

    Args:
        least_mb: the size of logits, in MiB, that are worth a loop.
        first: whether classes come before rows.
        largest: whether only products with as many rows as the largest are heads.
        strategy: where gradients are computed that forward may know: ``chunked``, in forward;
            ``tiled``, in backward; ``auto``, in forward, unless they take more memory than logits.
    """
    starts = tangents(graph)
    later = backward_of(starts, graph)
    candidates = heads(graph, later, least_mb, first)
    if not candidates:
        return None
    if largest:
        rows = max(candidates, key=lambda head: numel(shape(head.node))).rows
        candidates = [head for head in candidates if head.rows == rows]
    rules = Rules(
        graph,
        classes=max(head.classes for head in candidates),
        large=min(numel(shape(head.node)) for head in candidates) // 4 + 1,
        weights={base_of(head.weight) for head in candidates},
        hidden={base_of(head.x) for head in candidates},
        alike=all(is_alike(head.node) for head in candidates),
    )
    found = Found(rules, later=later, heads=seeded(rules, candidates))
    _propagate(found, later)
    inside = _inside(rules, graph)
    if strategy == "chunked" or (strategy == "auto" and not _saves_much(found)):
        _factor(found, graph, starts, inside)
    _parts(found, graph, inside, starts, later)
    return found


def _propagate(found: Found, later: set[Node]) -> None:
    """Plans what rules reach from the heads, forwards, and backwards from gradients."""
    rules = found.rules
    ends: set[Node] = set()  # hidden values: the model's backward is not of the region
    for _ in range(AGAIN):
        before = len(rules.plans)
        for node in rules.graph.nodes:
            if node.op != "call_function" or node in rules.plans or packet(node) in META:
                continue
            if rules.fill(node) is not None:
                continue
            tagged = [a for a in node.all_input_nodes if rules.tag(a) is not None]
            if not tagged and node in later and packet(node) is A.mm:
                _pull_gradient(found, node)
            elif tagged and not all(a in ends for a in tagged):
                try:
                    rules.apply(node)
                except Stop as stop:
                    rules.reasons[node] = stop
                    continue
                weights = any(map(rules.is_weight, node.all_input_nodes))
                if packet(node) in (A.mm, A.bmm) and weights and not rules.has_classes(node):
                    ends.add(node)
        if len(rules.plans) == before:
            return


def _pull_gradient(found: Found, node: Node) -> None:
    """A gradient of logits that is made of rows alone, as of picked logits: what a head's weight or
    hidden states are multiplied by."""
    rules = found.rules
    a, b = node.args[:2]
    for head in found.heads:
        tag = rules.tag_of(head.node)
        if tag is None or len(tag.letters) != 2:
            continue
        n, v = (key(shape(head.node)[i]) for i in ((1, 0) if head.first else (0, 1)))
        for x, other, letters in ((a, b, "rc"), (b, a, "cr"), (a, b, "cr"), (b, a, "rc")):
            if not isinstance(x, Node) or x in rules.plans or x.op != "call_function":
                continue
            if numel(shape(x)) < rules.large or not rules.is_pulled(x):
                continue
            fits = tuple(map(key, shape(x))) == ((n, v) if letters == "rc" else (v, n))
            if fits and (rules.is_weight(other) or base_of(other) is base_of(head.x)):
                try:
                    rules.pull(x, Tag(letters, tag.view))
                except Stop as stop:
                    rules.reasons[x] = stop


def _inside(rules: Rules, graph: Graph) -> set[Node]:
    """The nodes with classes, sums over their rows, and rows that are read where classes are."""
    reads = {
        node: [ref.node for ref in plan.refs if ref.kind == "node"]
        for node, plan in rules.plans.items()
    }
    seeds = {
        node
        for node, read in reads.items()
        if any(map(rules.has_classes, [node, *read])) or rules.is_sum(node)
    }
    wanted: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        if node in reads and (node in seeds or not wanted.isdisjoint(node.users)):
            wanted.add(node)
    inside: set[Node] = set()
    for node in graph.nodes:
        some = [n for n in reads.get(node, ()) if n in inside]
        of_several = any(isinstance(rules.tag(n), list) for n in some)
        if node in seeds or of_several or (node in wanted and some):
            inside.add(node)
    return inside


def _saves_much(found: Found) -> bool:
    """Whether the weights' gradients that forward saves, one for each head and in f32 for fp16,
    exceed those that backward returns by more than the logits take."""
    of_weight: dict[Node, list[Head]] = {}
    for head in found.heads:
        if head.node in found.rules.plans:
            of_weight.setdefault(base_of(head.weight), []).append(head)
    for some in of_weight.values():
        tensor = value(some[0].node)
        saved = 4 if tensor.dtype == torch.float16 else tensor.itemsize
        more = some[0].hidden * (len(some) * saved - tensor.itemsize)
        rows = sum(numel(shape(head.node)) // head.classes for head in some)
        if more > rows * tensor.itemsize:
            return True
    return False


def _factor(found: Found, graph: Graph, starts: list[Node], inside: set[Node]) -> None:
    """The one tangent that gradients are a multiple of, if there is one."""
    reached = [t for t in starts if not reading(t, graph).isdisjoint(inside)]
    if len(reached) != 1 or numel(shape(reached[0])) != 1:
        return
    degree = degrees(found.rules, graph, reached[0])
    if all(degree[node] is not None for node in inside):
        found.factor = reached[0]
        found.degrees = degree


def _phases(
    found: Found, graph: Graph, inside: set[Node], starts: list[Node], later: set[Node]
) -> dict[Node, int]:
    """The phase of each node: one more for each way out of the regions through sums over rows;
    what reads a tangent that is no factor is of the last."""
    rules = found.rules
    phase = dict[Node, int]()
    last = 0
    for backward in (False, True):
        for node in graph.nodes:
            if node in starts:
                phase[node] = 0 if node is found.factor else last
                continue
            if node in later and not backward:
                continue
            filled = node.op == "call_function" and node not in rules.plans
            if packet(node) in META or (filled and rules.fill(node) is not None):
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


def _parts(
    found: Found,
    graph: Graph,
    inside: set[Node],
    starts: list[Node],
    later: set[Node],
) -> None:
    rules = found.rules
    phase = _phases(found, graph, inside, starts, later)
    component = _components(rules, inside)
    # gradients of operands with classes leave so; what forward returns reads no tangent
    gradients = later.intersection(pytree.tree_leaves(graph.output_node().args))
    bad: dict[Node, Stop] = {}
    for node in inside:
        if not rules.has_many(node):
            continue
        for user in node.users:
            filled = user.op == "call_function" and rules.fill(user) is not None
            harmless = packet(user) in META or filled or (user.op == "output" and node in gradients)
            if user not in inside and not harmless:
                bad.setdefault(component[node], _why(rules, node, user))
    of_heads = {component[head.node] for head in found.heads if head.node in inside}
    for head in found.heads:
        if head.node in inside and component[head.node] in bad:
            found.declined[head.node] = bad[component[head.node]]
    if found.declined:  # gradients alone save nothing
        bad |= {
            c: Stop("has no head") for c in component.values() if c not in of_heads and c not in bad
        }
    live = {n for n in inside if component[n] not in bad}
    found.inside = live
    kept = [head for head in found.heads if head.node in live]
    found.kept = found_heads(rules, graph, kept, live, component, later)
    order = {node: i for i, node in enumerate(graph.nodes)}
    needed = {
        n
        for n in live
        if (not rules.has_many(n) or n in gradients)
        and not isinstance(rules.tag(n), list)
        and any(user not in inside for user in n.users)
    }
    for p in sorted({phase[n] for n in live}, reverse=True):
        for c in dict.fromkeys(component[n] for n in sorted(live, key=order.__getitem__)):
            results = [n for n in needed if phase[n] == p and component[n] is c]
            if results:
                body = _body(rules, results, inside, phase, p, needed)
                in_order = [sorted(some, key=order.__getitem__) for some in (results, body)]
                found.parts.append(RegionCall(p, *in_order))
    found.parts.reverse()


def _why(rules: Rules, node: Node, user: Node) -> Stop:
    """Why what reads a node with classes ends the region."""
    if (found := rules.reasons.get(user)) is not None:
        return found
    leaves = user.op == "output"
    stop = Stop("leaves the graph with its classes" if leaves else "reads classes of all rows")
    stop.node = node if leaves else user
    return stop


def _body(
    rules: Rules,
    results: Sequence[Node],
    inside: set[Node],
    phase: dict[Node, int],
    now: int,
    needed: set[Node],
) -> set[Node]:
    """The nodes that run for some results: each phase computes values with classes again, and the
    rows that they are compared with; other rows of an earlier phase are handed over (and are
    ``needed`` there)."""
    body: dict[Node, bool] = {}  # whether a node is compared
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
            again = rules.has_classes(ref.node) or isinstance(rules.tag(ref.node), list)
            if again or compared or (ref.node in inside and phase[ref.node] == now):
                todo.append((ref.node, compared and not again))
            elif ref.node in inside:
                needed.add(ref.node)
    return set(body)


def _components(rules: Rules, inside: set[Node]) -> dict[Node, Node]:
    """For each node, one node that stands for all that it is connected with."""
    parent = {n: n for n in inside}

    def find(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in inside:
        for ref in rules.plans[node].refs:
            if ref.kind == "node" and ref.node in inside:
                parent[find(node)] = find(ref.node)
    return {node: find(node) for node in inside}
