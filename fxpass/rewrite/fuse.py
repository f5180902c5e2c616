"""Finds heads in a graph of Dynamo, and defers their logits that leave it.

In: a region of a Dynamo graph. Out: a :class:`Fused`, with a :class:`RegionMatch` for each region
that the pass on the joint graph may fuse (:mod:`fxpass.rows`), and why other products are no heads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpass.capture.capture import Captured, capture
from fxpass.capture.heads import Costs, bytes_of, may_be_large, too_small
from fxpass.capture.rejections import elsewhere, leaves_whole
from fxpass.capture.slice import Scope, slice_of
from fxpass.graph.calls import storage
from fxpass.graph.hazards import writers_in
from fxpass.graph.modes import modes_of
from fxpass.graph.nodes import NoMatch, hint, needs_gradient
from fxpass.graph.region import CHECKPOINTS, Region
from fxpass.graph.source import source_line
from fxpass.plan import worth
from fxpass.rewrite.copies import copied
from fxpass.rewrite.leaving import deferred_outputs, split
from fxpass.rewrite.matches import RegionMatch, match_of
from fxpass.rewrite.outputs import Deferral, Restore, as_compiled, both, defer_outputs, recipe_of
from fxpass.settings import Settings

log = logging.getLogger(__name__)
Recipes = dict[Node, Deferral]  # by the output of the graph


@dataclass(frozen=True)
class Later:
    """A region that the pass on the joint graph may fuse.

    Attributes:
        match: what a report says if it does.
        heads: the names of the products.
        inside: the names of all its nodes.
    """

    match: RegionMatch
    heads: tuple[str, ...]
    inside: tuple[str, ...] = ()


@dataclass
class Fused:
    """What was fused in a graph.

    Attributes:
        matches: in the order in which they were found.
        later: what is left for the joint graph.
        restore: wraps the compiled graph, so that it returns the outputs that Dynamo expects.
        reasons: for other products, by name, why they are no heads.
        checkpoints: the names of the calls of checkpoints that read logits.
    """

    matches: list[RegionMatch] = field(default_factory=list)
    later: list[Later] = field(default_factory=list)
    restore: Restore = as_compiled
    reasons: dict[str, NoMatch] = field(default_factory=dict)
    checkpoints: set[str] = field(default_factory=set)


def fuse(region: Region, settings: Settings, among: Collection[Node] = ()) -> Fused:
    """Rewrites the heads of a graph.

    Args:
        region: the region of the graph.
        settings: the user's.
        among: where not empty, one head of each row region is one of these.
    """
    fused = Fused()
    if not region.plain or region.backward:
        return fused
    nodes = region.module.graph.nodes
    candidates = [n.name for n in nodes if may_be_large(n, settings.min_logits_mb)]
    todo = [n.name for n in nodes if n.name in candidates and (not among or n in among)]
    fusing: _Fusing | None = None
    while todo:
        try:
            # what is known of a graph takes long to find: once, until the graph changes
            fusing = fusing or _Fusing(region, settings, fused, candidates)
            done = fusing.head(todo[0])
        except Exception:  # an unforeseen program runs without the rewrite
            log.warning("the search for heads failed", exc_info=True)
            break
        todo = [name for name in todo if name not in done]
        if fusing.untouched is not None:
            present = {n.name for n in region.module.graph.nodes}.difference(done)
            todo = [name for name in todo if name in present]
            candidates = [name for name in candidates if name in present]
            fusing = None
    return fused


class _Fusing:
    """Fuses one head, in the present graph."""

    def __init__(
        self, region: Region, settings: Settings, fused: Fused, candidates: Sequence[str]
    ) -> None:
        self.region, self.settings, self.fused = region, settings, fused
        self.graph = region.module.graph
        self.nodes = {n.name: n for n in self.graph.nodes}
        self.candidates = [self.nodes[name] for name in candidates]
        self.modes = modes_of(region)
        grads = {node: mode.grad for node, mode in self.modes.items()}
        self.scope = Scope(grads, writers_in(self.graph))
        self.untouched: Graph | None = None  # a copy, from the first change on

    def head(self, name: str) -> Collection[str]:
        """Fuses a head, or notes why not.

        Returns:
            the names of the products that are logits no more.
        """
        node = self.nodes[name]
        try:
            captured, recipes = self._captured(node)
            heads = [n.name for n in captured.heads]
            self._fuse(captured, recipes)
        except Exception as error:
            # an unforeseen program runs without the rewrite
            no = error if isinstance(error, NoMatch) else None
            if isinstance(error, GuardOnDataDependentSymNode):
                no = NoMatch.at(node, "has sizes that depend on data")
            if no is None:
                log.warning("%s: the rewrite failed", source_line(node), exc_info=True)
                reason = f"fxpass failed to rewrite the graph, please report this: {error!r}"
                no = NoMatch(node, reason)
            if self.untouched is not None:
                self.region.module.graph = self.untouched
            self.fused.reasons[name] = no
            return [name]
        return heads

    # ------------------------------------------------------------ what is computed

    def _captured(self, node: Node) -> tuple[Captured, Recipes]:
        """What a head's logits are read for: all that is, or the losses of logits that exist; and
        the recipes of those that are outputs of the graph."""
        if not node.users:
            raise NoMatch(node, "nobody reads its logits")
        if self.modes[node].transforms:
            raise NoMatch(node, "it is in a transform of torch.func")
        try:
            captured = capture(self.region, node, self.candidates, self.scope)
            self._check(node, captured)
            return captured, self._deferred(captured)
        except (NoMatch, GuardOnDataDependentSymNode) as no:
            if isinstance(no, NoMatch) and no.node.target in CHECKPOINTS:
                stops = slice_of(self.region, {node: False}, {}, self.scope, kept=True).stops
                self.fused.checkpoints |= {n.name for n in stops if n.target in CHECKPOINTS}
                raise
            if isinstance(no, NoMatch) and no.reason == "nothing is computed from its logits":
                return self._without_loss(node, no)
            raise

    def _without_loss(self, node: Node, why: NoMatch) -> tuple[Captured, Recipes]:
        """A head whose logits leave the graph, which reduces nothing of them."""
        found = slice_of(self.region, {node: False}, {}, self.scope)
        if not leaves_whole(self.region, node, found):
            raise why
        captured = Captured(found, (node,), (), ())
        self._check(node, captured)
        try:
            recipes = self._deferred(captured)
        except NoMatch:
            raise elsewhere(node, found) or why from None
        if not all(deferral.recipe.rows for deferral in recipes.values()):
            raise elsewhere(node, found) or why  # nothing of them would be answered
        return captured, recipes

    def _check(self, node: Node, captured: Captured) -> None:
        if inside := next((n for n in captured.slice.ran if self.modes[n].transforms), None):
            raise NoMatch.at(inside, "is in a transform of torch.func")
        least = self.settings.min_logits_mb
        if least and len(captured.heads) > 1:
            taken = sum(map(bytes_of, captured.heads))
            classes = sum(hint(head.classes) for head in captured.slice.recorder.heads)
            if reason := worth.too_small(taken, classes, 0, least):
                raise Costs(node, reason)
        elif reason := too_small(node, least, captured.slice.recorder.heads[0]):
            raise Costs(node, reason)

    def _deferred(self, captured: Captured) -> Recipes:
        """The recipes of the logits of a region that are outputs of the graph.

        Raises:
            NoMatch: one of them has to exist.
        """
        left, settings = captured.slice.left, self.settings
        if not left:
            return {}
        output = self.graph.output_node()
        reduced = captured.calls and not captured.trained  # the loss is computed from the logits,
        # which are not those of a training step, whose metrics leave the graph before the loss
        reduced = reduced and not any(map(needs_gradient, left))
        kept = settings.logits == "keep" or (settings.logits == "auto" and reduced)
        drop = settings.logits == "drop"
        found = {} if kept else deferred_outputs(self.region, captured, self.modes, drop=drop)
        if stays := next((n for n in left if n not in found), None):
            raise NoMatch(output, f"the logits, or what is made of them (%{stays.name}), leave")
        from fxpass.rewrite.settled import programs as programs_of  # which reports what this finds

        programs, roots = programs_of(settings), dict[Node, Deferral]()
        made: Recipes = {}
        for node in left:
            root, chain = (node, ()) if drop else split(node, found[node], captured)
            if root not in roots:
                nodes = [n for n in found[node] if n not in chain]
                roots[root] = recipe_of(root, nodes, captured, programs)
            made[node] = roots[root] if not chain else roots[root].then(root, chain)
        recipes = {(storage(n), deferral.recipe) for n, deferral in made.items()}
        if not drop and len(recipes) > len({memory for memory, _ in recipes}):
            raise NoMatch(output, "two results of the graph share the memory of its logits")
        return made

    # ------------------------------------------------------------ the calls

    def _fuse(self, captured: Captured, recipes: Recipes) -> None:
        graph, settings, fused = self.graph, self.settings, self.fused
        match, drop = match_of(captured), settings.logits == "drop"
        if recipes:
            match = replace(match, logits_mode="drop" if drop else "defer")
            self.untouched = copied(graph)
        # the outputs read its nodes no more, so that the rewrite erases them
        deferred = defer_outputs(self.region.module, recipes, drop=drop)
        if captured.calls:
            names = (tuple(n.name for n in some) for some in (captured.heads, captured.slice.ran))
            fused.later.append(Later(match, *names))
        else:
            for node in sorted(captured.slice.ran, reverse=True):
                if not node.users:
                    graph.erase_node(node)
            fused.matches.append(match)
        self.region.module.recompile()
        fused.restore = both(fused.restore, deferred)
