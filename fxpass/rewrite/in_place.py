"""Backward graphs multiply saved gradients in place, where no other node reads them.

In: Inductor's graph after AOTAutograd has split forward and backward. Out: the graph, in which
``fxpass::scale_`` overwrites a saved gradient that only ``fxpass::scaled`` reads, and whose memory
AOTAutograd donates (the gradient is no output of forward, and the graph is not retained)::

    %out = fxpass.scaled(%saved, %tangents)    ->    fxpass.scale_(%saved, %tangents)
    return (%out,)                                   return (%saved,)

Without this pass, as in other backends, the product is a new tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch.fx import Graph

import fxpass.op.saved  # noqa: F401, registers the operators
from fxpass.casts.aot import with_pass


def with_scaling_in_place(options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's options with this pass, before the user's passes."""
    key = str(get_hash_for_files((__file__,)))
    return with_pass(options, "post_grad_custom_post_pass", scale_in_place, key)


def _donated() -> set[int]:
    """The positions of the backward graph's inputs whose memory it may overwrite."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return set(getattr(metadata, "bw_donated_idxs", None) or ())


def scale_in_place(graph: Graph) -> None:
    """Replaces the products of inputs that have no other reader."""
    inputs = graph.find_nodes(op="placeholder")
    donated = _donated()
    free = {node for i, node in enumerate(inputs) if i in donated and len(node.users) == 1}
    operators = torch.ops.fxpass
    for node in graph.find_nodes(op="call_function", target=operators.scaled.default):
        saved, factor = node.args
        if saved in free:
            with graph.inserting_before(node):
                graph.call_function(operators.scale_.default, (saved, factor))
            node.replace_all_uses_with(saved)
            graph.erase_node(node)
