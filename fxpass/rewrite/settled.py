"""The outcome of one graph, once the inner backend has compiled it; logs and counters of it.

In: an :class:`fxpass.rewrite.transform.Outcome`, and the pass's records of the joint graphs. Out:
the outcome with matches and rejections::

    fused: ...: region of 1 head, logits [48, 97]: log_softmax, sum
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
from fxpass.op.rows import compile_ahead
from fxpass.plan.budget import MIB
from fxpass.plan.choice import Choice
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
        settings: the user's settings.
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


def programs_of_logits(settings: Settings) -> Programs:
    """The compiler of functions of deferred logits."""
    unlimited = replace(settings, min_logits_mb=0.0)

    def log_program(module: GraphModule, made: Sequence[Rewritten]) -> None:
        before = graph_text(module) if settings.dump or dump.is_traced() else ""
        outcome = with_matches(Outcome((), nodes=name_nodes(module), before=before), made)
        log_outcome(outcome, module, made, settings)

    return Programs(lambda: rows_pass(unlimited), settings.min_logits_mb * MIB, log_program)


def with_matches(outcome: Outcome, made: Sequence[Rewritten]) -> Outcome:
    """The outcome of a graph with the matches and rejections in its joint graphs.

    Args:
        outcome: the outcome of Dynamo's graph.
        made: the records of its joint graphs; none if another backend compiles it, or if a cache
            has the code and no record of it.
    """
    matches = list(outcome.deferred.matches)
    rejections = list[Rejection]()
    if not made and any(not suspect.reason for suspect in outcome.suspects):
        log.info("the joint graph is of a cache, or of another backend")
    try:
        for joint in made:
            matches += _matches(outcome, joint)
        rejections += rejections_of(outcome.suspects, made)
    except Exception:  # a report is not worth a program
        log.warning("the report failed", exc_info=True)
    kernels = dict.fromkeys(k for joint in made for part in joint.parts for k in part.launches)
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
        kernels = (name for part in parts for name in compile_ahead(part.text, part.device))
        deferred = outcome.deferred
        yield RegionMatch(
            source=source_line(losses[0]) if losses else heads[0].line,
            shapes=tuple((head.rows, head.classes) for head in heads),
            itemsizes=tuple(head.itemsize for head in heads),
            operations=heads[0].ops,
            choices=choices,
            kernels=tuple(dict.fromkeys(kernels)),
            logits_mode="never" if names.isdisjoint(deferred.products) else deferred.mode,
            named=len(losses),
            words=words_of(formulas, len(losses)) if len(formulas) == len(choices) else "",
        )


def _is_loss(node: Node) -> bool:
    """True if a node computes a loss with a name. A program of deferred logits calls it in the
    modes of the user's call."""
    function = getattr(node.target, "function", None)
    return (function_of(node) if function is None else function_of_target(function)) in LOSSES


def text_after(gm: GraphModule, made: Sequence[Rewritten]) -> str:
    """A graph as text, and those of its joint graphs that have calls."""
    return "\n\n".join([graph_text(gm), *(joint.text for joint in made if joint.calls)])


def log_outcome(
    outcome: Outcome, gm: GraphModule, made: Sequence[Rewritten], settings: Settings
) -> None:
    """Logs, counts and dumps the rewrites of a graph."""
    counters["fusedce"]["matched"] += sum(head.losses for head in outcome.heads)
    counters["fusedce"]["rejected"] += len(outcome.rejections)
    for record in (*outcome.heads, *outcome.rejections):
        log.info("%s", record)
    note(list(outcome.casts))
    if outcome.before:
        after = text_after(gm, made)
        if settings.dump:
            dump.write_files(settings.dump, outcome.before, after, outcome.kernels)
        lines = (*outcome.heads, *outcome.rejections, *cast_lines(outcome.casts))
        dump.write_trace(outcome.before, after, lines)
