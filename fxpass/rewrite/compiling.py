"""Compiles one Dynamo graph: rewrites it, lets the inner backend compile it, and logs the outcome.

In: a graph, settings, and a function that compiles the rewritten graph with the pass on its joint
graph. Out: a :class:`CompiledGraph`. Where that pass leaves logits that must not exist, the graph
is compiled again, with these logits among its outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.fx import GraphModule

from fxpass.rewrite.settled import log_outcome, programs_of_logits, rows_pass, with_matches
from fxpass.rewrite.transform import Outcome, transform, without_deferring
from fxpass.rows.backend import Rewritten, RowsPass
from fxpass.settings import Settings

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]


class CompiledGraph(NamedTuple):
    """A Dynamo graph that is compiled.

    Attributes:
        outcome: its rewrites.
        joint_graphs: the pass's records of its joint graphs.
        function: returns the outputs that Dynamo expects.
    """

    outcome: Outcome
    joint_graphs: Sequence[Rewritten]
    function: Compiled


def compile_graph(
    gm: GraphModule,
    settings: Settings,
    inputs: Sequence[Any],
    compile: Callable[[RowsPass], Compiled],
) -> CompiledGraph:
    """Rewrites and compiles a graph, and logs the outcome.

    Args:
        gm: the graph, changed in place.
        settings: the user's settings.
        inputs: the graph's example inputs.
        compile: compiles ``gm`` as it is then.
    """
    programs = programs_of_logits(settings)
    materialised = set[str]()
    outcome = transform(gm, settings, programs, inputs)
    while True:
        rows = rows_pass(settings, outcome.deferred.needed)
        try:
            compiled = compile(rows)
            break
        except Exception:
            if not rows.missed:
                raise
            log.debug("logits that leave are kept: %s", sorted(rows.missed))
            materialised |= rows.missed
            outcome = without_deferring(gm, outcome, settings, programs, materialised)
    outcome = with_matches(outcome, rows.made)
    log_outcome(outcome, gm, rows.made, settings)
    return CompiledGraph(outcome, rows.made, outcome.restore(compiled))
