"""Compiles one Dynamo graph: rewrites it, lets the inner backend compile it, and tells what became
of it.

In: a graph, settings, and a function that compiles the rewritten graph with the pass on its joint
graph. Out: the outcome and the compiled function. Where that pass leaves logits that must not
exist, the graph is compiled again, with these logits among its outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from fxpass.rewrite.settled import programs, rows_pass, settled, tell
from fxpass.rewrite.transform import Outcome, transform, without_deferring
from fxpass.rows.backend import Rewritten, RowsPass
from fxpass.settings import Settings

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]


def compile_graph(
    gm: GraphModule,
    settings: Settings,
    inputs: Sequence[Any],
    compile: Callable[[RowsPass], Compiled],
) -> tuple[Outcome, Sequence[Rewritten], Compiled]:
    """Compiles a graph, and logs what was done to it.

    Args:
        gm: the graph, changed in place.
        settings: the user's.
        inputs: what it is compiled for.
        compile: compiles ``gm`` as it is then.

    Returns:
        what was done, what became of its joint graphs, and a function with the graph's outputs.
    """
    answers = programs(settings)
    kept = set[str]()
    outcome = transform(gm, settings, answers, inputs)
    while True:
        rows = rows_pass(settings, outcome.deferred.needed)
        try:
            compiled = compile(rows)
            break
        except Exception:
            if not rows.missed:
                raise
            log.debug("logits that leave are kept: %s", sorted(rows.missed))
            kept |= rows.missed
            outcome = without_deferring(gm, outcome, settings, answers, kept)
    outcome = settled(outcome, rows.made)
    tell(outcome, gm, rows.made, settings)
    return outcome, rows.made, outcome.restore(compiled)
