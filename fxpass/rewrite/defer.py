"""Decides which logits that leave Dynamo's graph are deferred, and removes them from its outputs.

In: a Dynamo graph and settings. Out: the graph without these outputs, and :class:`DeferredOutputs`.
If the graph also reduces the logits, they exist unless the pass on the joint graph makes a call of
their head: their products are ``needed``. Logits that nothing else in the graph reads are deferred
alone::

    %z = linear(%h, %w);  %loss = cross_entropy(%z, %t);  return (%loss, %z)    needed: %z
    %z = linear(%h, %w);  return (%z,)                                          alone
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from fxpass import messages
from fxpass.deferred.programs import Programs
from fxpass.graph.calls import storage
from fxpass.graph.functions import CASTS, function_of, out_of_place, reads_values
from fxpass.graph.modes import Mode, modes_of
from fxpass.graph.nodes import needs_gradient, value
from fxpass.graph.placements import placement_name
from fxpass.graph.region import Region
from fxpass.graph.source import source_line
from fxpass.plan.budget import size_text
from fxpass.rewrite.copies import copied
from fxpass.rewrite.heads import (
    bytes_of,
    class_count,
    has_head_shape,
    hidden_size,
    is_multiplied,
    may_be_large,
    why_not_worth,
)
from fxpass.rewrite.matches import RegionMatch
from fxpass.rewrite.outputs import Deferral, Restore, as_compiled, defer_outputs, recipe_of
from fxpass.rewrite.paths import (
    VIEWS,
    LogitsPath,
    SplitPath,
    dependents_of,
    is_as_large,
    is_computable,
    paths_to,
    split_before_views,
    with_casts,
)
from fxpass.settings import Settings

Recipes = dict[Node, Deferral]  # by the output of the graph


@dataclass(frozen=True)
class DeferredOutputs:
    """The deferred logits of a graph.

    Attributes:
        matches: the report's lines of logits that nothing in the graph reduces.
        products: the names of all products of deferred logits.
        needed: the names of the products whose logits the graph reduces.
        returned: advice to the user for each product whose logits are returned with gradients and
            materialised, while the graph has no loss of them.
        mode: ``defer`` or ``drop``.
        restore: wraps the compiled graph, so that it returns the outputs that Dynamo expects.
        untouched: a copy of the graph before its outputs were deferred.
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
        paths: the path to each output.
        products: the products of all paths.
        reduced: whether another node of the graph reads the logits.
    """

    paths: dict[Node, LogitsPath]
    products: set[Node]
    reduced: bool = False

    @property
    def nodes(self) -> set[Node]:
        """The nodes of all paths."""
        return {n for path in self.paths.values() for n in path.nodes}


def defer_logits(
    region: Region, settings: Settings, programs: Programs, materialised: Collection[str] = ()
) -> DeferredOutputs:
    """Replaces outputs of a graph that are logits by the inputs of their recipes.

    Args:
        region: the outermost region.
        settings: the user's settings.
        programs: compiles functions of deferred logits.
        materialised: the names of products whose logits have to exist.
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
    for head in _heads(paths_to(graph.output_node(), large, drop=drop)):
        if why_not_worth(sorted(head.products), settings.min_logits_mb):
            continue
        if any(modes[n].transforms for n in head.nodes):
            continue
        if not (head.reduced or all(_leaves_whole(region, n, head) for n in head.products)):
            continue
        exist = any(n.name in materialised for n in head.products)
        found = {} if exist else _recipes(region, head, modes, settings, programs)
        # no loss of logits that are deferred alone is fused if their rows are not separate
        if found and (head.reduced or all(deferral.recipe.rows for deferral in found.values())):
            recipes |= found
            (reduced if head.reduced else alone).append(head)
        elif not head.reduced and any(map(needs_gradient, head.paths)):
            returned |= {
                n: messages.RETURNED.format(size=size_text(bytes_of(n))) for n in head.products
            }
    if not recipes:
        return DeferredOutputs(returned=returned)
    untouched = copied(graph)
    try:
        restore = defer_outputs(region.module, recipes, drop=drop)
        for node in sorted({n for head in (*alone, *reduced) for n in head.nodes}, reverse=True):
            if not node.users:
                graph.erase_node(node)
        region.module.recompile()
    except Exception:
        region.module.graph = untouched
        raise
    mode = "drop" if drop else "defer"
    return DeferredOutputs(
        matches=tuple(_match(head, mode) for head in alone),
        products=_names([*alone, *reduced]),
        needed=_names(reduced),
        returned=returned,
        mode=mode,
        restore=restore,
        untouched=untouched,
    )


