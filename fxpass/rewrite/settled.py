"""The outcome of one graph, once the inner backend has compiled it: told to logs and counters.

In: an :class:`fxpass.rewrite.transform.Outcome`, and what the pass says of the joint graphs. Out:
the outcome with matches and rejections::

    fused: ...: region of 1 head, logits [48, 97]: renorm, sum
    not fused: ...: aten.cumsum at train.py:9 works along rows
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from torch._dynamo.utils import counters
from torch.fx import GraphModule, Node

from fxpass.casts.casts import cast_lines, note
from fxpass.deferred.programs import Programs
from fxpass.graph.functions import LOSSES, function_of, function_of_target
from fxpass.graph.names import name_nodes
from fxpass.graph.source import source_line
from fxpass.graph.text import graph_text
from fxpass.op.rows import warm
from fxpass.plan.choice import Choice
from fxpass.plan.plan import MIB
from fxpass.rewrite import dump
from fxpass.rewrite.matches import RegionMatch, words_of
from fxpass.rewrite.rejections import Rejection, rejections_of
from fxpass.rewrite.transform import Outcome
from fxpass.rows.backend import Rewritten, RowsPass
from fxpass.settings import Settings

log = logging.getLogger(__name__)


def rows_pass(settings: Settings, needed: Collection[str] = ()) -> RowsPass:
    """The pass on the joint graph.

    Args:
        settings: the user's.
        needed: the names of products whose logits must not exist.
    """
    return RowsPass(
        settings.min_logits_mb,
        settings.strategy,
        needed,
        memory_mb=settings.memory_mb,
        compiled=settings.inner == "inductor",
        accumulate=settings.accumulate,
    )


def programs(settings: Settings) -> Programs:
    """The compiler of functions of the logits of a graph."""
    alone = replace(settings, min_logits_mb=0.0)

    def told(module: GraphModule, made: Sequence[Rewritten]) -> None:
        before = graph_text(module) if settings.dump or dump.is_traced() else ""
        outcome = settled(Outcome((), nodes=name_nodes(module), before=before), made)
        tell(outcome, module, made, settings)

    return Programs(lambda: rows_pass(alone), settings.min_logits_mb * MIB, told)


def settled(outcome: Outcome, made: Sequence[Rewritten]) -> Outcome:
    """The outcome of a graph with what became of its joint graphs.

    Args:
        outcome: of Dynamo's graph.
        made: of the graphs that AOTAutograd made of it; none where a cache had the code and nothing
            is known of it, or where another backend compiles it.
    """
    matches = list(outcome.deferred.matches)
    rejections = list[Rejection]()
    if not made and any(not suspect.reason for suspect in outcome.suspects):
        log.info("the joint graph is of a cache, or of another backend")
    try:
        for one in made:
            matches += _matches(outcome, one)
        rejections += rejections_of(outcome.suspects, made)
    except Exception:  # a report is not worth a program
        log.warning("the report failed", exc_info=True)
    kernels = dict.fromkeys(k for one in made for part in one.parts for k in part.launches)
    return replace(
        outcome, heads=tuple(matches), rejections=tuple(rejections), kernels=tuple(kernels)
    )


def _matches(outcome: Outcome, made: Rewritten) -> Iterator[RegionMatch]:
    """The matches of the regions of a joint graph that have calls."""
    for region in dict.fromkeys(head.region for head in made.heads):
        heads = [head for head in made.heads if head.region == region]
        names = {head.name for head in heads}
        parts = [part for part in made.parts if part.heads & names]
        if not parts:
            continue
        nodes = [node for name, node in outcome.nodes.items() if name in heads[0].names]
        losses = [node for node in nodes if _is_loss(node)]
        choices = tuple(part.choice for part in parts)
        formulas = [choice for choice in choices if isinstance(choice, Choice)]
        # their functions of rows are compiled by now
        kernels = (name for part in parts for name in warm(part.text, part.device))
        yield RegionMatch(
            source_line(losses[0]) if losses else heads[0].line,
            tuple((head.rows, head.classes) for head in heads),
            tuple(head.itemsize for head in heads),
            heads[0].ops,
            choices,
            tuple(dict.fromkeys(kernels)),
            "never" if names.isdisjoint(outcome.deferred.products) else outcome.deferred.mode,
            len(losses),
            words_of(formulas, len(losses)) if len(formulas) == len(choices) else "",
        )


def _is_loss(node: Node) -> bool:
    """Whether a node computes a loss with a name; in a program of deferred logits, in its modes."""
    function = getattr(node.target, "function", None)
    return (function_of(node) if function is None else function_of_target(function)) in LOSSES


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
