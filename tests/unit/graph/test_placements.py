"""Placements: by method, by function, and as older versions of Dynamo spell them."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from fxpass.graph.placements import PLACEMENTS, is_dtensor, placement_name


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
