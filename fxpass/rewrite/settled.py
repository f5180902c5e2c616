"""What became of one graph, when the inner backend has compiled it: told to logs and counters.

In: an :class:`fxpass.rewrite.transform.Outcome`, and what the pass says of the joint graphs. Out:
the outcome with the matches of the joint graphs, without the rejections of what they fuse::

    not fused: ... (aten.renorm)    ->    fused: ...: region of 1 head, logits [48, 97]: renorm, sum
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch._dynamo.utils import counters
from torch.fx import GraphModule, Node

from fxpass.capture.rejections import Rejection
from fxpass.casts.casts import cast_lines, note
from fxpass.deferred.programs import Programs
from fxpass.graph.functions import LOSSES, function_of, function_of_target
from fxpass.graph.source import source_line
from fxpass.graph.text import graph_text
from fxpass.op.rows import warm
from fxpass.plan.choice import Choice
from fxpass.plan.plan import MIB
from fxpass.rewrite import dump
from fxpass.rewrite.fuse import Later
from fxpass.rewrite.matches import RegionMatch, words_of
from fxpass.rewrite.transform import Outcome
from fxpass.rows.backend import Rewritten, RowsPass
from fxpass.rows.reasons import FusedPart
from fxpass.settings import Settings

log = logging.getLogger(__name__)


def rows_pass(settings: Settings) -> RowsPass:
    """The pass on the joint graph."""
    return RowsPass(
        settings.min_logits_mb,
        settings.strategy,
        memory_mb=settings.memory_mb,
        compiled=settings.inner == "inductor",
        accumulate=settings.accumulate,
    )


def programs(settings: Settings) -> Programs:
    """What compiles functions of the logits of a graph."""
    alone = replace(settings, min_logits_mb=0.0)

    def told(module: GraphModule, made: Sequence[Rewritten]) -> None:
        targets = (getattr(node.target, "function", node.target) for node in module.graph.nodes)
        named = sum(callable(t) and function_of_target(t) in LOSSES for t in targets)
        matches = tuple(match for one in made for match in _others(one, set(), named))
        kernels = dict.fromkeys(k for one in made for part in one.parts for k in part.launches)
        before = graph_text(module) if settings.dump or dump.is_traced() else ""
        tell(Outcome(matches, (), (), (), tuple(kernels), before=before), module, made, settings)

    return Programs(lambda: rows_pass(alone), settings.min_logits_mb * MIB, told)


def settled(outcome: Outcome, made: Sequence[Rewritten]) -> Outcome:
    """The outcome of a graph with what became of its joint graphs.

    Args:
        outcome: of Dynamo's graph.
        made: of the graphs that AOTAutograd made of it; none where a cache had the code and nothing
            is known of it, or where another backend compiles it.
    """
    matches = list(outcome.heads)
    rejections = list(outcome.rejections)
    known: set[str] = set()  # heads that have a match
    for later in outcome.later:
        parts = [part for one in made for part in one.parts if part.heads & {*later.heads}]
        if parts:
            known |= {head for part in parts for head in part.heads}
            matches.append(_with_calls(later.match, parts))
        elif made and (said := _said(outcome, later, made)):
            rejections.append(said)
        elif not made:
            log.info("%s: the joint graph is of a cache, or of another backend", later.match.source)
    fused: set[Node] = set()
    for one in made:
        nodes = {outcome.nodes[name] for name in one.names if name in outcome.nodes}
        matches += _others(one, known, sum(function_of(node) in LOSSES for node in nodes))
        fused |= nodes
    unknown = {name for later in outcome.later if not made for name in later.inside}
    rejections = [r for r in rejections if r.of not in fused and r.of.name not in unknown]
    kernels = dict.fromkeys(k for one in made for part in one.parts for k in part.launches)
    return replace(
        outcome, heads=tuple(matches), rejections=tuple(rejections), kernels=tuple(kernels)
    )


def _others(made: Rewritten, known: set[str], named: int) -> Iterator[RegionMatch]:
    """The matches of heads that Dynamo's graph does not show, or whose nodes it cannot read."""
    heads = [head for head in made.heads if head.name not in known]
    for region in dict.fromkeys(head.region for head in heads):
        some = [head for head in heads if head.region == region]
        names = {head.name for head in some}
        match = RegionMatch(
            some[0].line,
            tuple((head.rows, head.classes) for head in some),
            tuple(head.itemsize for head in some),
            some[0].ops,
            named=named,
        )
        yield _with_calls(match, [part for part in made.parts if part.heads & names])


def _with_calls(match: RegionMatch, parts: Sequence[FusedPart]) -> RegionMatch:
    """A match with the calls that it becomes, whose functions of rows are compiled by now."""
    names = (name for part in parts for name in warm(part.text, part.device))
    choices = tuple(part.choice for part in parts)
    formulas = [choice for choice in choices if isinstance(choice, Choice)]
    words = words_of(formulas, match.named) if len(formulas) == len(choices) else ""
    return replace(match, choices=choices, kernels=tuple(dict.fromkeys(names)), words=words)


def _said(outcome: Outcome, later: Later, made: Sequence[Rewritten]) -> Rejection | None:
    """Why the joint graph has no call of a region."""
    node = next((outcome.nodes[name] for name in later.heads if name in outcome.nodes), None)
    declined = [why for one in made for why in one.declined]
    if node is None or not declined:
        return None
    line = source_line(node)
    own = [why for why in declined if why.head == line] or declined
    return Rejection(node, f"{own[0].place} {own[0].reason}".strip(), line, node)


def text_after(gm: GraphModule, made: Sequence[Rewritten]) -> str:
    """A graph as text, and those of its joint graphs that have calls."""
    return "\n\n".join([graph_text(gm), *(one.text for one in made if one.calls)])


def tell(outcome: Outcome, gm: GraphModule, made: Sequence[Rewritten], settings: Settings) -> None:
    """Logs, counts and dumps what was done to a graph."""
    counters["fusedce"]["matched"] += sum(head.losses for head in outcome.heads)
    counters["fusedce"]["rejected"] += len(outcome.rejections)
    for record in (*outcome.heads, *outcome.rejections):
        log.info("%s", record)
    note(list(outcome.casts))
    if outcome.before:
        after = text_after(gm, made)
        if settings.dump:
            dump.write(settings.dump, outcome.before, after, outcome.kernels)
        lines = (*outcome.heads, *outcome.rejections, *cast_lines(outcome.casts))
        dump.trace(outcome.before, after, lines)
