"""Marks heads that have the same sizes on all ranks, as far as a program shows it.

In: a graph of Dynamo. Out: the same graph, where products with such weights are marked. The nodes
that AOTAutograd traces for a product inherit its mark::

    F.linear(x, weight)    weight: DTensor [128, 8], Shard(0) over 2 ranks    marked
    F.linear(x, weight)    weight: DTensor [129, 8], Shard(0) over 2 ranks    not: 65 and 64
    F.linear(x, weight)    weight: Tensor [64, 8]                             not: ranks may differ

A loop with collectives needs such heads: each rank decides alone, from sizes, if there is a loop
and how many rows its chunks have.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.traceback import annotate

from fxpass.graph.functions import function_of
from fxpass.graph.placements import (
    compiled_for_all_ranks,
    is_dtensor,
    is_gathered,
    placement_name,
    placements_of,
)

_KEY = "fxpass.alike"
_PRODUCTS = {"linear", "matmul", "mm", "addmm", "bmm"}
_VIEWS = {"t", "transpose", "permute", "numpy_T", "to", "contiguous", "detach", "alias"}
_LOCAL = ("to_local", "prim_to_local")


def marked_alike() -> AbstractContextManager[None]:
    """A context that marks the products traced in it: all ranks' weights have the same sizes."""
    return annotate({_KEY: True})


def is_alike(node: Node) -> bool:
    """Is true for a node that was traced for a marked product."""
    return bool(node.meta.get("custom", {}).get(_KEY))


def mark_alike(module: GraphModule) -> None:
    """Marks the products of a graph of Dynamo, by the placements of their weights."""
    if compiled_for_all_ranks() or (_varies(module) and _has_parts(module)):
        return
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method") or function_of(node) not in _PRODUCTS:
            continue
        if any(_is_even(factor) for factor in node.all_input_nodes):
            node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: True}


def _varies(module: GraphModule) -> bool:
    """Is true if an input is a symbolic number, or has a symbolic size."""
    values = [n.meta.get("example_value") for n in module.graph.find_nodes(op="placeholder")]
    sizes = [s for v in values for s in (v.shape if isinstance(v, torch.Tensor) else [v])]
    return any(isinstance(size, torch.SymInt) for size in sizes)


def _has_parts(module: GraphModule) -> bool:
    """Is true if a program works on its rank's part of a tensor. The part's offset may be a symbol,
    but is 0 on the first rank: the ranks' graphs may differ."""
    local = (n for n in module.graph.nodes if placement_name(n.target) in _LOCAL)
    return any(not is_gathered(node) for node in local)


def _is_even(node: Node) -> bool:
    """Is true for an evenly sharded parameter, and for a rank's part of such a parameter."""
    local = placement_name(node.target) in _LOCAL
    source = node.all_input_nodes[:1]
    if local or (node.op != "placeholder" and function_of(node) in _VIEWS):
        return bool(source) and _is_even(source[0])
    return node.op in ("placeholder", "get_attr") and _divides(node.meta.get("example_value"))


def _divides(tensor: Any) -> bool:
    """Is true for a DTensor that is sharded into shards of equal sizes."""
    if not is_dtensor(tensor):
        return False
    sizes = list(tensor.shape)
    sharded = False
    for ranks, placement in zip(tensor.device_mesh.shape, placements_of(tensor), strict=True):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None or not isinstance(sizes[dim], int) or sizes[dim] % ranks:
            return False
        sizes[dim] //= ranks
        sharded = True
    return sharded
