"""All rewrites of one Dynamo graph, in order, with their log lines and counters.

In: a Dynamo graph and settings. Out: an :class:`Outcome`; the graph is changed in place. A graph in
which nothing matches is left as it was.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch._dynamo.utils import counters
from torch.fx import GraphModule

from fxpass import dump
from fxpass.casts import Cast
from fxpass.graphtext import graph_text
from fxpass.match import Match, Rejection, find
from fxpass.region import regions
from fxpass.rewrite import rewrite
from fxpass.settings import Settings
from fxpass.triton_source import Kernel, kernels_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What was done to one graph: matches, rejections and casts, in the order of the graph, and
    the Triton kernels that the matches run on a GPU."""

    matches: tuple[Match, ...]
    rejections: tuple[Rejection, ...]
    casts: tuple[Cast, ...]
    kernels: tuple[Kernel, ...]


def transform(gm: GraphModule, settings: Settings) -> Outcome:
    """Rewrites every match in ``gm`` and in its checkpointed regions.

    Raises:
        MixedDtypeError: see :func:`fxpass.rewrite.rewrite`.
    """
    before = graph_text(gm) if settings.dump else ""
    matches: list[Match] = []
    rejections: list[Rejection] = []
    casts: list[Cast] = []
    for region in regions(gm):
        for found in find(region.module.graph, settings):
            if isinstance(found, Rejection):
                rejections.append(found)
            else:
                casts += rewrite(region, found, settings)
                matches.append(found)
        if matches:
            region.module.recompile()
    for name, records in (("matched", matches), ("rejected", rejections), ("casts", casts)):
        counters["fusedce"][name] += len(records)
        for record in records:
            log.info("%s", record)
    kernels = {k: None for m in matches for k in kernels_of(m.spec, m.class_weight is not None)}
    if settings.dump:
        dump.write(settings.dump, before, graph_text(gm), kernels)
    return Outcome(tuple(matches), tuple(rejections), tuple(casts), tuple(kernels))