def _names(heads: Iterable[_Head]) -> frozenset[str]:
    return frozenset(product.name for head in heads for product in head.products)


def _heads(paths: Mapping[Node, LogitsPath]) -> list[_Head]:
    """Paths that share products, as one head."""
    heads: list[_Head] = []
    for node, path in paths.items():
        head = _Head({node: path}, {*path.products})
        for other in [h for h in heads if not h.products.isdisjoint(head.products)]:
            heads.remove(other)
            head = _Head({**other.paths, **head.paths}, other.products | head.products)
        heads.append(head)
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
    paths = head.paths
    drop = settings.logits == "drop"
    # in a training step, a metric may leave the graph without a gradient, and the loss with one
    dependents = dependents_of(head.products)
    trained = any(map(needs_gradient, head.products))
    trained = trained and any(needs_gradient(n) for n in output.all_input_nodes if n in dependents)
    tested = head.reduced and not trained and not any(map(needs_gradient, paths))
    if settings.logits == "keep" or (settings.logits == "auto" and tested):
        return {}
    others = [n for n in output.all_input_nodes if n not in paths]
    if any(n in dependents and is_as_large(n, head.products) for n in others):
        return {}  # the joint graph would not fuse the head
    if not drop and not all(is_computable(output, n, p, modes, others) for n, p in paths.items()):
        return {}
    deferrals = dict[Node, Deferral]()  # by the node of the logits
    made = Recipes()
    for node, path in paths.items():
        nodes = with_casts(path, output, drop=drop)
        parts = SplitPath(node) if drop else split_before_views(node, nodes, path)
        if parts.logits not in deferrals:
            before = [n for n in nodes if n not in parts.tail]
            deferrals[parts.logits] = recipe_of(
                parts.logits, before, path.products, not head.reduced, programs
            )
        deferral = deferrals[parts.logits]
        made[node] = deferral.with_tail(parts) if parts.tail else deferral
    shared = {(storage(n), deferral.recipe) for n, deferral in made.items()}
    if not drop and len(shared) > len({memory for memory, _ in shared}):
        return {}  # two results of the graph share the memory of its logits
    return made


# ---------------------------------------------------------------- logits that are returned

# Functions between a head and logits that are returned: a scale, a soft-cap.
_SCALES = {"mul", "div", "add", "sub", "neg", "tanh", *CASTS, *VIEWS}
# A head has this many classes for each hidden value (a gated MLP has up to seven outputs for each),
# or in all.
_CLASSES_PER_HIDDEN = 7.5
_CLASSES = 8192


def _leaves_whole(region: Region, product: Node, head: _Head) -> bool:
    """True if a product that nothing reduces is a head whose loss is computed after the graph: it
    has as many outputs as a vocabulary, and the graph returns them, scaled or soft-capped at most.
    """
    ended = getattr(region.module, "compile_subgraph_reason", None)
    if ended is not None and ended.reason.startswith("DDPOptimizer"):
        return False  # the loss is in another part of the graph
    scaled = all(
        n in head.products or placement_name(n.target) or out_of_place(function_of(n)) in _SCALES
        for n in head.nodes
    )
    if not (scaled and has_head_shape(product)):
        return False
    if class_count(product) >= _CLASSES_PER_HIDDEN * hidden_size(product):
        return True
    # a hidden layer is returned by a graph that ends early, or that has nothing else
    early = ended is not None and ended.graph_break
    first = any(n.op == "placeholder" for n in product.all_input_nodes[:1])
    return class_count(product) >= _CLASSES and not (early or first)


def _match(head: _Head, mode: str) -> RegionMatch:
    """A report's lines of logits that are deferred alone."""
    products = sorted(head.products)
    return RegionMatch(
        source=source_line(products[0]),
        shapes=tuple((math.prod(value(n).shape[:-1]), value(n).shape[-1]) for n in products),
        itemsizes=tuple(value(n).itemsize for n in products),
        operations=tuple(dict.fromkeys(map(function_of, sorted(head.nodes - head.products)))),
        logits_mode=mode,
    )
