"""Placements: by method, by function, and as older versions of Dynamo spell them."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.fx import Graph, GraphModule

from fxpass.graph.nodes import NoMatch
from fxpass.graph.placements import PLACEMENTS, Placing, is_dtensor, options_of, placement_name
from fxpass.graph.text import graph_text


def test_spellings():
    assert placement_name("redistribute") == "redistribute"
    assert placement_name(DTensor.from_local) == "from_local"

    def prim_to_local(x):
        return x

    assert placement_name(prim_to_local) == "prim_to_local"


def test_other_nodes_are_none():
    assert not any(map(placement_name, ("view", torch.relu, DTensor.from_local.__class__)))
    assert all(isinstance(name, str) for name in PLACEMENTS)


def test_a_plain_tensor_is_no_dtensor():
    assert not is_dtensor(torch.zeros(2))
    assert not is_dtensor(None)


def test_options_that_dynamos_own_function_holds():
    """As Dynamo of torch 2.11 spells ``x.to_local(grad_placements=...)``."""
    kwargs_as_value = {"grad_placements": (Partial(),)}

    def prim_to_local(x):
        return x.to_local(**kwargs_as_value)

    def unknown(x):
        return x

    unknown.__name__ = "prim_to_local"
    graph = Graph()
    x = graph.placeholder("x")
    assert options_of(graph.call_function(prim_to_local, (x,))) == kwargs_as_value
    node = graph.call_method("to_local", (x,), {"grad_placements": (Shard(0),)})
    assert options_of(node) == {"grad_placements": (Shard(0),)}
    with pytest.raises(NoMatch, match="does not show its arguments"):
        options_of(graph.call_function(unknown, (x,)))


def test_a_node_holds_placements():
    """FX of torch 2.11 cannot write them into code, and a graph is compiled from its code."""

    def to_local(x, grad_placements):
        return x, grad_placements

    graph = Graph()
    nodes = [
        graph.call_function(Placing(to_local, grad_placements=(p,)), (1,))
        for p in (Partial(), Shard(1))
    ]
    assert [placement_name(node.target) for node in nodes] == ["to_local", "to_local"]
    graph.output(tuple(nodes))
    module = GraphModule(torch.nn.Module(), graph)
    assert module() == ((1, (Partial(),)), (1, (Shard(1),)))
    assert "to_local(1, grad_placements=(Partial(sum),))" in graph_text(module)
