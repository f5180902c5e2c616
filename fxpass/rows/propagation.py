"""Plans the nodes of a joint graph by rules, starting from the products of heads.

In: rules with the plans of heads. Out: the plans of all nodes that rules reach, and the nodes that
are of regions.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from fxpass.rows import (  # noqa: F401  rules
    collectives,
    indexing,
    joins,
    parts,
    pointwise,
    products,
    views,
)
from fxpass.rows.aten_calls import A, origin_of
from fxpass.rows.heads import Head
from fxpass.rows.rules import Rules
from fxpass.rows.sizes import key, numel, packet, shape
from fxpass.rows.tags import Stop, Tag
from fxpass.rows.tangents import META

MAX_ROUNDS = 5  # of planning: rules of backward read tags that an earlier round has found


def propagate(rules: Rules, heads: Sequence[Head], backward: set[Node]) -> None:
    """Plans the nodes that depend on heads, and gradients of logits that the heads' gradients read.

    Args:
        rules: has the plans of the heads; the other plans are added.
        heads: the heads.
        backward: the nodes of backward.
    """
    ends: set[Node] = set()  # gradients of hidden states: the model's backward is of no region
    for _ in range(MAX_ROUNDS):
        before = len(rules.plans)
        for node in rules.graph.nodes:
            if node.op != "call_function" or node in rules.plans or packet(node) in META:
                continue
            if rules.fill_value(node) is not None:
                continue
            tagged = [a for a in node.all_input_nodes if rules.tags_of(a) is not None]
            if not tagged and node in backward and packet(node) is A.mm:
                _pull_gradient(rules, heads, node)
            elif tagged and not all(a in ends for a in tagged):
                try:
                    rules.plan_node(node)
                except Stop as stop:
                    rules.reasons[node] = stop
                    continue
                weights = any(map(rules.is_weight, node.all_input_nodes))
                if packet(node) in (A.mm, A.bmm) and weights and not rules.has_classes(node):
                    ends.add(node)
        if len(rules.plans) == before:
            return


def _pull_gradient(rules: Rules, heads: Sequence[Head], node: Node) -> None:
    """Plans a gradient of logits that is computed from rows alone, such as a picked logit's, and is
    a factor of a head's gradient."""
    a, b = node.args[:2]
    for head in heads:
        tag = rules.tag_of(head.node)
        if tag is None or len(tag.letters) != 2:
            continue
        n, v = map(key, reversed(shape(head.node)) if head.classes_first else shape(head.node))
        for x, other, letters in ((a, b, "rc"), (b, a, "cr"), (a, b, "cr"), (b, a, "rc")):
            if not isinstance(x, Node) or x in rules.plans or x.op != "call_function":
                continue
            if numel(shape(x)) < rules.large or not rules.should_pull(x):
                continue
            fits = tuple(map(key, shape(x))) == ((n, v) if letters == "rc" else (v, n))
            if fits and (rules.is_weight(other) or origin_of(other) is origin_of(head.x)):
                try:
                    rules.pull(x, Tag(letters, tag.view))
                except Stop as stop:
                    rules.reasons[x] = stop


def region_nodes(rules: Rules) -> set[Node]:
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
    for node in reversed(list(rules.graph.nodes)):
        if node in reads and (node in seeds or not wanted.isdisjoint(node.users)):
            wanted.add(node)
    inside: set[Node] = set()
    for node in rules.graph.nodes:
        some = [n for n in reads.get(node, ()) if n in inside]
        of_several = any(isinstance(rules.tags_of(n), list) for n in some)
        if node in seeds or of_several or (node in wanted and some):
            inside.add(node)
    return inside
