"""Regions: the whole graph and those nested in it, each with its way in."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from fxpass.graph.region import regions


def captured(fn, *args):
    graphs = []
    torch.compile(fn, backend=lambda gm, _: graphs.append(gm) or gm)(*args)
    return graphs[0]


def holds(region, target) -> bool:
    return any(node.target is target for node in region.module.graph.nodes)


def test_a_plain_graph_is_one_region():
    gm = captured(lambda x: x + 1, torch.randn(3))
    (region,) = regions(gm)
    assert region.module is gm
    assert (region.outer, region.plain, region.backward) == (None, True, False)


def test_checkpoints_are_plain_regions_with_their_caller():
    def program(x):
        inner = lambda y: checkpoint(torch.sin, y, use_reentrant=False) * 2  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False)

    outer, middle, innermost = regions(captured(program, torch.randn(3, requires_grad=True)))
    assert middle.outer is outer
    assert middle.call in outer.module.graph.nodes
    assert innermost.outer is middle
    assert holds(innermost, torch.sin)
    assert all(region.plain and not region.backward for region in (outer, middle, innermost))


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return checkpoint(torch.cos, x, use_reentrant=False) * g


def test_an_autograd_function_is_a_forward_and_a_backward_region():
    gm = captured(lambda x: Sine.apply(x), torch.randn(3, requires_grad=True))
    whole, forward, backward, *nested = regions(gm)
    assert whole.plain
    assert holds(forward, torch.sin)
    assert not forward.backward
    assert holds(nested[-1] if nested else backward, torch.cos)
    assert all(region.backward for region in (backward, *nested))
    assert not any(region.plain for region in (forward, backward, *nested))


def test_both_branches_of_a_cond_are_regions_that_are_not_plain():
    def program(x):
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    _, yes, no = regions(captured(program, torch.randn(3)))
    assert (holds(yes, torch.sin), holds(no, torch.cos)) == (True, True)
    assert not yes.plain
    assert not no.plain


def test_a_graph_that_is_called_twice_is_one_region():
    inner = torch.compiler.nested_compile_region(lambda x: torch.sin(x))
    gm = captured(lambda x: inner(x) + inner(x * 2), torch.randn(3))
    _, body = regions(gm)
    assert holds(body, torch.sin)
