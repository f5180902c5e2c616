"""Decides which logits that leave Dynamo's graph are deferred, and takes them out of it.

In: a Dynamo graph and settings. Out: the graph without these outputs, and :class:`DeferredOutputs`.
Of logits that the graph reduces as well, the pass on the joint graph has to make a call, or they
exist anyway: their products are ``needed``. Logits that nothing else in the graph reads are
deferred alone::

    %z = linear(%h, %w);  %loss = cross_entropy(%z, %t);  return (%loss, %z)    needed: %z
    %z = linear(%h, %w);  return (%z,)                                          alone
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from fxpass.deferred.programs import Programs
from fxpass.graph.calls import storage
from fxpass.graph.functions import CASTS, function_of, out_of_place, reads_values
from fxpass.graph.modes import Mode, modes_of
from fxpass.graph.nodes import needs_gradient, value
from fxpass.graph.placements import placement_name
from fxpass.graph.region import Region
from fxpass.graph.source import source_line
from fxpass.plan.plan import size
from fxpass.rewrite.copies import copied
from fxpass.rewrite.heads import (
    bytes_of,
    columns,
    hidden_of,
    is_multiplied,
    may_be_large,
    too_small,
    widens,
)
from fxpass.rewrite.leaving import (
    VIEWS,
    Chain,
    is_as_large,
    is_computable,
    leaving,
    made_of,
    split,
    with_casts,
)
from fxpass.rewrite.matches import RegionMatch
from fxpass.rewrite.outputs import Deferral, Restore, as_compiled, defer_outputs, recipe_of
from fxpass.settings import Settings

Recipes = dict[Node, Deferral]  # by the output of the graph


@dataclass(frozen=True)
class DeferredOutputs:
    """The deferred logits of a graph.

    Attributes:
        matches: of the logits that nothing in the graph reduces.
        products: the names of all products of deferred logits.
        needed: of those whose logits the graph reduces.
        returned: for products whose logits are returned with gradients, without a loss of them, and
            are kept: what to do.
        mode: what became of the logits: ``defer`` or ``drop``.
        restore: wraps the compiled graph, so that it returns the outputs that Dynamo expects.
        untouched: the graph as it was, where something is deferred.
    """

    matches: tuple[RegionMatch, ...] = ()
    products: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()
    returned: Mapping[Node, str] = field(default_factory=dict)
    mode: str = "defer"
    restore: Restore = as_compiled
    untouched: Graph | None = None


@dataclass
class _Head:
    """Products whose logits leave together, in some outputs of the graph.

    Attributes:
        chains: by the output.
        products: of all chains.
        reduced: whether the graph reads the logits otherwise.
    """

    chains: dict[Node, Chain]
    products: set[Node]
    reduced: bool = False

    @property
    def nodes(self) -> set[Node]:
        """Those of all chains."""
        return {n for chain in self.chains.values() for n in chain.nodes}


def defer_logits(
    region: Region, settings: Settings, programs: Programs, kept: Collection[str] = ()
) -> DeferredOutputs:
    """Replaces outputs of a graph that are logits by what computes them.

    Args:
        region: the outermost.
        settings: the user's.
        programs: compiles functions of deferred logits.
        kept: the names of products whose logits have to exist.
    """
    graph = region.module.graph
    drop = settings.logits == "drop"
    large = [n for n in graph.nodes if may_be_large(n, settings.min_logits_mb)]
    large = [n for n in large if not is_multiplied(region, n)]
    modes = modes_of(region)
    recipes = Recipes()
    alone = list[_Head]()
    reduced = list[_Head]()
    returned = dict[Node, str]()
    for head in _heads(leaving(graph.output_node(), large, drop=drop)):
        if too_small(sorted(head.products), settings.min_logits_mb):
            continue
        if any(modes[n].transforms for chain in head.chains.values() for n in chain.nodes):
            continue
        if not (head.reduced or all(_leaves_whole(region, n, head) for n in head.products)):
            continue
        exist = any(n.name in kept for n in head.products)
        found = {} if exist else _recipes(region, head, modes, settings, programs)
        # without their rows, nothing of logits that are deferred alone would be answered
        if found and (head.reduced or all(one.recipe.rows for one in found.values())):
            recipes |= found
            (reduced if head.reduced else alone).append(head)
        elif not head.reduced and any(map(needs_gradient, head.chains)):
            returned |= {n: _RETURNED.format(size(bytes_of(n))) for n in head.products}
    if not recipes:
        return DeferredOutputs(returned=returned)
    untouched = copied(graph)
    try:
        restore = defer_outputs(region.module, recipes, drop=drop)
        for node in sorted({n for h in (*alone, *reduced) for n in h.nodes}, reverse=True):
            if not node.users:
                graph.erase_node(node)
        region.module.recompile()
    except Exception:
        region.module.graph = untouched
        raise
    names = [frozenset(n.name for h in some for n in h.products) for some in (alone, reduced)]
    mode = "drop" if drop else "defer"
    matches = tuple(_match(head, mode) for head in alone)
    return DeferredOutputs(
        matches, names[0] | names[1], names[1], returned, mode, restore, untouched
    )


def _heads(chains: Mapping[Node, Chain]) -> list[_Head]:
    """The products that chains share, with these chains."""
    heads: list[_Head] = []
    for node, chain in chains.items():
        one = _Head({node: chain}, {*chain.products})
        for other in [h for h in heads if not h.products.isdisjoint(one.products)]:
            heads.remove(other)
            one = _Head({**other.chains, **one.chains}, other.products | one.products)
        heads.append(one)
    for head in heads:
        users = {u for n in head.nodes for u in n.users if reads_values(u, n)} - head.nodes
        head.reduced = any(user.op != "output" for user in users)
    return heads


def _recipes(
    region: Region,
    head: _Head,
    modes: Mapping[Node, Mode],
    settings: Settings,
    programs: Programs,
) -> Recipes:
    """The recipes of logits that leave; none if one of them has to exist."""
    output = region.module.graph.output_node()
    left = head.chains
    # the loss is computed from the logits, which are not those of a training step, whose metrics
    # leave the graph before the loss
    drop = settings.logits == "drop"
    inside = made_of(head.products)
    trained = any(map(needs_gradient, head.products))
    trained = trained and any(needs_gradient(n) for n in output.all_input_nodes if n in inside)
    tested = head.reduced and not trained and not any(map(needs_gradient, left))
    if settings.logits == "keep" or (settings.logits == "auto" and tested):
        return {}
    others = [n for n in output.all_input_nodes if n not in left]
    if any(n in inside and is_as_large(n, head.products) for n in others):
        return {}  # what the joint graph would not fuse
    if not drop and not all(is_computable(output, n, c, modes, others) for n, c in left.items()):
        return {}
    roots = dict[Node, Deferral]()
    made = Recipes()
    for node, chain in left.items():
        nodes = with_casts(chain, output, drop=drop)
        root, after = (node, ()) if drop else split(node, nodes, chain)
        if root not in roots:
            before = [n for n in nodes if n not in after]
            roots[root] = recipe_of(root, before, chain.products, not head.reduced, programs)
        made[node] = roots[root].then(root, after) if after else roots[root]
    shared = {(storage(n), deferral.recipe) for n, deferral in made.items()}
    if not drop and len(shared) > len({memory for memory, _ in shared}):
        return {}  # two results of the graph share the memory of its logits
    return made


# ---------------------------------------------------------------- logits that are returned

_RETURNED = (
    "the graph returns its logits, {}, with gradients, and has no loss of them: compile the "
    "function that computes the loss, or pass labels to the model"
)
# What may be done with logits that are returned: a scale, a soft-cap.
_SCALES = {"mul", "div", "add", "sub", "neg", "tanh", *CASTS, *VIEWS}
# Outputs of a vocabulary for each hidden value, or in all; a gated MLP has up to seven for each.
_WIDE = 7.5
_MANY = 8192


def _leaves_whole(region: Region, product: Node, head: _Head) -> bool:
    """Whether a product that nothing reduces is a head whose loss is computed after the graph: it
    has as many outputs as a vocabulary, and all that is done with them is to return them, scaled or
    soft-capped."""
    ended = getattr(region.module, "compile_subgraph_reason", None)
    if ended is not None and ended.reason.startswith("DDPOptimizer"):
        return False  # the loss is in another part of the graph
    scaled = all(
        n in head.products or placement_name(n.target) or out_of_place(function_of(n)) in _SCALES
        for n in head.nodes
    )
    if not (scaled and widens(product)):
        return False
    if columns(product) >= _WIDE * hidden_of(product):
        return True
    # a hidden layer is returned by a graph that ends early, or that has nothing else
    early = ended is not None and ended.graph_break
    first = any(n.op == "placeholder" for n in product.all_input_nodes[:1])
    return columns(product) >= _MANY and not (early or first)


def _match(head: _Head, mode: str) -> RegionMatch:
    """A report's lines of logits that are deferred alone."""
    products = sorted(head.products)
    return RegionMatch(
        source_line(products[0]),
        tuple((math.prod(value(n).shape[:-1]), value(n).shape[-1]) for n in products),
        tuple(value(n).itemsize for n in products),
        tuple(dict.fromkeys(function_of(n) for n in sorted(head.nodes - head.products))),
        logits_mode=mode,
    )
