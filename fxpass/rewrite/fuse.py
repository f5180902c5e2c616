"""Fuses heads: operator calls take the place of their products and of what reduces them.

In: a region of a Dynamo graph. Out: a :class:`Fused`, with a :class:`RegionMatch` for what the
graph has now in the place of its nodes, and why other products are no heads. Calls whose row
function has a normal form are class reductions (:mod:`fxpass.lower`); the others are left for the
joint graph (:mod:`fxpass.rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxpass.capture.capture import Captured, RowCall, capture, capture_kept, outputs_of
from fxpass.capture.custom import Custom
from fxpass.capture.function import trained
from fxpass.capture.heads import Costs, bytes_of, has_loss, may_be_large, too_small
from fxpass.capture.rejections import elsewhere, leaves_whole
from fxpass.capture.slice import Scope, slice_of
from fxpass.capture.values import Value
from fxpass.casts.casts import Cast
from fxpass.graph.calls import storage
from fxpass.graph.hazards import leaves, writers_in
from fxpass.graph.modes import Mode, gradients_reach, modes_of
from fxpass.graph.nodes import NoMatch, hint, is_tensor, needs_gradient, value
from fxpass.graph.region import CHECKPOINTS, Region
from fxpass.graph.source import source_line
from fxpass.lower.normal import lower
from fxpass.lower.records import Unknown
from fxpass.plan import worth
from fxpass.rewrite.copies import copied
from fxpass.rewrite.known import with_total
from fxpass.rewrite.leaving import deferred_outputs, split
from fxpass.rewrite.lowered import Inserted, Lowered
from fxpass.rewrite.matches import RegionMatch, match_of, words_of
from fxpass.rewrite.outputs import Deferral, Restore, as_compiled, both, defer_outputs, recipe_of
from fxpass.rewrite.programs import programs_with
from fxpass.rewrite.regions import Calls, erase, rewrite_region
from fxpass.rewrite.traced import forward
from fxpass.rewrite.worth import stored, too_costly
from fxpass.settings import Settings

log = logging.getLogger(__name__)
Recipes = dict[Node, Deferral]  # by the output of the graph


@dataclass(frozen=True)
class Later:
    """A region that is no class reduction: the pass on the joint graph may fuse it.

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
        casts: those of heads' operands, which autocast did.
        reasons: for other products, by name, why they are no heads.
        kept: for heads whose logits exist, by name, why they have to.
        rows: for each call that makes a gradient of a weight, the weight's name and the rows.
        checkpoints: the names of the calls of checkpoints that read logits.
    """

    matches: list[RegionMatch] = field(default_factory=list)
    later: list[Later] = field(default_factory=list)
    restore: Restore = as_compiled
    casts: list[Cast] = field(default_factory=list)
    reasons: dict[str, NoMatch] = field(default_factory=dict)
    kept: dict[str, NoMatch] = field(default_factory=dict)
    rows: list[tuple[str, int]] = field(default_factory=list)
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
        self.reached = gradients_reach(self.graph, self.scope.writers)

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
            if isinstance(no, Costs) or not has_loss(node):
                raise
            captured = self._kept(node, no)
            if isinstance(no, NoMatch):
                self.fused.kept[node.name] = no
            return captured, {}

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

    def _kept(self, node: Node, why: Exception) -> Captured:
        """The losses of logits that exist anyway."""
        try:
            captured = capture_kept(self.region, node, self.scope)
            self._check(node, captured)
        except (NoMatch, GuardOnDataDependentSymNode):
            raise why from None
        if self.settings.min_logits_mb and captured.trained and not leaves(node):
            what = "another node of the graph reads its logits, so they are saved for backward"
            at = why.node if isinstance(why, NoMatch) else node
            raise NoMatch(at, f"{what} anyway ({worth.FUSES_ALL})") from why
        return captured

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
        programs, roots = programs_with(settings), dict[Node, Deferral]()
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
        calls, match, drop = self._calls(captured), match_of(captured), settings.logits == "drop"
        if recipes:
            match = replace(match, logits_mode="drop" if drop else "defer")
        if recipes or calls is not None:
            self.untouched = copied(graph)
        # the outputs read its nodes no more, so that the rewrite erases them
        deferred = defer_outputs(self.region.module, recipes, drop=drop)
        if calls is None:
            names = (tuple(n.name for n in some) for some in (captured.heads, captured.slice.ran))
            fused.later.append(Later(match, *names))
        else:
            if calls:
                match = self._inserted(captured, calls, match)
            else:
                erase(graph, captured)
            fused.matches.append(match)
        self._finish(deferred)

    def _inserted(
        self, captured: Captured, calls: Sequence[Lowered], match: RegionMatch
    ) -> RegionMatch:
        """Puts calls in the place of the nodes of a region."""
        emitter, made = rewrite_region(self.graph, captured, calls)
        for one in made:
            _total(self.graph, emitter, one, modes_of(self.region))
        self.graph.lint()
        if reason := too_costly(captured, made, self.settings.min_logits_mb):
            raise Costs(captured.heads[0], reason)
        self.fused.casts += emitter.casts
        for one in made:
            if "weight" in one.choice.spec.gradients:
                self.fused.rows += [(name, hint(value(one.x).shape[0])) for name in self.weights]
        choices = tuple(one.choice for one in made)
        words = words_of([choice.spec for choice in choices], match.named)
        return replace(match, choices=choices, words=words)

    def _finish(self, deferred: Restore) -> None:
        self.region.module.recompile()
        self.fused.restore = both(self.fused.restore, deferred)

    def _calls(self, captured: Captured) -> list[Lowered] | None:
        """The class reductions that take the place of a region; None if it is no such.

        Raises:
            NoMatch: it cannot be a region of the joint graph either.
        """
        self.weights = [name for head in captured.heads for name in _weights(head)]
        found: list[Lowered] = []
        for call in captured.calls:
            lowered = self._lowered(call, captured)
            if lowered is not None:
                found.append(lowered)
                continue
            if captured.kept:
                what = "its logits exist, and its loss has no normal form"
                raise NoMatch(captured.heads[0], what)
            if captured.slice.sharding is not None:
                what = "its rows are no class reductions, and the head is sharded"
                raise NoMatch(call.place, what)
            return None
        return found

    def _lowered(self, call: RowCall, captured: Captured) -> Lowered | None:
        """The normal form of a call; None if it has none."""
        custom = any(isinstance(step.run, Custom) for step in captured.slice.steps)
        if custom or sum(leaf.kind == "logits" for leaf in call.leaves) != 1:
            return None  # of a custom function, the backward is its own
        trains = any(output.trained for output in call.outputs)
        flags = [trains and trained(leaf) for leaf in call.leaves]
        sharded = captured.slice.sharding is not None  # there is no region to make it in chunks
        try:
            reached = [self._is_reached(output, captured) for output in call.outputs]
            normal = lower(forward(call), flags, reached, sharded)
        except Unknown as no:
            log.debug("%s: no normal form: %s", source_line(call.place), no)
            return None
        except NoMatch:
            raise
        except Exception:
            log.warning("%s: the reading failed", source_line(call.place), exc_info=True)
            return None
        head = captured.heads[0]
        if sharded and normal.base.taken:
            what = f"%{head.name}: the program selects some classes of sharded logits"
            raise NoMatch(head, what)
        if captured.kept and (normal.base.taken or normal.biases):
            return None  # the operator reads logits as the linear made them
        return Lowered(call, normal, self.settings, self._others(call, captured))

    def _is_reached(self, output: Value, captured: Captured) -> bool:
        """Whether a gradient may come to an output: to that of a metric, none does."""
        nodes = (n for n in captured.results if n in self.reached)
        return any(output is value for n in nodes for value in outputs_of(captured.slice, n))

    def _others(self, call: RowCall, captured: Captured) -> tuple[Any, ...]:
        """The rows of other calls that make a gradient of the same weight."""
        head = call.leaves[0].head
        assert head is not None
        (rows, *_), weights = head.x.shape, _weights(head.node)[:1]
        found = [n for name, n in self.fused.rows if name in weights]
        beside = [n for n in self.candidates if n not in captured.heads and value(n).requires_grad]
        same = [n for n in beside if not set(weights).isdisjoint(_weights(n)) and self._may_fuse(n)]
        found += [hint(value(n).numel()) // max(1, hint(value(n).shape[-1])) for n in same]
        more = [c for c in captured.calls if c is not call and c.leaves[0].head is head]
        return (*found, *[rows] * len(more))

    def _may_fuse(self, node: Node) -> bool:
        """Whether another head can be captured."""
        try:
            self._captured(node)
        except (NoMatch, GuardOnDataDependentSymNode):
            return False
        return True


def _weights(node: Node) -> list[str]:
    """The matrices that a product may have as its weight, without their views and casts."""
    return [stored(n).name for n in node.all_input_nodes[1:] if is_tensor(n)]


def _total(graph: Graph, emitter: Calls, made: Inserted, modes: Mapping[Node, Mode]) -> None:
    """Lets forward compute the gradients of a call, if it can; else the call keeps copies of
    operands."""
    grads = {node: mode.grad for node, mode in modes.items()}
    if not made.choice.spec.gradients:  # rows that have no coefficient are left out
        whole = not any(mode.inference for mode in modes.values())
        if whole:
            with_total(graph, made, {}, emitter.call)
    elif not with_total(graph, made, grads, emitter.call):
        if made.logits is not None and leaves(emitter.captured.heads[0]):
            made.without_logits()
        made.keep()
