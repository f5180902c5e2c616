"""The Triton kernels of a rewritten graph, as they run on a GPU.

In: a rewritten Dynamo graph. Out: the launches of its operator calls, for its GPU or for the
one that :func:`fxpass.kernels.call.gpu_for_listing` names::

    %out = fxpass.class_reductions(%x, %w, ..., 'r3 gradients=x,weight total=pick')
    ->  the launch of the kernel for `total=pick`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpass.graph.nodes import hint, value
from fxpass.kernels.call import (
    Launch,
    OfReductions,
    Operand,
    for_reductions,
    gpu_for_listing,
    launches,
)
from fxpass.spec.reductions import Reductions
from fxpass.spec.shards import of_backward, of_forward


def launches_of(graph: Graph) -> Iterator[Launch]:
    """The launches of all calls, in the graph's order."""
    for node in graph.nodes:
        shard = getattr(node.target, "__module__", "") == "fxpass.op.sharded"
        if node.target is not torch.ops.fxpass.class_reductions.default and not shard:
            continue
        spec, operands = _of_reductions(node)
        gpu = gpu_for_listing(value(node.args[0]).device)
        if not shard:
            yield from launches(spec, operands, gpu)
            continue
        yield from for_reductions(of_forward(spec), operands, gpu)
        if spec.gradients:
            yield from for_reductions(of_backward(spec), operands, gpu, forward=False)


def _of_reductions(call: Node) -> tuple[Reductions, OfReductions]:
    arguments: Any = call.args
    x, weight, bias, scale, picks, given, *_, logits, text = arguments
    of_row = None
    if picks is not None:
        of_row = hint(value(picks).shape[1]) if value(picks).dim() == 2 else 1
    return Reductions.parse(text), OfReductions(
        x=_operand(x),
        weight=_operand(weight),
        bias=bias and _operand(bias),
        scaled=scale is not None,
        picks=of_row,
        given=tuple(value(w).dim() == 2 for w in given),
        logits=logits is not None,
    )


def _operand(node: Node) -> Operand:
    tensor = value(node)
    return Operand(tuple(map(hint, tensor.shape)), tensor.dtype)
