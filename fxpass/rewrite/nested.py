"""Fuses logits that checkpoints and nested regions read or return: their nodes join the graph.

In: a region of a Dynamo graph, after its own heads are fused. Out: what is fused of its calls of
nested graphs. Those of which nothing is fused, or that cost more than they save, stay::

    %z = linear(%h, %w);  %loss = checkpoint(%body, %z, %t)    ->    the nodes of %body, fused
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from torch.fx import Node

from fxpass.capture.capture import made_of
from fxpass.graph.nodes import hint, is_tensor, value
from fxpass.graph.region import NESTED_REGIONS, Region
from fxpass.graph.source import source_line
from fxpass.rewrite.copies import copied
from fxpass.rewrite.fuse import Fused, fuse
from fxpass.rewrite.inline import inline_call
from fxpass.settings import Settings

log = logging.getLogger(__name__)


def fuse_nested(region: Region, settings: Settings, calls: Sequence[Node]) -> Fused:
    """Fuses logits of the calls of nested graphs.

    Args:
        region: the region around them.
        settings: the user's.
        calls: of checkpoints and nested regions.
    """
    if not calls:
        return Fused()
    graph, untouched = region.module.graph, copied(region.module.graph)
    twins = dict(zip(graph.nodes, untouched.nodes, strict=True))
    read = [n for call in calls for n in call.all_input_nodes if is_tensor(n)]
    feeding = {source for node in read for source, _ in made_of(node, "")}
    try:
        made = {call: inline_call(region, call) for call in calls}
        inlined = set[Node]().union(*made.values())
        if not inlined:
            return Fused()
        names = {n: n.name for n in inlined}
        fused = fuse(region, settings, inlined | feeding)
    except Exception:
        log.warning("%s: inlining failed", source_line(calls[0]), exc_info=True)
        region.module.graph = untouched
        return Fused()
    present = {n.name: n for n in region.module.graph.nodes}
    later = {name for one in fused.later for name in one.inside}
    # AOTAutograd enters checkpoints by itself
    taking = [
        call
        for call in calls
        if any(names[n] not in present for n in made[call])
        or (call.target in NESTED_REGIONS and not later.isdisjoint(names[n] for n in made[call]))
    ]
    held = [present[name] for name in names.values() if name in present and name not in later]
    if len(taking) == len(calls):
        matches = (*fused.matches, *(one.match for one in fused.later))
        if _bytes([n for n in held if is_tensor(n)]) < sum(m.logits_bytes for m in matches):
            return fused
        taking = []
    region.module.graph = untouched
    return fuse_nested(region, settings, [twins[call] for call in taking])


def _bytes(nodes: Collection[Node]) -> int:
    return sum(hint(value(node).numel()) * value(node).itemsize for node in nodes)
