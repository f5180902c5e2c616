"""Workarounds for torch 2.11, on graphs as torch 2.11 makes them."""

from __future__ import annotations

import torch

from fxpass.releases.torch_2_11 import return_once
from tests.programs.rows.calls import Twice


def captured(fn, *args):
    graphs = []
    torch.compile(fn, backend=lambda gm, _: graphs.append(gm) or gm)(*args)
    return graphs[0]


def twice(x, w):
    return Twice.apply(x, w).square().mean()


def outputs_of(gm) -> list:
    node = next(n for n in gm.graph.nodes if "autograd_function_apply" in str(n.target))
    return list(getattr(gm, node.args[0].target).graph.output_node().args[0][0])


def more_outputs() -> tuple:
    """A graph as torch 2.11 has it, with an argument and twice the result among the outputs, and
    the last gradient in the backward body."""
    gm = captured(twice, torch.randn(4, 8, requires_grad=True), torch.randn(8, 6))
    own, *others = outputs_of(gm)
    (node,) = [n for n in gm.graph.nodes if "autograd_function_apply" in str(n.target)]
    forward, backward = (getattr(gm, argument.target) for argument in node.args[:2])
    returns = forward.graph.output_node()
    argument = next(n for n in forward.graph.nodes if n.op == "placeholder")
    returns.args = (((own, *others, argument, own, own), returns.args[0][1]),)
    last = backward.graph.find_nodes(op="placeholder")[len(others)]
    for name in ("unused_a", "unused_b", "unused_c"):
        with backward.graph.inserting_after(last):
            last = backward.graph.placeholder(name)
    return gm, own, argument, last


def test_a_tensor_is_returned_once():
    gm, own, argument, _ = more_outputs()
    for _ in range(2):
        return_once(gm)
        found = outputs_of(gm)
        assert (found[0], found[-3:]) == (own, [argument, None, None])


def test_what_backward_reads_is_returned_twice():
    gm, own, argument, gradient = more_outputs()
    with gradient.graph.inserting_after(gradient):
        gradient.graph.call_method("neg", (gradient,))
    return_once(gm)
    assert outputs_of(gm)[-3:] == [argument, None, own]
