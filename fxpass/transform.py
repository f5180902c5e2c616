"""All rewrites of one Dynamo graph, in order, with their log lines and counters.

In: a Dynamo graph and settings. Out: an :class:`Outcome`; the graph is changed in place. A graph in
which nothing matches and no dtypes are mixed is left as it was, but for what torch 2.11 gets wrong
in it (:func:`fxpass.region.return_once`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch._dynamo.utils import counters
from torch.fx import GraphModule

from fxpass import dump, triton_source, triton_tile_source
from fxpass.casts import Cast, cast_region, note
from fxpass.graphtext import graph_text
from fxpass.match import Match, Rejection, find
from fxpass.outputs import Outputs
from fxpass.region import regions, return_once
from fxpass.rewrite import erase, rewrite
from fxpass.settings import Settings
from fxpass.steps import Bias
from fxpass.triton_source import Kernel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What was done to one graph.

    Attributes:
        matches, rejections, casts: in the order of the graph.
        kernels: the Triton kernels that the matches run on a GPU.
        outputs: the graph's outputs that were deferred, one list per region.
    """

    matches: tuple[Match, ...]
    rejections: tuple[Rejection, ...]
    casts: tuple[Cast, ...]
    kernels: tuple[Kernel, ...]
    outputs: tuple[Outputs, ...]

    def restore(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph as a function with the outputs that Dynamo expects."""
        for outputs in self.outputs:
            compiled = outputs.restore(compiled)
        return compiled


def transform(gm: GraphModule, settings: Settings) -> Outcome:
    """Casts in ``gm`` and every graph nested in it, then rewrites every match in its plain ones.

    Raises:
        MixedDtypeError: see :func:`fxpass.dtypes.agreed`.
    """
    before = graph_text(gm) if settings.dump else ""
    matches: list[Match] = []
    rejections: list[Rejection] = []
    casts: list[Cast] = []
    outputs: list[Outputs] = []
    for region in regions(gm):
        return_once(region)
        casts += cast_region(region, settings.mixed_dtypes)
        if not region.plain:
            continue
        found = find(region, settings)
        rejections += found.rejections
        if not found.matches:
            continue
        # first: the recipes are copies of what the rewrite takes out
        leaving = Outputs(found.deferred, drop=settings.logits == "drop")
        for match in found.matches:
            casts += rewrite(region, match)
        leaving.apply(region.module)
        erase(found.matches)
        matches += found.matches
        outputs.append(leaving)
        region.module.recompile()
    for name, records in (("matched", matches), ("rejected", rejections)):
        counters["fusedce"][name] += len(records)
        for record in records:
            log.info("%s", record)
    note(casts)
    kernels = {k: None for m in matches for k in _kernels(m)}
    if settings.dump:
        dump.write(settings.dump, before, graph_text(gm), kernels)
    return Outcome(tuple(matches), tuple(rejections), tuple(casts), tuple(kernels), tuple(outputs))


def _kernels(match: Match) -> tuple[Kernel, ...]:
    """The Triton kernels that a match runs on a GPU."""
    weighted = match.loss.class_weight is not None
    spec = match.spec.of_shard() if match.spec.shard_of else match.spec
    if spec.strategy == "tiled":
        way = match.walk
        biased = way.linear.bias is not None or any(isinstance(s, Bias) for s in way.steps)
        return triton_tile_source.kernels_of(spec, weighted, biased)
    classes = match.sharding.count if match.sharding else match.shape[1]
    return triton_source.kernels_of(spec, weighted, padded=classes % 16 != 0)
