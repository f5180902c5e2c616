"""Regions: the whole graph and the checkpointed ones in it, each with its way in."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from fxpass.region import regions


def captured(fn, *args):
    graphs = []
    torch.compile(fn, backend=lambda gm, _: graphs.append(gm) or gm)(*args)
    return graphs[0]


def test_a_plain_graph_is_one_region():
    gm = captured(lambda x: x + 1, torch.randn(3))
    (region,) = regions(gm)
    assert region.module is gm
    assert region.outer is None


def test_checkpoints_are_regions_with_their_caller():
    def program(x):
        inner = lambda y: checkpoint(torch.sin, y, use_reentrant=False) * 2  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False)

    outer, middle, innermost = regions(captured(program, torch.randn(3, requires_grad=True)))
    assert middle.outer is outer
    assert middle.call in outer.module.graph.nodes
    assert innermost.outer is middle
    assert any(n.target is torch.sin for n in innermost.module.graph.nodes)
