"""Chooses the strategy of a match.

In: a match and the settings. Out: the match with its strategy, which decides whether forward or
backward computes the gradients, so that the compiled graph depends on it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fxpass.graph import hazards
from fxpass.graph.nodes import hint, value
from fxpass.match.chain import chain_of
from fxpass.plan.choice import choose
from fxpass.settings import Settings

if TYPE_CHECKING:
    from fxpass.match.match import Match


def scheduled(
    match: Match, settings: Settings, others: tuple[int | torch.SymInt, ...] = ()
) -> Match:
    """The match with its strategy.

    Args:
        match: the match.
        settings: the user's.
        others: the rows of each other match that makes a gradient of the same weight.
    """
    linear, sharding = match.chain.linear, match.sharding
    logits, hidden = value(linear.node), value(linear.x)
    n, v = match.shape[0], hint(match.shape[1])
    run = match.spec
    if sharding is not None:  # the sizes of this rank's operator call
        n, v = n // sharding.rows, sharding.count
        run = run.of_shard() if run.shard_of else run
    setting = settings.strategy
    if match.changed:
        setting = "chunked"
    choice = choose(
        *(n, hint(hidden.shape[-1]), max(1, v), logits.dtype, logits.device),
        run,
        setting,
        logits_exist=match.logits_mode == "keep",
        others=others,
    )
    spec = replace(
        match.spec,
        strategy=choice.strategy,
        memory_mb=choice.spec.memory_mb,
    )
    match = replace(match, spec=spec, choice=choice)
    if (
        match.logits_mode == "keep"
        and spec.waits
        and sharding is None
        and hazards.leaves(match.chain.base)
    ):
        chain = chain_of(match.loss)
        spec = replace(spec, transform=chain.expr)
        match = replace(match, chain=chain, spec=spec, recomputed=True)
    return match
