"""The Triton kernels of a rewritten graph, as they run on a GPU.

In: a rewritten Dynamo graph. Out: the launches of its operator calls, for its GPU or for the
one that :func:`fxpass.kernels.call.gpu_for_listing` names::

    %out = fxpass.class_reductions(%x, %w, ..., 'r6 gradients=x,weight total=pick')
    ->  the launch of the kernel for `total=pick`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpass.graph.nodes import hint, value
from fxpass.kernels.call import Gpu, Launch, for_reductions, gpu_for_listing, launches
from fxpass.spec.operands import Operands
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
        spec = replace(spec, shard=len(operands.weight) < node.kwargs["classes"])
        yield from _of_shard(of_forward(spec), operands, gpu)
        if spec.gradients:
            yield from _of_shard(of_backward(spec), operands, gpu, forward=False)


def _of_shard(
    call: Reductions, operands: Operands, gpu: Gpu, forward: bool = True
) -> tuple[Launch, ...]:
    return for_reductions(call, operands.read_by(call), gpu, forward)


def _of_reductions(call: Node) -> tuple[Reductions, Operands]:
    arguments: Any = torch.fx.map_arg(call.args, _without_data)
    x, weight, bias, scale, picks, given, *_, logits, text = arguments
    operands = Operands(x, weight, bias, scale, picks, tuple(given), logits=logits)
    return Reductions.parse(text), operands


def _without_data(node: Node) -> torch.Tensor:
    tensor = value(node)
    return torch.empty([hint(n) for n in tensor.shape], dtype=tensor.dtype, device="meta")
